// Leaves: the logical ranks of a world, and how their contributions are summed, whoever holds them.
//
// The sum over leaves 0 to n - 1 is the tree of reduce.h over n inputs. A process holds a run of
// leaves. It sums what is complete of the tree, and gives the roots of these subtrees, at most
// 2 log2(n) of them; all roots together, in order, are summed to the root of the whole tree. So the
// bits do not depend on how leaves are shared out.
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::collective {

constexpr int kMaxLeaves = 1024;

struct Leaves {
  int first = 0;
  int count = 1;

  int end() const { return first + count; }
  bool operator==(const Leaves&) const = default;
};

// A complete subtree: `size` is a power of two, and `first` a multiple of it.
struct Subtree {
  int first = 0;
  int size = 1;

  bool operator==(const Subtree&) const = default;
};

// What each of `num_holders` holds: runs in their order, whose lengths differ by one at most.
// Requires: 0 <= holder < num_holders <= num_leaves.
Leaves leaves_of(int holder, int num_holders, int num_leaves);

// Who holds a leaf.
int holder_of(int leaf, int num_holders, int num_leaves);

// The largest complete subtrees of a run, from left to right.
std::vector<Subtree> roots_of(const Leaves& held);

// The roots of all holders, in order.
std::vector<Subtree> all_roots(int num_holders, int num_leaves);

// For subtrees that are added one after the other, each to the right of those before: how often the
// last two of what is there are added, after each of them (ReduceJob::merges). What is left at the
// end is more than one only if the run is no subtree.
std::vector<std::uint8_t> merges_of(const std::vector<Subtree>& subtrees);

}  // namespace lockstep::collective
