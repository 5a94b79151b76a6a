// Seeds: the same run again, and ranks that do not all draw the same numbers.
#pragma once

#include <lockstep/export.h>
#include <lockstep/world.h>

#include <cstdint>

namespace lockstep {

// Seeds LibTorch's generators of this process. Rank 0 gets the seed itself, so its model is that of
// a single process, whatever the number of ranks, and DistributedDataParallel gives that model to
// all. The other ranks get seeds of their own: dropout and augmentation differ between ranks, and
// are the same in each run. With logical ranks (JoinOptions::logical_ranks), which have random
// numbers of their own, it is the seed of these. The same on all ranks.
LOCKSTEP_API void seed_all(std::uint64_t seed, const World& world);

// What seed_all seeds this rank with, for generators of the program's own: the seed itself on rank
// 0, another on each other rank, the same in each run. Programs with several generators per rank
// give each another seed.
LOCKSTEP_API std::uint64_t rank_seed(std::uint64_t seed, const World& world);

// Whether LibTorch uses only algorithms that give the same bits in each run; those that have none
// throw.
LOCKSTEP_API void deterministic(bool is_on);

}  // namespace lockstep
