// c10d's shrink on our engines: the ranks that are left have an engine, after a planned change and
// after a death.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <lockstep/world.h>
#include <unistd.h>

#include <csignal>

#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

float sum_over(const Backend& engine, float mine) {
  std::vector<at::Tensor> tensors = {at::full({1000}, mine)};
  engine->allreduce(tensors)->wait();
  return tensors[0][999].item<float>();
}

class Shrink : public testing::TestWithParam<const char*> {};

TEST_P(Shrink, PlannedTheLastAndTheMiddleAndToOne) {
  const auto results = run_ranks(
      4,
      [](int rank) {
        const World world = World::join();
        ASSERT_TRUE(world.backend()->supportsShrinking());
        if (rank == 3) return;
        const Backend three = world.backend()->shrink({3});
        EXPECT_EQ(three->getSize(), 3);
        EXPECT_EQ(three->getRank(), rank);
        EXPECT_EQ(sum_over(three, static_cast<float>(1 << rank)), 7);
        if (rank == 1) return;
        const Backend two = three->shrink({1});
        EXPECT_EQ(two->getRank(), rank / 2);
        EXPECT_EQ(sum_over(two, static_cast<float>(1 << rank)), 5);
        if (rank == 0) return;
        EXPECT_EQ(sum_over(two->shrink({0}), 9), 9);
      },
      on_hosts(GetParam()));
  EXPECT_TRUE(all_passed(results));
}

TEST_P(Shrink, AfterADeath) {
  const auto results = run_ranks(
      4,
      [](int rank) {
        const World world = World::join();
        world.barrier();
        if (rank == 1) ::raise(SIGKILL);
        EXPECT_THROW(sum_over(world.backend(), 1), std::exception);
        const Backend left = world.backend()->shrink({1});
        EXPECT_EQ(left->getSize(), 3);
        EXPECT_EQ(sum_over(left, static_cast<float>(1 << rank)), 13);
      },
      on_hosts(GetParam()));
  for (const int rank : {0, 2, 3}) {
    EXPECT_TRUE(results[static_cast<std::size_t>(rank)].status.is_ok()) << show(results);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Shrink, testing::Values("aaaa", "aabb"));

TEST(ShrinkCalls, ThatMakeNoSenseAreRefused) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    const auto refusal = [&](const std::vector<std::int64_t>& ranks) -> std::string {
      try {
        world.backend()->shrink(ranks);
      } catch (const UsageError& error) {
        return error.message();
      }
      return {};
    };
    EXPECT_TRUE(has(refusal({}), "there is none"));
    EXPECT_TRUE(has(refusal({rank}), "this is one of them"));
    EXPECT_TRUE(has(refusal({1 - rank, 1 - rank}), "one is there twice"));
    EXPECT_TRUE(has(refusal({2}), "there is no such rank"));
    EXPECT_TRUE(has(refusal({-1}), "there is no such rank"));
    world.barrier();
  })));
}

}  // namespace
}  // namespace lockstep::test
