#include <ATen/Context.h>
#include <lockstep/seed.h>

#include "data/permutation.h"

namespace lockstep {

std::uint64_t rank_seed(std::uint64_t seed, const World& world) {
  const auto rank = static_cast<std::uint64_t>(world.rank());
  // Neighbouring seeds of neighbouring ranks must not meet.
  return rank == 0 ? seed : spread_bits(seed ^ spread_bits(rank));
}

void seed_all(std::uint64_t seed, const World& world) {
  world.set_seed(seed);
  at::manual_seed(rank_seed(seed, world));
}

void deterministic(bool is_on) {
  at::globalContext().setDeterministicAlgorithms(is_on, /*warn_only=*/false);
}

}  // namespace lockstep
