// Trouble on one host that ranks of all hosts hear of. Ranks pretend to be on several hosts.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// One rank at something else: on its own host, and on another.
class Mismatch : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OddRank, Mismatch, testing::Values(1, 2, 3));

TEST_P(Mismatch, ThrowsOnAllRanksAndShowsBothSides) {
  EXPECT_TRUE(all_passed(run_ranks(
      4,
      [&](int rank) {
        const World world = World::join({.engine = "hierarchical", .timeout = seconds(20)});
        const auto start = std::chrono::steady_clock::now();
        try {
          if (rank == GetParam()) {
            world.broadcast(at::zeros({200000}));
          } else {
            world.all_reduce(at::zeros({200000}));
          }
          ADD_FAILURE();
        } catch (const MismatchError& error) {
          std::cout << error.what() << std::endl;
          EXPECT_NE(error.message().find("all_reduce of f32[200000], 800000 bytes on rank "),
                    std::string::npos);
          EXPECT_NE(error.message().find("broadcast of f32[200000], 800000 bytes on rank " +
                                         std::to_string(GetParam())),
                    std::string::npos);
        }
        EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
        EXPECT_THROW(world.barrier(), MismatchError) << "the first cause, again";
      },
      on_hosts("aabb"))));
}

// A rank dies at work: leaders and others, alone on its host or not.
struct Death {
  std::string layout;
  int victim;
};
class RankDies : public testing::TestWithParam<Death> {
 protected:
  // With messages, each rank has asked all others for one that nobody sends.
  static void expect_that_all_name_it(bool has_messages);
};
INSTANTIATE_TEST_SUITE_P(Hosts, RankDies,
                         testing::Values(Death{"aabb", 0}, Death{"aabb", 3}, Death{"aaab", 2},
                                         Death{"aaab", 3}, Death{"abcd", 1}),
                         [](const auto& test) {
                           return test.param.layout + std::to_string(test.param.victim);
                         });

void RankDies::expect_that_all_name_it(bool has_messages) {
  const int victim = GetParam().victim;
  const auto body = [&](int rank) {
    const World world = World::join({.engine = "hierarchical", .timeout = seconds(60)});
    const at::Tensor large = world.backend()->allocateTensor(2000000, at::kFloat).zero_();
    std::vector<at::Tensor> message = {at::zeros({10})};
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (int peer = 0; peer < world.size() && has_messages; ++peer) {
      if (peer != rank) futures.push_back(world.backend()->recv(message, peer, 0)->getFuture());
    }
    try {
      for (int step = 0;; ++step) {
        if (step == 5) std::cout << "at work" << std::endl;
        world.all_reduce(large);
        world.all_gather(at::zeros({1000}));
        world.broadcast(at::zeros({100000}), step % world.size());
      }
    } catch (const PeerLostError& error) {
      std::cout << error.what() << std::endl;
      EXPECT_EQ(error.rank(), rank);
      EXPECT_EQ(error.peer(), victim);
    }
    EXPECT_THROW(world.barrier(), PeerLostError) << "the first cause, again";
    for (const auto& future : futures) EXPECT_THROW(future->waitAndThrow(), PeerLostError);
    std::this_thread::sleep_for(seconds(1));  // until the others have seen the first death, too
  };
  Ranks ranks(4, body, on_hosts(GetParam().layout));
  for (int rank = 0; rank < 4; ++rank) ranks.wait_for_output(rank, "at work");
  ranks.kill(victim, SIGKILL);
  const auto results = ranks.wait();
  const auto dead = static_cast<std::size_t>(victim);
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    if (rank == dead) continue;
    EXPECT_TRUE(results[rank].status.is_ok()) << show(results);
    EXPECT_NE(results[rank].output.find("rank " + std::to_string(victim) + " ("), std::string::npos)
        << show(results);
    EXPECT_LT(results[rank].seconds, results[dead].seconds + 1 + 10) << show(results);
  }
}

TEST_P(RankDies, AndAllOthersNameIt) { expect_that_all_name_it(false); }

TEST_P(RankDies, AndAllOthersNameItWhileTheyWaitForMessages) { expect_that_all_name_it(true); }

// A rank that is late is named by those of other hosts, too, who only wait for its host.
TEST(HierarchicalFaults, ARankThatStaysAwayIsNamedOnAllHosts) {
  EXPECT_TRUE(all_passed(run_ranks(
      4,
      [](int rank) {
        const World world = World::join({.engine = "hierarchical", .timeout = milliseconds(1500)});
        if (rank == 1) {
          std::this_thread::sleep_for(seconds(6));
          return;
        }
        try {
          world.all_reduce(at::zeros({1000000}));
          ADD_FAILURE();
        } catch (const TimeoutError& error) {
          std::cout << error.what() << std::endl;
          EXPECT_EQ(error.peer(), 1);
        }
      },
      on_hosts("aabb"))));
}

TEST(HierarchicalFaults, EndsWithoutWaitingForWhatNobodyWaitsFor) {
  const auto results = run_ranks(
      2,
      [](int rank) {
        const World world = World::join({.engine = "hierarchical"});
        if (rank == 1) return std::this_thread::sleep_for(seconds(3));
        std::vector<at::Tensor> tensors = {at::zeros({1000000})};
        world.backend()->allreduce(tensors);
      },
      on_hosts("ab"));
  EXPECT_TRUE(all_passed(results));
  EXPECT_LT(results[0].seconds, results[1].seconds - 1);
}

}  // namespace
}  // namespace lockstep::test
