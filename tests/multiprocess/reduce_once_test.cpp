// reduce_once through a World's backend: ranks are processes, and the output is memory that they
// map.

#include "engine/reduce_once.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <array>
#include <vector>

#include "support/run_ranks.h"
#include "support/shared_arena.h"

namespace lockstep::test {
namespace {

class ReduceOnceRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ReduceOnceRanks, testing::Values(1, 2, 3, 4),
                         testing::PrintToStringParamName());

// As buckets of gradients go: two places for inputs in turn, the means one behind the other.
TEST_P(ReduceOnceRanks, GivesTheMeanOfABucketOnceInMemoryOfTheHost) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join({.engine = "shm"});
    c10d::Backend& engine = *world.backend();
    ASSERT_TRUE(can_reduce_once(engine));
    const std::vector<std::int64_t> lengths = {1, 1000, 700001, 63, 300000, 5000, 0, 900000};
    constexpr std::int64_t kLongest = 900000;
    constexpr std::int64_t kTotal = 1 + 1000 + 700001 + 63 + 300000 + 5000 + 900000;
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      for (const bool is_engine_memory : {true, false}) {
        const SharedArena shared(world, kTotal * 4);
        const at::Tensor arena = shared.tensor(kTotal, type);
        std::array<at::Tensor, 2> ring;
        for (at::Tensor& place : ring) {
          place = is_engine_memory ? engine.allocateTensor(kLongest, type)
                                   : at::empty({kLongest}, type);
        }
        at::manual_seed(rank);
        std::vector<at::Tensor> inputs;
        std::vector<at::Tensor> expected;
        for (const std::int64_t length : lengths) {
          inputs.push_back(at::randn({length}).to(type));
          expected.push_back(world.all_reduce(inputs.back().clone(), ReduceOp::AVG));
        }
        std::vector<at::Tensor> results;
        std::vector<c10::intrusive_ptr<c10d::Work>> works;
        std::int64_t first = 0;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
          if (i >= 2) {
            works[i - 2]->wait();
            ASSERT_TRUE(at::equal(results[i - 2], expected[i - 2])) << i - 2;
          }
          const at::Tensor place = ring[i % 2].slice(0, 0, lengths[i]).copy_(inputs[i]);
          results.push_back(arena.slice(0, first, first + lengths[i]));
          first += lengths[i];
          works.push_back(start_reduce_once(engine, place, results[i], ReduceOp::AVG));
        }
        for (std::size_t i = 0; i < lengths.size(); ++i) {
          works[i]->wait();
          ASSERT_TRUE(at::equal(results[i], expected[i])) << i;
        }
      }
    }
  })));
}

TEST(ReduceOnceCalls, WhatItCannotTakeIsRefusedAndLeavesTheEngineUsable) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    const SharedArena shared(world, 4096);
    const at::Tensor output = shared.tensor(10, at::kFloat);
    const at::Tensor input = at::full({10}, rank + 1.0F);
    const auto expect_refused = [&](const at::Tensor& in, const at::Tensor& out,
                                    const c10d::ReduceOp& op, const std::string& message) {
      try {
        start_reduce_once(*world.backend(), in, out, op);
        ADD_FAILURE() << message;
      } catch (const UsageError& error) {
        EXPECT_EQ(error.rank(), rank);
        EXPECT_NE(error.message().find(message), std::string::npos) << error.what();
      }
    };
    const at::Tensor gaps = at::zeros({20}).slice(0, 0, 20, 2);
    const at::Tensor imaginary = at::zeros({10}, at::kComplexFloat);
    if (rank == 0) {  // the other hears nothing of it
      expect_refused({}, output, ReduceOp::SUM, "which the input is not");
      expect_refused(gaps, output, ReduceOp::SUM, "which the input is not");
      expect_refused(input, gaps, ReduceOp::SUM, "which the output is not");
      expect_refused(input.to_sparse(), output, ReduceOp::SUM, "which the input is not");
      expect_refused(input, at::zeros({10}, at::kMeta), ReduceOp::SUM, "which the output is not");
      expect_refused(imaginary, imaginary.clone().conj(), ReduceOp::SUM, "which the output is not");
      expect_refused(input, output.slice(0, 0, 9), ReduceOp::SUM,
                     "an input of 10 elements of Float and an output of 9 elements of Float");
      expect_refused(input.to(at::kDouble), output, ReduceOp::SUM,
                     "an input of 10 elements of Double and an output of 10 elements of Float");
      expect_refused(output.slice(0, 0, 9), output.slice(0, 1, 10), ReduceOp::SUM, "overlaps");
      expect_refused(input.to(at::kInt), output.view(at::kInt), ReduceOp::AVG,
                     "a reduction that they do not have (average)");
    }
    start_reduce_once(*world.backend(), input, output, c10d::makePreMulSum(0.5))->wait();
    EXPECT_TRUE(at::equal(output, at::full({10}, 1.5F)));
  })));
}

// The operation is then the last owner of the input.
TEST(ReduceOnceCalls, WorkAndInputMayGoBeforeTheOperationEnds) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    const SharedArena shared(world, 300000 * 4);
    const at::Tensor output = shared.tensor(300000, at::kFloat);
    for (int i = 0; i < 20; ++i) {
      {
        const at::Tensor input = world.backend()->allocateTensor(300000, at::kFloat);
        start_reduce_once(*world.backend(), input.fill_(rank + i), output, ReduceOp::SUM);
      }
      // In the first one all chunks are taken, and a rank that comes to the second has done its
      // own.
      world.barrier();
      world.barrier();
      ASSERT_TRUE(at::equal(output, at::full({300000}, 2.0F * static_cast<float>(i) + 1)));
    }
  })));
}

}  // namespace
}  // namespace lockstep::test
