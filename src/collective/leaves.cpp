#include "collective/leaves.h"

#include <cstdint>

namespace lockstep::collective {

Leaves leaves_of(int holder, int num_holders, int num_leaves) {
  const auto first_of = [&](std::int64_t one) {
    return static_cast<int>(one * num_leaves / num_holders);
  };
  return {.first = first_of(holder), .count = first_of(holder + 1) - first_of(holder)};
}

int holder_of(int leaf, int num_holders, int num_leaves) {
  int holder = 0;
  while (leaves_of(holder, num_holders, num_leaves).end() <= leaf) ++holder;
  return holder;
}

std::vector<Subtree> roots_of(const Leaves& held) {
  std::vector<Subtree> roots;
  for (int next = held.first; next < held.end();) {
    int size = 1;
    while (next % (2 * size) == 0 && next + 2 * size <= held.end()) size *= 2;
    roots.push_back({.first = next, .size = size});
    next += size;
  }
  return roots;
}

std::vector<Subtree> all_roots(int num_holders, int num_leaves) {
  std::vector<Subtree> roots;
  for (int holder = 0; holder < num_holders; ++holder) {
    for (const Subtree& root : roots_of(leaves_of(holder, num_holders, num_leaves))) {
      roots.push_back(root);
    }
  }
  return roots;
}

std::vector<std::uint8_t> merges_of(const std::vector<Subtree>& subtrees) {
  std::vector<std::uint8_t> merges;
  std::vector<Subtree> there;
  for (const Subtree& one : subtrees) {
    there.push_back(one);
    std::uint8_t num_merges = 0;
    while (there.size() > 1) {
      Subtree& left = there[there.size() - 2];
      const bool are_halves = left.size == there.back().size && left.first % (2 * left.size) == 0;
      if (!are_halves) break;
      left.size *= 2;
      there.pop_back();
      ++num_merges;
    }
    merges.push_back(num_merges);
  }
  return merges;
}

}  // namespace lockstep::collective
