// reduce_once of the shared-memory engine, with ranks as threads (also under TSan). They share all
// memory, so that the output of all ranks is simply one array.

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "shm/group.h"
#include "unit/shm/thread_ranks.h"

namespace lockstep::shm {
namespace {

using collective::size_of;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kManyPieces = 300001;  // of f32: two whole pieces and a rest
constexpr int kMostRanks = 4;
constexpr auto kUntouched = std::byte{0xa5};

struct Sum {
  DataType type = DataType::kF32;
  Reduction reduction = Reduction::kSum;
  std::size_t count = 0;

  std::size_t bytes() const { return count * size_of(type); }
  std::string text() const {
    return std::string(collective::name_of(type)) + "[" + std::to_string(count) + "], " +
           collective::name_of(reduction);
  }
};

Operation operation_for(Kind kind, const Sum& sum, void* input, void* output) {
  Operation operation;
  operation.kind = kind;
  operation.type = sum.type;
  operation.reduction = sum.reduction;
  operation.count = sum.count;
  operation.input.base = static_cast<std::byte*>(input);
  operation.output.base = static_cast<std::byte*>(output);
  return operation;
}

Operation once(const Sum& sum, void* input, void* output) {
  return operation_for(Kind::kReduceOnce, sum, input, output);
}

void run_to_end(Group& group, Operation operation) {
  group.wait(*group.start(std::move(operation)));
}

// What a rank gives: numbers whose sums are rounded. Of integers, all bits.
const std::vector<float>& numbers_of(int rank) {
  static const auto all = [] {
    std::array<std::vector<float>, kMostRanks> numbers;
    std::mt19937 random(3);  // NOLINT: the same in every run
    std::normal_distribution<float> normal;
    for (auto& of_rank : numbers) {
      for (std::size_t i = 0; i < kManyPieces; ++i) of_rank.push_back(normal(random));
    }
    return numbers;
  }();
  return all[static_cast<std::size_t>(rank)];
}

Bytes input_of_rank(int rank, const Sum& sum) {
  const std::vector<float>& numbers = numbers_of(rank);
  Bytes bytes(sum.bytes());
  const auto* source = reinterpret_cast<const std::byte*>(numbers.data());
  for (std::size_t i = 0; i < sum.count; ++i) {
    std::byte* target = bytes.data() + i * size_of(sum.type);
    if (sum.type == DataType::kF64) {
      const double wide = numbers[i] / 3.0;
      std::memcpy(target, &wide, sizeof wide);
    } else if (sum.type == DataType::kBF16) {  // the upper half, on a little-endian machine
      std::memcpy(target, source + i * sizeof(float) + 2, 2);
    } else {
      std::memcpy(target, source + i % (kManyPieces / 2) * sizeof(float), size_of(sum.type));
    }
  }
  return bytes;
}

std::vector<Sum> all_sums() {
  std::vector<Sum> sums;
  for (const DataType type : {DataType::kF32, DataType::kBF16, DataType::kF64, DataType::kI32,
                              DataType::kI64, DataType::kU8}) {
    for (const Reduction reduction :
         {Reduction::kSum, Reduction::kAverage, Reduction::kScaledSum, Reduction::kMax}) {
      if (!collective::can_reduce(type, reduction)) continue;
      for (const std::size_t count : {0, 1, 63, 1000}) sums.push_back({type, reduction, count});
    }
  }
  for (const Reduction reduction : {Reduction::kSum, Reduction::kAverage}) {
    sums.push_back({DataType::kF32, reduction, 5000});
    sums.push_back({DataType::kF32, reduction, kManyPieces});
    sums.push_back({DataType::kBF16, reduction, kManyPieces});
  }
  sums.push_back({DataType::kI64, Reduction::kMax, kManyPieces});
  return sums;
}

class ReduceOnceGroupSizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ReduceOnceGroupSizes, testing::Range(1, kMostRanks + 1));

// Inputs that are read where they are (in areas), inputs that are copied, and both.
TEST_P(ReduceOnceGroupSizes, HasTheBitsOfAllReduce) {
  const std::vector<Sum> sums = all_sums();
  Bytes output(kManyPieces * 8 + 1, kUntouched);
  for (const int num_shared : {0, 1, GetParam()}) {
    run_threads(GetParam(), [&](Group& group) {
      const bool is_shared = group.rank() < num_shared;
      for (const Sum& sum : sums) {
        SCOPED_TRACE(sum.text());
        const Bytes given = input_of_rank(group.rank(), sum);
        Bytes own = given;
        std::byte* memory = is_shared ? group.allocate(sum.bytes()) : own.data();
        std::copy(given.begin(), given.end(), memory);
        Operation operation = once(sum, memory, output.data());
        operation.factor = 0.3 + group.rank();
        run_to_end(group, operation);
        // Nobody writes here before this rank has started the next one.
        const Bytes result(output.begin(),
                           output.begin() + static_cast<std::ptrdiff_t>(sum.bytes()));
        EXPECT_TRUE(std::equal(given.begin(), given.end(), memory)) << "an input was written";
        operation.kind = Kind::kAllReduce;
        operation.output = operation.input;
        run_to_end(group, operation);
        EXPECT_TRUE(std::equal(result.begin(), result.end(), memory));
        if (is_shared) group.release(memory);
      }
    });
  }
  EXPECT_EQ(output.back(), kUntouched) << "wrote behind the end";
}

// In this test alone each rank has an output of its own, which shows who wrote what.
TEST_P(ReduceOnceGroupSizes, EachElementIsWrittenByOneRank) {
  const int size = GetParam();
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{63}, std::size_t{1000}, kManyPieces}) {
    std::vector<std::vector<float>> outputs(static_cast<std::size_t>(size),
                                            std::vector<float>(count, -1));
    run_threads(size, [&](Group& group) {
      std::vector<float> input(count, 1);
      std::vector<float>& output = outputs[static_cast<std::size_t>(group.rank())];
      run_to_end(group, once({.count = count}, input.data(), output.data()));
    });
    std::size_t num_wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      int num_writers = 0;
      for (const auto& output : outputs) num_writers += output[i] == static_cast<float>(size);
      num_wrong += num_writers != 1;
    }
    EXPECT_EQ(num_wrong, 0) << count;
  }
}

// Many in flight, while two places for inputs are used in turn: an input is written again as soon
// as its operation is done, and its output is read at once.
TEST_P(ReduceOnceGroupSizes, ARingOfTwoInputsIsEnough) {
  constexpr std::size_t kBuckets = 12;
  constexpr std::size_t kRounds = 8;
  constexpr std::size_t kMost = 150000;  // more than a piece
  const auto count_of = [](std::size_t bucket) {
    return bucket % 3 == 0 ? kMost : bucket % 3 == 1 ? std::size_t{1} + bucket : std::size_t{5000};
  };
  const auto size = static_cast<float>(GetParam());
  std::vector<std::vector<float>> arena(kBuckets);
  for (std::size_t i = 0; i < kBuckets; ++i) arena[i].assign(count_of(i), -1);
  run_threads(GetParam(), [&](Group& group) {
    std::array<float*, 2> ring{};
    for (float*& place : ring) place = reinterpret_cast<float*>(group.allocate(kMost * 4));
    std::array<std::shared_ptr<collective::Request>, kBuckets> requests;
    // Rank r gives 1 + r + bucket + round everywhere.
    const auto expected = [&](std::size_t bucket, std::size_t round) {
      return size * static_cast<float>(1 + bucket + round) + size * (size - 1) / 2;
    };
    const auto finish = [&](std::size_t bucket, std::size_t round) {
      group.wait(*requests[bucket]);
      const auto& result = arena[bucket];
      ASSERT_EQ(static_cast<std::size_t>(std::ranges::count(result, expected(bucket, round))),
                result.size());
    };
    for (std::size_t round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < kBuckets; ++i) {
        if (i >= 2) finish(i - 2, round);
        std::fill_n(ring[i % 2], count_of(i),
                    static_cast<float>(1 + group.rank()) + static_cast<float>(i + round));
        requests[i] = group.start(once({.count = count_of(i)}, ring[i % 2], arena[i].data()));
        if ((i + round) % 4 == static_cast<std::size_t>(group.rank())) std::this_thread::yield();
        if (i % 2 == 0) group.poll(*requests[i]);
      }
      finish(kBuckets - 2, round);
      finish(kBuckets - 1, round);
    }
  });
}

TEST_P(ReduceOnceGroupSizes, InputAndOutputMayBeTheSameOnOneRank) {
  constexpr std::size_t kCount = 200000;
  std::vector<float> output(kCount, 1);
  run_threads(GetParam(), [&](Group& group) {
    std::vector<float> own(kCount, static_cast<float>(1 + group.rank()));
    float* input = group.rank() == 0 ? output.data() : own.data();
    run_to_end(group, once({.count = kCount}, input, output.data()));
    const int size = group.size();
    const auto sum = static_cast<float>(size * (size + 1)) / 2;
    ASSERT_EQ(std::ranges::count(output, sum), static_cast<std::ptrdiff_t>(kCount));
  });
}

TEST(ReduceOnce, AWaitingRankDoesTheChunksOfALateOne) {
  std::vector<float> output(kManyPieces, -1);
  std::atomic<bool> has_started{false};
  std::atomic<bool> is_done{false};
  run_threads(2, [&](Group& group) {
    auto* input = reinterpret_cast<float*>(group.allocate(kManyPieces * 4));
    std::fill_n(input, kManyPieces, 1.0F);
    if (group.rank() == 1) {
      const auto request = group.start(once({.count = kManyPieces}, input, output.data()));
      has_started = true;
      while (!is_done) std::this_thread::yield();
      group.wait(*request);
    } else {
      while (!has_started) std::this_thread::yield();
      Operation operation = once({.count = kManyPieces}, input, output.data());
      operation.timeout = std::chrono::seconds(20);
      run_to_end(group, operation);
      EXPECT_EQ(std::ranges::count(output, 2.0F), static_cast<std::ptrdiff_t>(kManyPieces));
      is_done = true;
    }
    run_to_end(group, Operation{});
  });
}

TEST(ReduceOnce, DifferentCallsAreAnErrorOnAllRanks) {
  const auto expect_on_all = [](const std::function<Operation(int rank, float* output)>& make,
                                const std::string& message) {
    std::atomic<int> num_errors{0};
    std::vector<float> output(100, -1);
    run_threads(3, [&](Group& group) {
      std::vector<float> input(100);
      Operation operation = make(group.rank(), output.data());
      operation.input.base = reinterpret_cast<std::byte*>(input.data());
      try {
        run_to_end(group, operation);
        ADD_FAILURE();
      } catch (const MismatchError& error) {
        ++num_errors;
        EXPECT_NE(error.message().find(message), std::string::npos) << error.what();
      }
    });
    EXPECT_EQ(num_errors, 3);
    EXPECT_EQ(std::ranges::count(output, -1.0F), 100) << "written before all agreed";
  };
  expect_on_all(
      [](int rank, float* output) {
        return once({.count = rank == 2 ? 99U : 100U}, nullptr, output);
      },
      "reduce_once of f32[100], 400 bytes on rank 0, but reduce_once of f32[99], 396 bytes on "
      "rank 2");
  expect_on_all(
      [](int rank, float* output) {
        return operation_for(rank == 1 ? Kind::kAllReduce : Kind::kReduceOnce, {.count = 100},
                             nullptr, output);
      },
      "reduce_once of f32[100], 400 bytes on rank 0, but all_reduce of f32[100], 400 bytes on rank "
      "1");
}

TEST(ReduceOnce, ARankThatLeavesIsNamed) {
  std::atomic<int> num_errors{0};
  std::vector<float> output(kManyPieces);
  run_threads(3, [&](Group& group) {
    if (group.rank() == 1) return;  // leaves
    std::vector<float> input(kManyPieces);
    try {
      run_to_end(group, once({.count = kManyPieces}, input.data(), output.data()));
      ADD_FAILURE();
    } catch (const PeerLostError& error) {
      ++num_errors;
      EXPECT_EQ(error.peer(), 1);
      EXPECT_NE(error.message().find("reduce_once of f32[300001], 1200004 bytes"),
                std::string::npos)
          << error.what();
    }
  });
  EXPECT_EQ(num_errors, 2);
}

TEST(ReduceOnce, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  std::vector<float> output(100);
  run_threads(2, [&](Group& group) {
    std::vector<float> input(100);
    const auto expect_refused = [&](const Operation& operation, const std::string& message) {
      try {
        group.start(operation);
        ADD_FAILURE() << message;
      } catch (const UsageError& error) {
        EXPECT_EQ(error.rank(), group.rank());
        EXPECT_EQ(error.operation(), "reduce_once");
        EXPECT_NE(error.message().find(message), std::string::npos) << error.what();
      }
    };
    const Sum sum{.count = 99};
    expect_refused(once(sum, nullptr, output.data()), "no input or no output");
    expect_refused(once(sum, input.data(), nullptr), "no input or no output");
    expect_refused(once(sum, input.data(), input.data() + 1), "overlaps");
    expect_refused(once(sum, input.data() + 1, input.data()), "overlaps");
    expect_refused(once({.reduction = Reduction::kXor, .count = 99}, input.data(), output.data()),
                   "no xor of f32");
    expect_refused(once({.reduction = Reduction::kNone, .count = 99}, input.data(), output.data()),
                   "no none of f32");
    run_to_end(group, once({}, nullptr, nullptr));  // of no elements, nothing is needed
  });
}

}  // namespace
}  // namespace lockstep::shm
