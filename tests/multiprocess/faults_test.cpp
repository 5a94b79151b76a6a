// Ranks that die, stop or stay away in the middle of work: the others hear of it, in time.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <iostream>

#include "support/fault_script.h"
#include "support/run_ranks.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::FaultScript;
using test::run_ranks;

void train(const FaultScript& script, int rank, milliseconds timeout) {
  const World world = World::join({.timeout = timeout});
  for (int step = 0; step < 5; ++step) {
    script.play(rank, step);
    world.all_reduce(at::ones({1000}));
  }
}

// Rank 1 is lost at step 2; every other rank must name it.
void expect_lost(const FaultScript& script) {
  const auto results = run_ranks(3, [&](int rank) {
    if (rank == 1) return train(script, rank, seconds(30));
    try {
      train(script, rank, seconds(30));
      ADD_FAILURE() << "went on without rank 1";
    } catch (const PeerLostError& error) {
      std::cout << error.what() << std::endl;
      // The first to fail may be lost to the next one before that sees why; both are told apart.
      EXPECT_GE(error.peer(), 0);
      EXPECT_NE(error.message().find("all_reduce of Float[1000], 4000 bytes lost rank"),
                std::string::npos);
    }
  });
  EXPECT_TRUE(results[0].status.is_ok()) << test::show(results);
  EXPECT_TRUE(results[2].status.is_ok()) << test::show(results);
  EXPECT_FALSE(results[1].status.is_ok());
}

TEST(Faults, AKilledRank) { expect_lost(FaultScript().kill_at(1, 2)); }
TEST(Faults, ARankThatExits) { expect_lost(FaultScript().exit_at(1, 2, 7)); }
TEST(Faults, ARankThatThrows) { expect_lost(FaultScript().throw_at(1, 2)); }

TEST(Faults, AStoppedRankIsATimeout) {
  const auto script = FaultScript().stop_at(1, 2);
  test::Ranks ranks(2, [&](int rank) {
    try {
      train(script, rank, milliseconds(1000));
      ADD_FAILURE() << "went on without rank 1";
    } catch (const TimeoutError& error) {
      std::cout << error.what() << std::endl;
    }
  });
  ranks.wait_for_output(0, "waited too long for another rank");
  ranks.kill(1, SIGKILL);
  EXPECT_TRUE(ranks.wait()[0].status.is_ok());
}

TEST(Faults, ARankThatStaysAwayIsATimeout) {
  const auto results = run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = milliseconds(1000)});
    if (rank == 1) {
      std::this_thread::sleep_for(seconds(4));
      return;
    }
    EXPECT_THROW(world.barrier(), TimeoutError);
  });
  EXPECT_TRUE(test::all_passed(results));
}

}  // namespace
}  // namespace lockstep
