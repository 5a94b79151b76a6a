// Every kernel against a reference that adds the same tree one element at a time.

#include "collective/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

namespace lockstep::collective {
namespace {

// The balanced tree: neighbours are added, level by level; an odd one out goes up as it is.
template <typename W>
W tree_sum(std::vector<W> level) {
  while (level.size() > 1) {
    std::vector<W> next;
    for (std::size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(level[i] + level[i + 1]);
    if (level.size() % 2 != 0) next.push_back(level.back());
    level = std::move(next);
  }
  return level[0];
}

std::vector<Simd> all_simd() {
  std::vector<Simd> all = {Simd::kPlain};
  if (best_simd() >= Simd::kAvx2) all.push_back(Simd::kAvx2);
  if (best_simd() >= Simd::kAvx512) all.push_back(Simd::kAvx512);
  return all;
}

template <typename T>
struct Buffers {
  std::vector<std::vector<T>> memory;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;

  Buffers(std::vector<std::vector<T>> values) : memory(std::move(values)) {  // NOLINT
    for (auto& one : memory) {
      inputs.push_back(one.data());
      outputs.push_back(one.data());
    }
  }

  void reduce_in_place(DataType type, Reduction reduction, Simd simd,
                       const std::vector<double>& factors = {}) {
    reduce({.type = type,
            .reduction = reduction,
            .num_inputs = static_cast<int>(memory.size()),
            .inputs = inputs.data(),
            .factors = factors.data(),
            .num_outputs = static_cast<int>(memory.size()),
            .outputs = outputs.data(),
            .count = memory[0].size()},
           simd);
  }
};

template <typename T>
std::vector<std::vector<T>> random_values(int ranks, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(ranks * 1000 + static_cast<int>(count)));
  std::uniform_real_distribution<double> uniform(-100, 100);
  std::vector<std::vector<T>> values(static_cast<std::size_t>(ranks));
  for (auto& one : values) {
    for (std::size_t i = 0; i < count; ++i) {
      const double value = uniform(random);
      if constexpr (std::is_unsigned_v<T>) {
        one.push_back(static_cast<T>(static_cast<int>(value)));  // wraps
      } else {
        one.push_back(static_cast<T>(value));
      }
    }
  }
  return values;
}

template <typename T>
void expect_tree_sum(DataType type, Reduction reduction) {
  for (const Simd simd : all_simd()) {
    for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33, 64}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7},
                                      std::size_t{511}, std::size_t{512}, std::size_t{1025}}) {
        const auto values = random_values<T>(ranks, count);
        Buffers<T> buffers(values);
        buffers.reduce_in_place(type, reduction, simd);
        for (std::size_t i = 0; i < count; ++i) {
          std::vector<T> column;
          for (const auto& one : values) column.push_back(one[i]);
          T expected = tree_sum(column);
          if (reduction == Reduction::kAverage) expected = expected / static_cast<T>(ranks);
          for (const auto& one : buffers.memory) {
            ASSERT_EQ(std::memcmp(&one[i], &expected, sizeof(T)), 0)
                << ranks << " ranks, element " << i << ": " << one[i] << " is not " << expected;
          }
        }
      }
    }
  }
}

TEST(Reduce, SumsAreTheBalancedTreeToTheBit) {
  expect_tree_sum<float>(DataType::kF32, Reduction::kSum);
  expect_tree_sum<double>(DataType::kF64, Reduction::kSum);
  expect_tree_sum<std::uint8_t>(DataType::kU8, Reduction::kSum);
  expect_tree_sum<std::uint64_t>(DataType::kU64, Reduction::kSum);
}

TEST(Reduce, AveragesAreTheSumDividedOnce) {
  expect_tree_sum<float>(DataType::kF32, Reduction::kAverage);
  expect_tree_sum<double>(DataType::kF64, Reduction::kAverage);
}

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// By the definition of the format, not by the kernel's tricks.
float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

// All 65536 numbers of a 16-bit format: adding zero must give each of them back.
void expect_round_trip(DataType type, const std::function<bool(std::uint16_t)>& is_nan) {
  for (const Simd simd : all_simd()) {
    std::vector<std::uint16_t> all;
    for (unsigned i = 0; i < 65536; ++i) all.push_back(static_cast<std::uint16_t>(i));
    // Negative zero is the neutral element of addition: -0 + -0 = -0, and 0 + -0 = 0.
    Buffers<std::uint16_t> buffers({all, std::vector<std::uint16_t>(65536, 0x8000)});
    buffers.reduce_in_place(type, Reduction::kSum, simd);
    for (unsigned i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      if (is_nan(bits)) {
        ASSERT_TRUE(is_nan(buffers.memory[0][i])) << i;
      } else {
        ASSERT_EQ(buffers.memory[0][i], bits) << i;
      }
    }
  }
}

TEST(Reduce, AnAverageMayBeOverMoreThanTheInputs) {
  for (const Simd simd : all_simd()) {
    for (const int num_inputs : {2, 3}) {
      std::vector<float> ones(1000, 1);
      const std::vector<const void*> inputs(static_cast<std::size_t>(num_inputs), ones.data());
      std::vector<float> result(1000);
      void* outputs[] = {result.data()};
      reduce({.reduction = Reduction::kAverage,
              .num_inputs = num_inputs,
              .inputs = inputs.data(),
              .num_outputs = 1,
              .outputs = outputs,
              .count = result.size(),
              .average_over = 4},
             simd);
      EXPECT_EQ(result, std::vector<float>(1000, static_cast<float>(num_inputs) / 4));
    }
  }
}

TEST(Reduce, EveryNumberOf16BitsSurvives) {
  expect_round_trip(DataType::kBF16,
                    [](std::uint16_t bits) { return std::isnan(from_bf16(bits)); });
  expect_round_trip(DataType::kF16, [](std::uint16_t bits) { return std::isnan(from_f16(bits)); });
}

// Rounding once, to the nearest, ties to even: no other number of the format may be closer.
void expect_nearest(DataType type, const std::function<float(std::uint16_t)>& widen) {
  std::mt19937 random(3);
  for (const Simd simd : all_simd()) {
    std::vector<std::vector<std::uint16_t>> values(3);
    for (auto& one : values) {
      for (int i = 0; i < 20000; ++i) {
        one.push_back(
            static_cast<std::uint16_t>(random() % (type == DataType::kF16 ? 0x7000 : 0x7000)));
      }
    }
    Buffers<std::uint16_t> buffers(values);
    buffers.reduce_in_place(type, Reduction::kSum, simd);
    for (std::size_t i = 0; i < 20000; ++i) {
      const float exact = (widen(values[0][i]) + widen(values[1][i])) + widen(values[2][i]);
      const std::uint16_t bits = buffers.memory[0][i];
      const double distance = std::abs(static_cast<double>(widen(bits)) - exact);
      for (const int step : {-1, 1}) {
        const auto other = static_cast<std::uint16_t>(bits + step);
        if (std::isinf(widen(other)) || std::isinf(widen(bits))) continue;
        const double other_distance = std::abs(static_cast<double>(widen(other)) - exact);
        ASSERT_LE(distance, other_distance) << exact;
        if (distance == other_distance) {
          ASSERT_EQ(bits % 2, 0) << "a tie went to the odd one: " << exact;
        }
      }
    }
  }
}

TEST(Reduce, HalvesAreAccumulatedInFullAndRoundedOnce) {
  expect_nearest(DataType::kBF16, from_bf16);
  expect_nearest(DataType::kF16, from_f16);
}

TEST(Reduce, HalvesOverflowToInfinity) {
  for (const Simd simd : all_simd()) {
    Buffers<std::uint16_t> buffers({{0x7bff, 0xfbff}, {0x7bff, 0xfbff}});  // 65504, -65504
    buffers.reduce_in_place(DataType::kF16, Reduction::kSum, simd);
    EXPECT_EQ(buffers.memory[1][0], 0x7c00);
    EXPECT_EQ(buffers.memory[1][1], 0xfc00);
    Buffers<std::uint16_t> average({{0x7bff}, {0x7bff}});
    average.reduce_in_place(DataType::kF16, Reduction::kAverage, simd);
    EXPECT_EQ(average.memory[0][0], 0x7bff) << "the sum is divided before it is rounded";
  }
}

TEST(Reduce, EveryScaledContributionHasItsOwnFactor) {
  for (const Simd simd : all_simd()) {
    Buffers<float> buffers({{1, 2}, {10, 20}, {100, 200}});
    buffers.reduce_in_place(DataType::kF32, Reduction::kScaledSum, simd, {0.5, 0.25, 2});
    EXPECT_EQ(buffers.memory[0][0], 203);
    EXPECT_EQ(buffers.memory[2][1], 406);
  }
}

TEST(Reduce, IntegersWrapAndCompare) {
  for (const Simd simd : all_simd()) {
    Buffers<std::int8_t> sum({{127, -128}, {1, -1}});
    sum.reduce_in_place(DataType::kI8, Reduction::kSum, simd);
    EXPECT_EQ(sum.memory[0], (std::vector<std::int8_t>{-128, 127}));
    Buffers<std::int16_t> product({{300, -2}, {300, 7}});
    product.reduce_in_place(DataType::kI16, Reduction::kProduct, simd);
    EXPECT_EQ(product.memory[0][0], static_cast<std::int16_t>(90000));
    EXPECT_EQ(product.memory[0][1], -14);
    Buffers<std::int32_t> least({{-5, 9}, {3, -9}, {0, 1}});
    least.reduce_in_place(DataType::kI32, Reduction::kMin, simd);
    EXPECT_EQ(least.memory[1], (std::vector<std::int32_t>{-5, -9}));
    Buffers<std::uint16_t> bits({{0b1100}, {0b1010}});
    bits.reduce_in_place(DataType::kU16, Reduction::kXor, simd);
    EXPECT_EQ(bits.memory[0][0], 0b0110);
    Buffers<std::uint8_t> truth({{0, 1, 0}, {0, 2, 1}});
    truth.reduce_in_place(DataType::kBool, Reduction::kSum, simd);
    EXPECT_EQ(truth.memory[0], (std::vector<std::uint8_t>{0, 1, 1}));
  }
}

TEST(Reduce, ANanWinsOverMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Simd simd : all_simd()) {
    for (const Reduction reduction : {Reduction::kMin, Reduction::kMax}) {
      Buffers<float> buffers({{nan, 1, 1}, {1, nan, 2}, {2, 2, nan}});
      buffers.reduce_in_place(DataType::kF32, reduction, simd);
      for (const float value : buffers.memory[0]) EXPECT_TRUE(std::isnan(value));
    }
  }
}

TEST(Reduce, WhatHasNoMeaningIsNotOffered) {
  EXPECT_FALSE(can_reduce(DataType::kF32, Reduction::kAnd));
  EXPECT_FALSE(can_reduce(DataType::kI32, Reduction::kAverage));
  EXPECT_FALSE(can_reduce(DataType::kC64, Reduction::kMax));
  EXPECT_FALSE(can_reduce(DataType::kBytes, Reduction::kSum));
  EXPECT_TRUE(can_reduce(DataType::kC64, Reduction::kSum));
  EXPECT_TRUE(can_reduce(DataType::kBool, Reduction::kOr));
}

}  // namespace
}  // namespace lockstep::collective
