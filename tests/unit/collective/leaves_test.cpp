// The tree over leaves, however they are shared out, against the tree over all of them in one
// place.

#include "collective/leaves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "collective/reduce.h"

namespace lockstep::collective {
namespace {

TEST(Leaves, AreSharedOutInOrder) {
  for (int leaves = 1; leaves <= 20; ++leaves) {
    for (int holders = 1; holders <= leaves; ++holders) {
      int next = 0;
      for (int holder = 0; holder < holders; ++holder) {
        const Leaves held = leaves_of(holder, holders, leaves);
        EXPECT_EQ(held.first, next);
        EXPECT_GE(held.count, leaves / holders);
        EXPECT_LE(held.count, (leaves + holders - 1) / holders);
        next = held.end();
      }
      EXPECT_EQ(next, leaves);
    }
  }
}

TEST(Leaves, RootsAreTheLargestCompleteSubtrees) {
  using Roots = std::vector<Subtree>;
  EXPECT_EQ(roots_of({.first = 0, .count = 8}), (Roots{{0, 8}}));
  EXPECT_EQ(roots_of({.first = 0, .count = 7}), (Roots{{0, 4}, {4, 2}, {6, 1}}));
  EXPECT_EQ(roots_of({.first = 1, .count = 7}), (Roots{{1, 1}, {2, 2}, {4, 4}}));
  EXPECT_EQ(roots_of({.first = 3, .count = 3}), (Roots{{3, 1}, {4, 2}}));
  EXPECT_EQ(all_roots(3, 8), (Roots{{0, 2}, {2, 2}, {4, 1}, {5, 1}, {6, 2}}));
  EXPECT_EQ(all_roots(4, 8), (Roots{{0, 2}, {2, 2}, {4, 2}, {6, 2}}));
}

using Numbers = std::vector<float>;

Numbers reduced(const std::vector<Numbers>& inputs, const std::vector<std::uint8_t>* merges,
                int average_over, Simd simd) {
  std::vector<const void*> pointers;
  for (const Numbers& one : inputs) pointers.push_back(one.data());
  Numbers result(inputs.front().size());
  void* const output = result.data();
  reduce({.type = DataType::kF32,
          .reduction = Reduction::kAverage,
          .num_inputs = static_cast<int>(inputs.size()),
          .inputs = pointers.data(),
          .num_outputs = 1,
          .outputs = &output,
          .count = result.size(),
          .average_over = average_over,
          .merges = merges == nullptr ? nullptr : merges->data()},
         simd);
  return result;
}

Numbers sum_of(const Numbers& a, const Numbers& b) {
  Numbers sum;
  for (std::size_t i = 0; i < a.size(); ++i) sum.push_back(a[i] + b[i]);
  return sum;
}

// As a rank does, one leaf after the other: what is left are the roots.
std::vector<Numbers> sums_of_run(const std::vector<Numbers>& leaves, const Leaves& held) {
  std::vector<Subtree> each;
  for (int leaf = held.first; leaf < held.end(); ++leaf) each.push_back({leaf, 1});
  const auto merges = merges_of(each);
  std::vector<Numbers> stack;
  for (std::size_t i = 0; i < each.size(); ++i) {
    stack.push_back(leaves[static_cast<std::size_t>(each[i].first)]);
    for (int merge = 0; merge < merges[i]; ++merge) {
      const Numbers right = std::move(stack.back());
      stack.pop_back();
      stack.back() = sum_of(stack.back(), right);
    }
  }
  EXPECT_EQ(stack.size(), roots_of(held).size());
  return stack;
}

bool are_same_bits(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<Numbers> random_leaves(std::mt19937& random, int count, std::size_t length) {
  std::uniform_real_distribution<float> uniform(-100, 100);
  std::vector<Numbers> leaves(static_cast<std::size_t>(count), Numbers(length));
  for (Numbers& one : leaves) std::ranges::generate(one, [&] { return uniform(random); });
  return leaves;
}

TEST(Leaves, AnyLayoutHasTheBitsOfAll) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const int count = std::uniform_int_distribution(1, 70)(random);
    const auto leaves = random_leaves(random, count, 37);
    const Numbers expected = reduced(leaves, nullptr, count, best_simd());
    // Cut anywhere, not only evenly.
    std::vector<int> cuts(static_cast<std::size_t>(count) - 1);
    std::iota(cuts.begin(), cuts.end(), 1);
    std::ranges::shuffle(cuts, random);
    cuts.resize(std::uniform_int_distribution<std::size_t>(0, cuts.size())(random));
    cuts.push_back(0);
    cuts.push_back(count);
    std::ranges::sort(cuts);
    std::vector<Numbers> sums;
    std::vector<Subtree> roots;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      const Leaves held{.first = cuts[i], .count = cuts[i + 1] - cuts[i]};
      for (Numbers& one : sums_of_run(leaves, held)) sums.push_back(std::move(one));
      for (const Subtree& one : roots_of(held)) roots.push_back(one);
    }
    ASSERT_EQ(sums.size(), roots.size());
    const auto merges = merges_of(roots);
    for (const Simd simd : {Simd::kPlain, best_simd()}) {
      EXPECT_TRUE(are_same_bits(reduced(sums, &merges, count, simd), expected)) << round;
    }
  }
}

TEST(Leaves, AnotherOrderHasOtherBits) {
  std::mt19937 random(8);
  const auto leaves = random_leaves(random, 8, 1000);
  const Numbers expected = reduced(leaves, nullptr, 8, best_simd());
  Numbers one_by_one = leaves[0];
  for (std::size_t i = 1; i < leaves.size(); ++i) one_by_one = sum_of(one_by_one, leaves[i]);
  for (float& value : one_by_one) value /= 8;
  EXPECT_FALSE(are_same_bits(one_by_one, expected));
}

TEST(Leaves, TheLargestTreeFits) {
  std::mt19937 random(9);
  const auto leaves = random_leaves(random, kMaxLeaves, 5);
  std::vector<Subtree> each;
  for (int leaf = 0; leaf < kMaxLeaves; ++leaf) each.push_back({leaf, 1});
  const auto merges = merges_of(each);
  const Numbers whole = reduced(leaves, &merges, kMaxLeaves, best_simd());
  EXPECT_TRUE(are_same_bits(whole, reduced(leaves, nullptr, kMaxLeaves, Simd::kPlain)));
}

}  // namespace
}  // namespace lockstep::collective
