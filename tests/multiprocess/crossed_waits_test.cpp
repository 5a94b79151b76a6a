// Ranks that wait for each other in different calls, of one world or of several made from it: an
// error on all ranks, at once, that names both sides. And programs that are only slow: no error.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <random>
#include <thread>

#include "support/mismatch.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class CrossedWaits : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int kSize = 3;
  static RankOptions options() { return on_hosts(GetParam()); }
  static World join() { return World::join({.timeout = seconds(60)}); }

  using Call = std::function<void(const World& world)>;
  static void expect_crossed(const Call& on_rank0, const Call& on_others,
                             const std::vector<std::string>& words) {
    const auto body = [&](int rank) {
      const World world = join();
      expect_mismatch([&] { rank == 0 ? on_rank0(world) : on_others(world); }, words);
    };
    EXPECT_TRUE(all_passed(run_ranks(kSize, body, options())));
  }
};

// A letter for each rank names its host.
INSTANTIATE_TEST_SUITE_P(Hosts, CrossedWaits, testing::Values("aaa", "aab", "abb"),
                         [](const auto& test) { return test.param; });

TEST_P(CrossedWaits, AWorldAgainstAnotherOfTheSameRanks) {
  EXPECT_TRUE(all_passed(run_ranks(
      kSize,
      [](int rank) {
        const World world = join();
        const World actor = world.duplicate("the actor");
        const World critic = world.duplicate();
        expect_mismatch([&] { (rank == 2 ? critic : actor).sum(1); },
                        {"ranks 0, 1 in all_reduce of f64[1], 8 bytes, of the actor; rank 2 in "
                         "all_reduce of f64[1], 8 bytes, of duplicate 1 of the world.\nMake the "
                         "same calls"});
      },
      options())));
}

TEST_P(CrossedWaits, TheWorldItselfAgainstADuplicate) {
  EXPECT_TRUE(all_passed(run_ranks(
      kSize,
      [](int rank) {
        const World world = join();
        const World other = world.duplicate("the metrics");
        expect_mismatch([&] { rank == 0 ? world.barrier() : other.barrier(); },
                        {"rank 0 in barrier, of the world", "in barrier, of the metrics"});
      },
      options())));
}

TEST_P(CrossedWaits, MakingAWorldAgainstACollective) {
  expect_crossed([](const World& world) { world.duplicate(); },
                 [](const World& world) { world.sum(1); },
                 {"duplicate (barrier)", "all_reduce of f64[1]"});
}

TEST_P(CrossedWaits, ACollectiveInsideOnRank0IsRefusedOnAllRanks) {
  EXPECT_TRUE(all_passed(run_ranks(
      kSize,
      [](int) {
        const World world = join();
        const World other = world.duplicate();
        for (const World& one : {world, other}) {
          try {
            world.on_rank0([&] { return one.sum(1); });
            ADD_FAILURE();
          } catch (const UsageError& error) {
            EXPECT_NE(error.message().find("all_reduce was called inside on_rank0"),
                      std::string::npos)
                << error.what();
          }
        }
        EXPECT_EQ(world.on_rank0([] { return 7; }), 7) << "all goes on";
        EXPECT_EQ(world.sum(1), world.size());
      },
      options())));
}

// Also on an engine that waits in LibTorch.
TEST(OnRank0, RefusesCollectivesOnGloo) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join({.engine = "gloo", .timeout = seconds(60)});
    EXPECT_THROW(world.on_rank0([&] { return world.sum(1); }), UsageError);
    EXPECT_EQ(world.sum(1), 2);
  })));
}

TEST_P(CrossedWaits, OnRank0IsNamed) {
  expect_crossed([](const World& world) { world.sum(1); },
                 [](const World& world) { world.on_rank0([] {}); },
                 {"all_reduce of f64[1]", "on_rank0 (broadcast of i64[1]"});
}

// Several worlds, two threads that each wait on one of them, and delays beyond the board's
// patience: what is slow is not wrong.
TEST_P(CrossedWaits, NothingIsFoundWhereRanksAreOnlyLate) {
  EXPECT_TRUE(all_passed(run_ranks(
      kSize,
      [](int rank) {
        const World world = join();
        const World actor = world.duplicate("the actor");
        const World critic = world.duplicate("the critic");
        const World metrics = world.duplicate("the metrics");
        const auto train = [&](unsigned seed, const World& first, const World& second) {
          std::mt19937 calls(seed);
          std::mt19937 delays(seed + 100 * static_cast<unsigned>(rank) + 1);
          for (int i = 0; i < soak(12, 200); ++i) {
            if (delays() % 3 == 0) std::this_thread::sleep_for(milliseconds(delays() % 1500));
            const World& one = calls() % 2 == 0 ? first : second;
            EXPECT_EQ(one.sum(1), one.size());
            if (calls() % 4 != 0) continue;
            std::vector<at::Tensor> a = {at::ones({100})};
            std::vector<at::Tensor> b = {at::ones({100})};
            // In either order: both are started before either is waited for.
            const bool is_swapped = delays() % 2 == 0;
            const auto one_work = (is_swapped ? second : first).backend()->allreduce(a);
            const auto other_work = (is_swapped ? first : second).backend()->allreduce(b);
            if (delays() % 2 == 0) std::this_thread::sleep_for(milliseconds(delays() % 800));
            one_work->wait();
            other_work->wait();
          }
        };
        std::thread second([&] { train(1, metrics, critic); });
        train(2, world, actor);
        second.join();
      },
      options())));
}

// A receive may be answered by any thread, at any time.
TEST_P(CrossedWaits, ARankThatWaitsForAMessageIsNotStuck) {
  EXPECT_TRUE(all_passed(run_ranks(
      kSize,
      [](int rank) {
        const World world = join();
        const World other = world.duplicate();
        std::thread sender;
        if (rank == 0) {
          sender = std::thread([&] {
            std::this_thread::sleep_for(seconds(3));
            std::vector<at::Tensor> sent = {at::ones({3})};
            other.backend()->send(sent, 1, 5)->wait();
          });
        }
        if (rank == 1) {
          std::vector<at::Tensor> received = {at::zeros({3})};
          other.backend()->recv(received, 0, 5)->wait();
          EXPECT_EQ(received[0].sum().item<double>(), 3);
        }
        EXPECT_EQ(world.sum(1), world.size());
        if (sender.joinable()) sender.join();
      },
      options())));
}

}  // namespace
}  // namespace lockstep::test
