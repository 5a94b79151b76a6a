// The test bench tests itself: what it reports of ranks that fail, hang, or are disturbed.

#include "support/run_ranks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iostream>

#include "support/fault_script.h"

namespace lockstep::test {
namespace {

TEST(RunRanks, EveryRankHasItsPlace) {
  const auto results = run_ranks(3, [](int rank) {
    EXPECT_EQ(std::getenv("RANK"), std::to_string(rank));
    EXPECT_STREQ(std::getenv("WORLD_SIZE"), "3");
    std::cout << "I am " << rank << std::endl;
  });
  EXPECT_TRUE(all_passed(results));
  ASSERT_EQ(results.size(), 3U);
  EXPECT_EQ(results[2].output, "I am 2\n");
}

TEST(RunRanks, AFailedExpectationFailsTheRank) {
  const auto results = run_ranks(2, [](int rank) { EXPECT_EQ(rank, 0); });
  EXPECT_FALSE(all_passed(results));
  EXPECT_TRUE(results[0].status.is_ok());
  EXPECT_EQ(results[1].status.code, 1);
  EXPECT_NE(results[1].output.find("Failure"), std::string::npos);
}

TEST(RunRanks, ARankThatReturnsAtAFailedAssertionHasFailed) {
  const auto results = run_ranks(2, [](int rank) {
    ASSERT_EQ(rank, 0);
    std::cout << "behind it" << std::endl;
  });
  EXPECT_TRUE(results[0].status.is_ok());
  EXPECT_EQ(results[1].status.code, 1);
  EXPECT_EQ(results[1].output.find("behind it"), std::string::npos);
}

// As one whose test is skipped, or has returned before.
TEST(RunRanks, ARankThatDoesNotReachTheCallHasFailed) {
  if (is_rank()) return;
  EXPECT_FALSE(all_passed(run_ranks(1, [](int) {}, {.must_exec = true})));
}

TEST(RunRanks, AHangingRankIsKilledAtTheDeadline) {
  const auto results = run_ranks(2, [](int rank) { ::sleep(rank == 1 ? 60U : 0U); },
                                 {.deadline = std::chrono::milliseconds(500)});
  EXPECT_FALSE(all_passed(results));
  EXPECT_TRUE(results[0].status.is_ok());
  EXPECT_TRUE(results[1].was_late);
  EXPECT_EQ(results[1].status.signal, SIGKILL);
}

TEST(RunRanks, AFaultScriptIsPlayed) {
  const auto script = FaultScript().kill_at(0, 2).exit_at(1, 1, 7).throw_at(2, 0);
  const auto results = run_ranks(3, [&](int rank) {
    for (int step = 0; step < 3; ++step) {
      script.play(rank, step);
      std::cout << step << std::flush;
    }
  });
  EXPECT_EQ(results[0].status.signal, SIGKILL);
  EXPECT_EQ(results[0].output, "01");
  EXPECT_EQ(results[1].status.code, 7);
  EXPECT_EQ(results[1].output, "0");
  EXPECT_EQ(results[2].status.code, 2);
  EXPECT_EQ(results[2].output, "a fault of the script\n");
}

TEST(RunRanks, ARankCanBeDisturbedFromOutside) {
  Ranks ranks(2, [](int rank) {
    std::cout << "ready" << std::endl;
    if (rank == 1) ::sleep(60);
  });
  ranks.wait_for_output(1, "ready");
  ranks.kill(1, SIGTERM);
  const auto results = ranks.wait();
  EXPECT_TRUE(results[0].status.is_ok());
  EXPECT_EQ(results[1].status.signal, SIGTERM);
}

}  // namespace
}  // namespace lockstep::test
