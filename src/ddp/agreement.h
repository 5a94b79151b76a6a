// Agreement: whether all ranks have the same, and if not, who differs and in what.
#pragma once

#include <lockstep/world.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct NamedTensor;

// Collective. Throws MismatchError on all ranks if the lines differ: it shows the first line that
// does, as rank 0 and as the first other rank have it.
void check_same_lines(const World& world, const std::vector<std::string>& lines,
                      const std::string& what);

// A tensor whose bytes are not the same on all ranks.
struct Difference {
  std::size_t index = 0;
  std::vector<std::int64_t> ranks = {};  // that have not what rank 0 has
};
// By tensor, of its bytes. Not collective.
std::vector<std::int64_t> hashes_of(const std::vector<NamedTensor>& tensors);
std::uint64_t hash_of_all(const std::vector<std::int64_t>& hashes);
// Collective, with the same answer on all ranks.
std::vector<Difference> find_differences(const World& world,
                                         const std::vector<std::int64_t>& hashes);

// Collective. Throws MismatchError on all ranks if the bytes of the tensors differ between ranks:
// it names the first tensor, and the ranks.
void check_same_tensors(const World& world, const std::vector<NamedTensor>& tensors,
                        std::int64_t step);

}  // namespace lockstep
