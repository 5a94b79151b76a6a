// Agreement: whether all ranks have the same, and if not, who differs and in what.
#pragma once

#include <lockstep/world.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct NamedTensor;

// A tensor whose bytes are not the same on all ranks.
struct Difference {
  std::size_t index = 0;
  std::vector<std::int64_t> ranks = {};  // that have not what rank 0 has, as errors name them
};
// By tensor, of its bytes. Not collective.
std::vector<std::int64_t> hashes_of(const std::vector<NamedTensor>& tensors);
std::uint64_t hash_of_all(const std::vector<std::int64_t>& hashes);
// Collective, with the same answer on all ranks.
bool has_same_tensors(const World& world, const std::vector<NamedTensor>& tensors);
std::vector<Difference> find_differences(const World& world,
                                         const std::vector<std::int64_t>& hashes);

// Collective. Throws MismatchError on all ranks if the bytes of the tensors differ between ranks:
// it names the first tensor, and the ranks.
void check_same_tensors(const World& world, const std::vector<NamedTensor>& tensors,
                        std::int64_t step);

}  // namespace lockstep
