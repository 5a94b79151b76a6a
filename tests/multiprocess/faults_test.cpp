// Ranks that die, stop or stay away in the middle of work: the others hear of it, in time.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <iostream>

#include "support/fault_script.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Faults : public testing::TestWithParam<std::string> {
 protected:
  // The hierarchical engine has the last rank on another host.
  static RankOptions options(int size) {
    if (GetParam() != "hierarchical") return {};
    return on_hosts(std::string(static_cast<std::size_t>(size - 1), 'a') + "b");
  }

  void train(const FaultScript& script, int rank, milliseconds timeout) {
    const World world = World::join({.engine = GetParam(), .timeout = timeout});
    for (int step = 0; step < 5; ++step) {
      script.play(rank, step);
      world.all_reduce(at::ones({1000}));
    }
    ADD_FAILURE() << "went on without rank 1";
  }

  // Rank 1 is lost at step 2; every other rank must name it, within a second.
  void expect_lost(const FaultScript& script, const std::string& how) {
    const auto body = [&](int rank) {
      if (rank == 1) return train(script, rank, seconds(30));
      try {
        train(script, rank, seconds(30));
      } catch (const PeerLostError& error) {
        std::cout << error.what() << std::endl;
        EXPECT_EQ(error.peer(), 1);
        EXPECT_NE(error.message().find("all_reduce of"), std::string::npos);
        EXPECT_NE(error.message().find("rank 1 ("), std::string::npos);
        // Gloo knows only that a connection broke.
        if (GetParam() != "gloo") {
          EXPECT_NE(error.message().find(how), std::string::npos);
        }
      }
      // Stay until the other has seen it too, which would else be right to name this rank.
      std::this_thread::sleep_for(seconds(2));
    };
    const auto results = run_ranks(3, body, options(3));
    EXPECT_TRUE(results[0].status.is_ok()) << show(results);
    EXPECT_TRUE(results[2].status.is_ok()) << show(results);
    EXPECT_FALSE(results[1].status.is_ok());
    EXPECT_LT(std::max(results[0].seconds, results[2].seconds), results[1].seconds + 2 + 5);
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, Faults, testing::Values("shm", "gloo", "hierarchical"),
                         [](const auto& test) { return test.param; });

TEST_P(Faults, AKilledRank) {
  expect_lost(FaultScript().kill_at(1, 2), "was killed by signal 9 (Killed)");
}
TEST_P(Faults, ARankThatExits) {
  expect_lost(FaultScript().exit_at(1, 2, 7), "exited with code 7");
}
TEST_P(Faults, ARankThatThrows) {
  expect_lost(FaultScript().throw_at(1, 2), "has left this world");
}

TEST_P(Faults, AStoppedRankIsATimeout) {
  const auto script = FaultScript().stop_at(1, 2);
  const auto body = [&](int rank) {
    try {
      train(script, rank, milliseconds(1000));
    } catch (const TimeoutError& error) {
      std::cout << error.what() << std::endl;
    }
  };
  Ranks ranks(2, body, options(2));
  ranks.wait_for_output(0, "lockstep error on rank 0");
  ranks.kill(1, SIGKILL);
  EXPECT_TRUE(ranks.wait()[0].status.is_ok());
}

TEST_P(Faults, ARankThatStaysAwayIsATimeout) {
  const auto body = [&](int rank) {
    const World world = World::join({.engine = GetParam(), .timeout = milliseconds(1000)});
    if (rank == 1) {
      std::this_thread::sleep_for(seconds(4));
      return;
    }
    EXPECT_THROW(world.barrier(), TimeoutError);
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, options(2))));
}

}  // namespace
}  // namespace lockstep::test
