// The shared-memory engine as a c10d::Backend, and ranks that are killed at random moments.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "base/posix.h"
#include "engine/reduce_once.h"
#include "support/run_ranks.h"
#include "support/shared_arena.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(ShmEngine, IsTheDefaultOnOneHost) {
  EXPECT_TRUE(all_passed(
      run_ranks(2, [](int) { EXPECT_EQ(World::join().backend()->getBackendName(), "shm"); })));
}

TEST(ShmEngine, ReducesItsOwnMemoryInPlaceAndInAnyMixture) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    at::Tensor survivor;
    {
      const World world = World::join();
      ASSERT_TRUE(world.backend()->supportsTensorAlloc(-1));
      for (const std::int64_t count : {1, 1000, 300000, 2000000}) {
        for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
          at::Tensor shared = world.backend()->allocateTensor(count, type).fill_(rank + 1);
          world.all_reduce(shared);
          EXPECT_TRUE(at::equal(shared, at::full({count}, 6, type)));
          // Only one rank's is shared; then a part in the middle of it.
          at::Tensor mixed = rank == 1 ? shared.fill_(2) : at::full({count}, 2, type);
          world.all_reduce(mixed, ReduceOp::AVG);
          EXPECT_TRUE(at::equal(mixed, at::full({count}, 2, type)));
          if (count < 3) continue;
          world.all_reduce(shared.fill_(1).slice(0, 1, count - 1));
          EXPECT_EQ(shared[0].item<double>(), 1);
          EXPECT_EQ(shared[1].item<double>(), 3);
          EXPECT_EQ(shared[count - 1].item<double>(), 1);
          world.broadcast(shared.fill_(rank), 2);
          EXPECT_TRUE(at::equal(shared, at::full({count}, 2, type)));
        }
      }
      survivor = world.backend()->allocateTensor(1000, at::kFloat).fill_(7);
    }
    EXPECT_EQ(survivor.sum().item<double>(), 7000) << "a tensor outlives its engine";
  })));
}

// Bytes of this process's own memory, without what it shares.
std::int64_t private_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kilobytes = 0;
    if (word == "RssAnon:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

TEST(ShmEngine, NeedsItsSegmentAndLittleElse) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    at::Tensor large = at::ones({16 << 20});
    const auto use = [&](const World& world) {
      for (int i = 0; i < 3; ++i) {
        world.all_reduce(large.fill_(1));
        world.broadcast(large);
        for (const int count : {1, 1000, 100000}) world.all_reduce(large.slice(0, 0, count));
      }
    };
    use(World::join());  // what LibTorch needs the first time is not the engine's
    const std::int64_t before = private_bytes();
    const World world = World::join();
    use(world);
    EXPECT_LT(private_bytes() - before, 1 << 20);
  })));
}

TEST(ShmEngine, ScalesEachContributionByItsFactor) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    const auto tensor = at::ones({100});
    world.all_reduce(tensor, c10d::makePreMulSum(rank == 0 ? 0.25 : 0.75));
    EXPECT_TRUE(at::equal(tensor, at::ones({100})));
  })));
}

TEST(ShmEngine, DifferentCallsThrowOnAllRanksAndShowBothSides) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    try {
      if (rank == 2) {
        world.broadcast(at::zeros({5}));
      } else {
        world.all_reduce(at::zeros({5}));
      }
      ADD_FAILURE();
    } catch (const MismatchError& error) {
      EXPECT_NE(
          error.message().find("is all_reduce of f32[5], 20 bytes on rank 0, but broadcast of "
                               "f32[5], 20 bytes on rank 2"),
          std::string::npos)
          << error.what();
    }
  })));
}

TEST(ShmEngine, AFutureCompletesWithoutAnybodyWaiting) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    if (rank == 1) std::this_thread::sleep_for(milliseconds(200));
    std::vector<at::Tensor> tensors = {at::ones({100000})};
    const auto future = world.backend()->allreduce(tensors)->getFuture();
    future->wait();
    EXPECT_EQ(future->value().toTensorVector()[0][0].item<double>(), 2);
  })));
}

// A callback may ask the work that it hangs on.
TEST(ShmEngine, AFuturesCallbackMayAskItsWork) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    for (const bool is_waited_for : {false, true}) {
      std::vector<at::Tensor> tensors = {at::ones({1000})};
      const auto work = world.backend()->allreduce(tensors);
      std::promise<bool> answer;
      work->getFuture()->addCallback([&, work](c10::ivalue::Future&) {
        answer.set_value(work->isCompleted() && work->isSuccess());
      });
      if (is_waited_for) work->wait();
      auto answered = answer.get_future();
      ASSERT_EQ(answered.wait_for(std::chrono::seconds(20)), std::future_status::ready);
      EXPECT_TRUE(answered.get());
    }
  })));
}

// The operation is then the last owner of the memory, and gives it back when it ends.
TEST(ShmEngine, WorkAndTensorMayGoBeforeTheOperationEnds) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    for (int i = 0; i < 20; ++i) {
      {
        std::vector<at::Tensor> tensors = {world.backend()->allocateTensor(300000, at::kFloat)};
        tensors[0].fill_(rank);
        world.backend()->allreduce(tensors);
      }
      world.barrier();
    }
  })));
}

TEST(ShmEngine, TwoRanksMaySendToEachOtherAtOnce) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    std::vector<at::Tensor> out = {at::full({1000000}, rank)};  // far more than the ring holds
    std::vector<at::Tensor> in = {at::zeros({1000000}, at::kLong)};
    world.backend()->send(out, 1 - rank, 0)->wait();
    world.backend()->recv(in, 1 - rank, 0)->wait();
    EXPECT_TRUE(at::equal(in[0], at::full({1000000}, 1 - rank)));
  })));
}

void send(const World& world, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  world.backend()->send(tensors, 0, 0)->wait();
}

at::Tensor receive(const World& world, std::int64_t length) {
  std::vector<at::Tensor> tensors = {at::zeros({length})};
  world.backend()->recv(tensors, 1, 0)->wait();
  return tensors[0];
}

// Runs `last` on rank 1, and `then` on rank 0 once the process of rank 1 has ended.
RankResults run_one_after_the_other(const std::function<void(const World&)>& last,
                                    const std::function<void(const World&)>& then) {
  Pipe pipe = make_pipe();  // its write end closes with rank 1
  Ranks ranks(2, [&](int rank) {
    const World world = World::join();
    if (rank == 1) return last(world);
    pipe.write_end.reset();
    char none = 0;
    EXPECT_EQ(::read(pipe.read_end.get(), &none, 1), 0);
    then(world);
  });
  pipe.write_end.reset();
  return ranks.wait();
}

TEST(ShmEngine, AMessageArrivesThoughItsSenderHasEnded) {
  EXPECT_TRUE(all_passed(run_one_after_the_other(
      [](const World& world) {
        send(world, at::full({5}, 1.0F));
        send(world, at::full({10000}, 2.0F));
      },
      [](const World& world) {
        EXPECT_TRUE(at::equal(receive(world, 5), at::full({5}, 1.0F)));
        EXPECT_TRUE(at::equal(receive(world, 10000), at::full({10000}, 2.0F)));
        try {
          receive(world, 5);
          ADD_FAILURE() << "nothing was sent";
        } catch (const PeerLostError& error) {
          EXPECT_EQ(error.rank(), 0);
          EXPECT_EQ(error.peer(), 1);
        }
      })));
}

// The descriptors of a world that has ended are used again by the next.
TEST(ShmEngine, AMessageOfAWorldThatHasEndedIsNotTakenFromTheNext) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    auto first = std::make_optional(world.duplicate("first"));
    if (rank == 1) {
      send(*first, at::full({5}, 1.0F));
      first.reset();
    }
    const World second = world.duplicate("second");
    if (rank == 1) send(second, at::full({5}, 2.0F));
    world.barrier();
    if (rank == 0) {
      EXPECT_TRUE(at::equal(receive(*first, 5), at::full({5}, 1.0F)));
      EXPECT_TRUE(at::equal(receive(second, 5), at::full({5}, 2.0F)));
    }
    world.barrier();
  })));
}

TEST(ShmEngine, WhatAKilledRankHasSentArrivesAndTheRestIsLost) {
  const auto results = run_one_after_the_other(
      [](const World& world) {
        send(world, at::full({5}, 1.0F));
        std::vector<at::Tensor> large = {at::zeros({1000000})};  // far more than the ring holds
        const auto work = world.backend()->send(large, 0, 0);
        ::raise(SIGKILL);
      },
      [](const World& world) {
        EXPECT_TRUE(at::equal(receive(world, 5), at::full({5}, 1.0F)));
        try {
          receive(world, 1000000);
          ADD_FAILURE() << "it was not sent in full";
        } catch (const PeerLostError& error) {
          EXPECT_EQ(error.rank(), 0);
          EXPECT_EQ(error.peer(), 1);
        }
      });
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
}

// The operation is posted, and its memory gone before rank 0 has met it.
TEST(ShmEngine, MemoryThatWentWithItsRankIsALostRank) {
  const auto reduce = [](const World& world) {
    std::vector<at::Tensor> tensors = {world.backend()->allocateTensor(100000, at::kFloat).zero_()};
    return world.backend()->allreduce(tensors);
  };
  const auto results = run_one_after_the_other(
      [&](const World& world) {
        const auto work = reduce(world);
        ::raise(SIGKILL);
      },
      [&](const World& world) {
        try {
          reduce(world)->wait();
          ADD_FAILURE() << "rank 1 cannot have done its part";
        } catch (const PeerLostError& error) {
          EXPECT_EQ(error.rank(), 0);
          EXPECT_EQ(error.peer(), 1);
        }
      });
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
}

// What has a name in /dev/shm, but for OpenMPI's files: its tests may run at the same time.
std::set<std::string> names_in_shm() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("vader_segment.")) names.insert(name);
  }
  return names;
}

// A rank at work for ever: operations of all sizes, so that death finds every phase.
void work_until_lost(const World& world) {
  std::mt19937 random(1);  // NOLINT: the same on all ranks
  at::Tensor shared = world.backend()->allocateTensor(600000, at::kFloat).zero_();
  const SharedArena arena(world, 600000 * 4);
  const at::Tensor once = arena.tensor(600000, at::kFloat);
  for (int i = 0;; ++i) {
    if (i == 10) std::cout << "at work" << std::endl;
    const auto length = static_cast<std::int64_t>(1 + random() % 600000);
    switch (random() % 6) {
      case 0:
        world.all_reduce(shared.slice(0, 0, length), ReduceOp::AVG);
        break;
      case 1:
        world.all_reduce(at::zeros({length % 5000 + 1}));
        break;
      case 2:
        world.broadcast(at::zeros({length}), static_cast<int>(random() % 3));
        break;
      case 3:
        world.all_gather(at::zeros({length}));
        break;
      case 4:
        start_reduce_once(*world.backend(), shared.slice(0, 0, length), once.slice(0, 0, length),
                          ReduceOp::AVG)
            ->wait();
        break;
      default:
        world.barrier();
    }
  }
}

// Twenty rounds, as run_ranks starts ranks once in a test; ./dev test --soak repeats them ten
// times.
class RandomDeath : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rounds, RandomDeath, testing::Range(0, 20));

TEST_P(RandomDeath, IsNoticedByAllWithinASecondAndLeavesNothing) {
  const std::set<std::string> shm_before = names_in_shm();
  Ranks ranks(3, [](int rank) {
    const World world = World::join();
    try {
      work_until_lost(world);
    } catch (const PeerLostError& error) {
      std::cout << error.what() << std::endl;
      EXPECT_EQ(error.rank(), rank);
    }
    std::this_thread::sleep_for(seconds(1));  // until the other has seen the first death, too
  });
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const int victim = static_cast<int>(random() % 3);
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for_output(rank, "at work");
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 50000));
  ranks.kill(victim, SIGKILL);
  const auto results = ranks.wait();
  const auto dead = static_cast<std::size_t>(victim);
  EXPECT_EQ(results[dead].status.signal, SIGKILL) << show(results);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    if (rank == dead) continue;
    EXPECT_TRUE(results[rank].status.is_ok()) << show(results);
    EXPECT_NE(results[rank].output.find("rank " + std::to_string(victim) + " (pid"),
              std::string::npos)
        << show(results);
    EXPECT_NE(results[rank].output.find("killed by signal 9"), std::string::npos) << show(results);
    // Its own second of sleep, a second to notice, and patience with a busy machine.
    EXPECT_LT(results[rank].seconds, results[dead].seconds + 1 + 1 + 5) << show(results);
    RecordProperty("seconds_to_notice",
                   std::to_string(results[rank].seconds - results[dead].seconds - 1));
  }
  EXPECT_EQ(names_in_shm(), shm_before);
}

}  // namespace
}  // namespace lockstep::test
