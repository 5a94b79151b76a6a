// Operations that were started: waits with limits, ranks that are gone, handles that are dropped,
// and several worlds at once.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <csignal>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "multiprocess/ddp_model.h"
#include "multiprocess/on_engines.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Started : public testing::TestWithParam<OnEngine> {};
INSTANTIATE_TEST_SUITE_P(Engines, Started, testing::ValuesIn(all_engines(3)), name_of);

class StartedWithLostRanks : public Started {};
INSTANTIATE_TEST_SUITE_P(Engines, StartedWithLostRanks,
                         testing::ValuesIn(engines_where(3, can_lose_ranks)), name_of);

// A wait that ends at its limit ends nothing else.
TEST_P(Started, AWaitWithALimitMayBeTriedAgain) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    world.barrier();
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(800));
    const Pending sum = world.all_reduce_async(at::ones({5}));
    if (world.rank() != 1) {
      EXPECT_FALSE(sum.is_done());
      const auto error = thrown_by<TimeoutError>([&] { sum.wait(milliseconds(50)); });
      expect_says(error, {"all_reduce of Float[5], 20 bytes was not done after 0.050 s"});
      EXPECT_EQ(error.rank(), world.rank());
      EXPECT_THROW(sum.wait(milliseconds(0)), TimeoutError);
    }
    EXPECT_EQ(sum.result()[3].item<float>(), 3);
    EXPECT_TRUE(sum.is_done());
    sum.wait(milliseconds(0));  // it is done
    if (world.rank() == 0) {
      const Pending message = world.recv_async(at::zeros({2}), 1);
      EXPECT_FALSE(message.is_done());
      EXPECT_THROW(message.wait(milliseconds(50)), TimeoutError);
      EXPECT_EQ(message.result().sum().item<float>(), 8);
      EXPECT_TRUE(message.is_done());
      message.wait();
    } else if (world.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(800));
      world.send(at::full({2}, 4.0f), 0);
    }
    world.barrier();
  })));
}

TEST_P(StartedWithLostRanks, AStartedOperationFailsWithTheRankThatIsGone) {
  const auto results = run_on(GetParam(), [](const World& world) {
    world.barrier();
    if (world.rank() == 2) ::raise(SIGKILL);
    const Pending sum = world.all_reduce_async(at::ones({1000}));
    const auto error = thrown_by<PeerLostError>([&] { sum.wait(seconds(20)); });
    EXPECT_EQ(error.peer(), 2) << error.what();
    EXPECT_TRUE(sum.is_done());
    EXPECT_THROW(sum.result(), PeerLostError);  // and again
    std::this_thread::sleep_for(seconds(2));
  });
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
  EXPECT_TRUE(results[1].status.is_ok()) << show(results);
}

// What nobody waited for is let go of.
TEST_P(Started, AHandleMayGoBeforeItsOperationEnds) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const int next = (world.rank() + 1) % 3;
    world.all_reduce_async(at::ones({100}));
    {
      const Pending never = world.recv_async(at::zeros({2}), next, 99);
      EXPECT_FALSE(never.is_done());
    }
    EXPECT_EQ(world.sum(1), 3);
  })));
}

// A receive that nobody waits for does not take the message that the next one is for.
TEST(StartedAndDropped, AReceiveLeavesItsTagToTheNext) {
  EXPECT_TRUE(all_passed(run_on({"shm", "aa"}, [](const World& world) {
    const at::Tensor lost = at::zeros({3});
    if (world.rank() == 0) {
      world.recv_async(lost, 1, 9);
      const Pending asked = world.recv_async(lost, 1, 9);
      EXPECT_FALSE(asked.is_done());
    }
    world.barrier();
    if (world.rank() == 0) {
      EXPECT_EQ(world.recv(at::zeros({3}), 1, 9).sum().item<float>(), 21);
      EXPECT_EQ(lost.sum().item<float>(), 0);
    } else {
      world.send(at::full({3}, 7.0f), 0, 9);
    }
    world.barrier();
  })));
}

// The other side counts on a send, so it goes on while this rank does other things.
TEST_P(Started, ASendThatNobodyWaitsForArrives) {
  EXPECT_TRUE(all_passed(run_on(
      GetParam(),
      [](const World& world) {
        constexpr std::int64_t kElements = 1 << 19;  // 2 MiB, more than any engine has room for
        if (world.rank() == 0) world.send_async(at::full({kElements}, 3.0f), 1, 5);
        if (world.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(200));
          EXPECT_EQ(world.recv(at::zeros({kElements}), 0, 5).min().item<float>(), 3);
        }
        world.barrier();
      },
      seconds(15))));
}

// Letting go of an operation that no thread can end takes no time.
TEST_P(Started, AHandleThatWasAskedAndDroppedDoesNotWait) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    world.barrier();
    if (world.rank() == 1) std::this_thread::sleep_for(seconds(3));
    const auto began = std::chrono::steady_clock::now();
    {
      const Pending sum = world.reduce_scatter_async(at::ones({3, 2}));
      if (world.rank() != 1) {
        EXPECT_FALSE(sum.is_done());
      }
    }
    if (world.rank() != 1) {
      EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(2));
    }
    EXPECT_EQ(world.sum(1), 3);
  })));
}

// What was started in one world goes on while ranks wait in another, in any order.
TEST_P(Started, AWaitInOneWorldMovesTheOthersOn) {
  const auto body = [](const World& world) {
    const int rank = world.rank();
    const auto part = world.split(0, 0, "the part");
    const at::Tensor message = at::full({1 << 18}, 2.5f);  // 1 MiB
    if (rank == 0) {
      const Pending sent = world.send_async(message, 1);
      part->barrier();
      sent.wait();
    } else {
      if (rank == 1) {
        EXPECT_EQ(world.recv(at::zeros({1 << 18}), 0).min().item<float>(), 2.5f);
      }
      part->barrier();
    }
    for (const bool is_asked : {false, true}) {
      const at::Tensor a = at::ones({1 << 20});  // 4 MiB: more than there is room for at once
      const at::Tensor b = at::ones({1 << 20});
      const Pending first = world.all_reduce_async(a);
      const Pending second = part->all_reduce_async(b);
      const Pending& earlier = rank == 0 ? first : second;
      const auto deadline = std::chrono::steady_clock::now() + seconds(10);
      while (is_asked && !earlier.is_done() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      earlier.wait();
      (rank == 0 ? second : first).wait();
      EXPECT_EQ(a.min().item<float>(), 3);
      EXPECT_EQ(b.max().item<float>(), 3);
    }
  };
  EXPECT_TRUE(all_passed(run_on(GetParam(), body, seconds(15))));
}

TEST_P(Started, AMessageIsSentWhileBackwardWaits) {
  const auto body = [](const World& world) {
    Net model;
    const DistributedDataParallel ddp(model, world);
    const at::Tensor room = at::zeros({1 << 18});
    std::optional<Pending> sent;
    if (world.rank() == 0) sent = world.send_async(at::ones({1 << 18}), 1);
    if (world.rank() == 1) world.recv(room, 0);
    loss_of(model->forward(batch(world.rank()))).backward();
    if (sent) sent->wait();
    EXPECT_EQ(room.min().item<float>(), world.rank() == 1 ? 1 : 0);
    expect_same_bits(world, *model);
  };
  EXPECT_TRUE(all_passed(run_on(GetParam(), body, seconds(15))));
}

class StartedBeside : public Started {};
INSTANTIATE_TEST_SUITE_P(
    Engines, StartedBeside,
    testing::ValuesIn(engines_where(3, [](const OnEngine& row) { return row.engine != "shm"; })),
    name_of);

// Ranks 0 and 1 have a world on shared memory besides. What is started there goes on while they
// wait in the other one, whatever its engine.
TEST_P(StartedBeside, AWaitOnAnyEngineMovesSharedMemoryOn) {
  const auto body = [](const World& world) {
    const int rank = world.rank();
    std::optional<World> pair;
    if (GetParam().engine == "hierarchical") {
      pair = world.split(rank < 2 ? std::optional<int>(0) : std::nullopt);
    } else if (rank < 2) {
      pair = World::join({.engine = "shm",
                          .timeout = seconds(10),
                          .rank = rank,
                          .size = 2,
                          .store = c10::make_intrusive<c10d::PrefixStore>("pair", world.store())});
    }
    if (pair) {
      EXPECT_EQ(pair->backend()->getBackendName(), "shm");
    }
    const at::Tensor message = at::full({1 << 18}, 2.5f);  // 1 MiB: more than there is room for
    const at::Tensor much = at::ones({1 << 20});
    const at::Tensor one = at::ones({1});
    const auto pass_on = [&] {  // from rank 1 to rank 0, by way of rank 2
      if (rank == 1) world.send(one, 2);
      if (rank == 2) world.recv(one, 1);
      if (rank == 2) world.send(one, 0);
    };
    if (rank == 0) {
      const Pending sent = pair->send_async(message, 1);
      world.recv(one, 2);
      sent.wait();
      const Pending sum = pair->all_reduce_async(much);
      world.recv_async(one, 2).wait(seconds(30));
      sum.wait();
    } else {
      if (rank == 1) pair->recv(message.zero_(), 0);
      pass_on();
      if (rank == 1) pair->all_reduce(much);
      pass_on();
    }
    EXPECT_EQ(message.min().item<float>(), 2.5f);
    EXPECT_EQ(much.min().item<float>(), rank < 2 ? 2 : 1);
    std::optional<Pending> sum;
    if (rank == 0) sum = pair->all_reduce_async(much);
    if (rank == 1) pair->all_reduce(much);
    world.barrier();
    if (sum) sum->wait();
    EXPECT_EQ(much.max().item<float>(), rank < 2 ? 4 : 1);
    world.barrier();
  };
  EXPECT_TRUE(all_passed(run_on(GetParam(), body, seconds(10))));
}

class StartedLate : public Started {};
INSTANTIATE_TEST_SUITE_P(Engines, StartedLate,
                         testing::ValuesIn(std::vector<OnEngine>{{"shm", "aaa"},
                                                                 {"hierarchical", "aab"}}),
                         name_of);

// A limit does not put off the engine's own deadline for ever.
TEST_P(StartedLate, ALimitBeyondTheTimeoutIsNone) {
  EXPECT_TRUE(all_passed(run_on(
      GetParam(),
      [](const World& world) {
        world.all_reduce_async(at::ones({2})).wait(milliseconds::max());
        world.barrier();
        if (world.rank() == 1) return std::this_thread::sleep_for(seconds(9));
        const Pending sum = world.all_reduce_async(at::ones({5}));
        EXPECT_THROW(sum.wait(milliseconds::min()), TimeoutError);
        const auto began = std::chrono::steady_clock::now();
        const auto error = thrown_by<TimeoutError>([&] { sum.wait(seconds(60)); });
        EXPECT_EQ(error.message().find("the limit that was given"), std::string::npos)
            << error.what();
        EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(8));
        EXPECT_THROW(sum.wait(seconds(60)), TimeoutError);  // and again
      },
      seconds(2))));
}

// Gloo writes to connections in the thread of the caller.
TEST(StartedOnGloo, SendingToARankThatIsGoneIsAnErrorNotASignal) {
  if (!why_no_engine("gloo").empty()) GTEST_SKIP() << why_no_engine("gloo");
  const auto results = run_on({"gloo", "aa"}, [](const World& world) {
    world.barrier();
    if (world.rank() == 1) ::raise(SIGKILL);
    ::signal(SIGPIPE, SIG_DFL);
    std::this_thread::sleep_for(milliseconds(300));
    EXPECT_THROW(
        {
          for (int i = 0; i < 50; ++i) world.send(at::ones({1000}), 1);
        },
        Error);
  });
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
}

}  // namespace
}  // namespace lockstep::test
