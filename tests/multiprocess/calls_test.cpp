// Calls of lockstep's own engines as c10d's: what is refused before other ranks hear of it, limits
// of waits, futures, and what is left when an engine ends. On one host, and on two.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <thread>

#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Future = c10::intrusive_ptr<c10::ivalue::Future>;

class Calls : public testing::TestWithParam<std::string> {
 protected:
  // The hierarchical engine has the last rank on another host.
  static void run(int size, const std::function<void(const World&)>& body,
                  milliseconds timeout = seconds(40)) {
    run_ranks(size, [&](int) { body(join(timeout)); });
  }
  static void run_ranks(int size, const RankBody& body) {
    const std::string others(static_cast<std::size_t>(size - 1), 'a');
    EXPECT_TRUE(all_passed(
        test::run_ranks(size, body, GetParam() == "shm" ? RankOptions{} : on_hosts(others + "b"))));
  }
  static World join(milliseconds timeout = seconds(40)) {
    return World::join({.engine = GetParam(), .timeout = timeout});
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, Calls, testing::Values("shm", "hierarchical"),
                         [](const auto& test) { return test.param; });

void expect_usable(const World& world) {
  EXPECT_EQ(world.all_reduce(at::ones({3}))[0].item<int>(), world.size());
}

// If anything of these had been started, the ranks would be at different operations.
TEST_P(Calls, AreRefusedBeforeOtherRanksHearOfThem) {
  run(2, [](const World& world) {
    c10d::Backend& engine = *world.backend();
    if (world.rank() == 0) {
      const auto elsewhere = at::zeros({3}, at::device(at::kMeta));  // as a GPU's would be
      Tensors mixed = {at::zeros({3}), elsewhere};
      EXPECT_THROW(engine.allreduce(mixed), UsageError);
      EXPECT_THROW(engine.broadcast(mixed), UsageError);
      Tensors inputs = {at::zeros({3}), at::zeros({3})};
      Tensors outputs = {at::zeros({6}), at::zeros({5})};
      EXPECT_THROW(engine.allgather_into_tensor_coalesced(outputs, inputs), UsageError);
      EXPECT_THROW(engine.reduce_scatter_tensor_coalesced(inputs, outputs), UsageError);
      std::vector<Tensors> lists = {{at::zeros({3}), at::zeros({3})}, {at::zeros({3}), elsewhere}};
      EXPECT_THROW(engine.allgather(lists, inputs), UsageError);
      EXPECT_THROW(engine.allgather_coalesced(lists, inputs), UsageError);
      EXPECT_THROW(engine.alltoall(mixed, inputs), UsageError);
      Tensors expanded = {at::zeros({1}).expand({3})};
      EXPECT_THROW(engine.allreduce(expanded), UsageError);
      EXPECT_THROW(engine.setTimeout(milliseconds(0)), UsageError);
    }
    expect_usable(world);
  });
}

TEST_P(Calls, AllToAllWithSplitsThatDifferThrowsOnAllRanksAndEndsNothing) {
  run(3, [](const World& world) {
    // Rank 0 sends 2 elements to rank 1, which has room for 1.
    std::vector<std::int64_t> in_splits = {1, world.rank() == 0 ? 2 : 1, 1};
    std::vector<std::int64_t> out_splits = {1, 1, 1};
    at::Tensor input = at::zeros({world.rank() == 0 ? 4 : 3});
    at::Tensor output = at::zeros({3});
    try {
      world.backend()->alltoall_base(output, input, out_splits, in_splits)->wait();
      ADD_FAILURE();
    } catch (const MismatchError& error) {
      EXPECT_NE(error.message().find("Rank 0 sends 2 elements to rank 1, which has room for 1"),
                std::string::npos)
          << error.what();
    }
    expect_usable(world);
  });
}

TEST_P(Calls, APendingConjugationIsCarriedOut) {
  run(2, [](const World& world) {
    c10d::Backend& engine = *world.backend();
    const auto numbers = at::complex(at::ones({5}), at::full({5}, world.rank() + 1.0));
    at::Tensor input = numbers.conj();
    at::Tensor output = at::zeros({10}, numbers.options());
    engine._allgather_base(output, input)->wait();
    EXPECT_TRUE(at::equal(at::imag(output), -at::cat({at::ones({5}), at::full({5}, 2.0)})));
    Tensors tensors = {input};
    engine.allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(at::imag(input), at::full({5}, -3.0)));
    EXPECT_TRUE(at::equal(at::imag(numbers), at::full({5}, 3.0))) << "it is a view of this";
    tensors = {at::imag(numbers.conj())};  // a pending negation
    ASSERT_TRUE(tensors[0].is_neg());
    engine.allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(at::imag(numbers), at::full({5}, 6.0)));
  });
}

bool is_over_in_time(const Work& work) {
  for (int i = 0; i < 20000 && !work->isCompleted(); ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  return work->isCompleted();
}

TEST_P(Calls, MessagesCanBePolled) {
  run(3, [](const World& world) {
    c10d::Backend& engine = *world.backend();
    for (const int shift : {1, 0}) {  // to another rank, and to this one
      const int next = (world.rank() + shift) % world.size();
      const int previous = (world.rank() + world.size() - shift) % world.size();
      for (const std::int64_t count : {1, 300000}) {
        Tensors out = {at::full({count}, world.rank())};
        Tensors in = {at::zeros({count}, at::kLong)};
        const auto received = engine.recv(in, previous, 1);
        EXPECT_FALSE(received->isCompleted()) << "nothing can have been sent: all wait below";
        world.barrier();
        const auto sent = engine.send(out, next, 1);
        EXPECT_TRUE(is_over_in_time(sent));
        EXPECT_TRUE(is_over_in_time(received));
        EXPECT_TRUE(received->isSuccess());
        EXPECT_EQ(in[0][count - 1].item<int>(), previous);
        if (shift == 0) continue;
        in[0].zero_();
        const auto any = engine.recvAnysource(in, 2);
        EXPECT_FALSE(any->isCompleted());
        world.barrier();
        engine.send(out, next, 2)->wait();
        EXPECT_TRUE(is_over_in_time(any));
        EXPECT_EQ(any->sourceRank(), previous);
        EXPECT_EQ(in[0][count - 1].item<int>(), previous);
      }
    }
  });
}

TEST_P(Calls, AWaitThatReachesItsLimitEndsNothing) {
  run(3, [](const World& world) {
    c10d::Backend& engine = *world.backend();
    Tensors sum = {at::ones({1000})};
    Tensors message = {at::ones({1000})};
    Work work;
    Work received;
    if (world.rank() != 2) {
      work = engine.allreduce(sum);
      received = engine.recv(message, 2, 0);
      for (const Work& one : {work, received, work}) {
        try {
          one->wait(milliseconds(30));
          ADD_FAILURE();
        } catch (const TimeoutError& error) {
          EXPECT_NE(error.message().find("after 0.030 s, the limit"), std::string::npos)
              << error.what();
        }
        EXPECT_FALSE(one->isCompleted());
      }
      world.store()->set("waited" + std::to_string(world.rank()), "");
    } else {
      world.store()->wait({"waited0", "waited1"});
      work = engine.allreduce(sum);
      for (const int peer : {0, 1}) engine.send(message, peer, 0)->wait();
    }
    EXPECT_TRUE(work->wait(seconds(30)));
    EXPECT_EQ(sum[0][999].item<int>(), 3);
    EXPECT_TRUE(!received || received->wait());
    expect_usable(world);
  });
}

// Rank 1 stays away; the world's own timeout is far longer than the test may take.
void expect_timeout(const std::function<void()>& f, const std::string& text) {
  try {
    f();
    ADD_FAILURE();
  } catch (const TimeoutError& error) {
    EXPECT_NE(error.message().find(text), std::string::npos) << error.what();
  }
}

TEST_P(Calls, AnOperationMayHaveATimeoutOfItsOwn) {
  run(
      2,
      [](const World& world) {
        if (world.rank() == 0) {
          c10d::AllreduceOptions options;
          options.timeout = milliseconds(700);
          Tensors tensors = {at::ones({1000})};
          expect_timeout([&] { world.backend()->allreduce(tensors, options)->wait(); },
                         "all_reduce of f32[1000], 4000 bytes waited 0.7 s");
          world.store()->set("seen", "");
        }
        world.store()->wait({"seen"});
      },
      std::chrono::minutes(10));
}

TEST_P(Calls, TheTimeoutOfAllThatFollowsCanBeSet) {
  run(
      2,
      [](const World& world) {
        world.backend()->setTimeout(milliseconds(700));
        if (world.rank() == 0) {
          Tensors tensors = {at::ones({1000})};
          expect_timeout([&] { world.backend()->recv(tensors, 1, 0)->wait(); }, "waited 0.7 s");
          world.store()->set("seen", "");
        }
        world.store()->wait({"seen"});
      },
      std::chrono::minutes(10));
}

TEST_P(Calls, AFutureDoesNotWaitForAnother) {
  run(2, [](const World& world) {
    c10d::Backend& engine = *world.backend();
    Tensors late = {at::zeros({10})};
    Tensors soon = {at::zeros({10})};
    Tensors sum = {at::ones({10})};
    if (world.rank() == 0) {
      const Future first = engine.recv(late, 1, 1)->getFuture();
      const Future second = engine.recv(soon, 1, 2)->getFuture();
      const Future third = engine.allreduce(sum)->getFuture();
      second->wait();
      third->wait();
      EXPECT_FALSE(first->completed());
      world.store()->set("seen", "");
      first->wait();
      EXPECT_EQ(late[0][9].item<int>(), 1);
    } else {
      Tensors out = {at::ones({10})};
      engine.send(out, 0, 2)->wait();
      engine.allreduce(sum)->wait();
      world.store()->wait({"seen"});
      engine.send(out, 0, 1)->wait();
    }
    expect_usable(world);
  });
}

// For one that it starts, as PyTorch's PowerSGD hook does, and for one that was there before.
TEST_P(Calls, AFuturesCallbackMayWaitForOtherFutures) {
  run(2, [](const World& world) {
    c10d::Backend& engine = *world.backend();
    Tensors first = {at::ones({1000})};
    Tensors second = {at::ones({1000})};
    Tensors third = {at::ones({1000})};
    if (world.rank() == 0) {
      const Future soon = engine.allreduce(first)->getFuture();
      const Future late = engine.allreduce(second)->getFuture();
      std::promise<void> has_returned;
      soon->addCallback([&](c10::ivalue::Future&) {
        late->wait();
        engine.allreduce(third)->getFuture()->wait();
        has_returned.set_value();
      });
      world.store()->set("asked", "");
      ASSERT_EQ(has_returned.get_future().wait_for(seconds(30)), std::future_status::ready);
    } else {
      world.store()->wait({"asked"});
      for (Tensors* tensors : {&first, &second, &third}) engine.allreduce(*tensors)->wait();
    }
    EXPECT_EQ((first[0] + second[0] + third[0])[999].item<int>(), 6);
    expect_usable(world);
  });
}

// Callbacks hear of the end, too, while the engine waits for the threads that they run on.
TEST_P(Calls, CallbacksMayWaitForEachOtherWhenTheWorldEnds) {
  run_ranks(2, [](int rank) {
    std::atomic<int> num_returned = 0;
    {
      const World world = join();
      if (rank == 0) {
        Tensors tensors = {at::ones({1000})};
        std::vector<Future> futures;
        for (int i = 0; i < 4; ++i) {
          futures.push_back(world.backend()->allreduce(tensors)->getFuture());
        }
        for (std::size_t i = 0; i < 3; ++i) {
          futures[i]->addCallback([&, next = futures[i + 1]](c10::ivalue::Future&) {
            for (int j = 0; j < 30000 && !next->completed(); ++j) {
              std::this_thread::sleep_for(milliseconds(1));
            }
            num_returned += next->completed() ? 1 : 0;
          });
        }
        world.store()->set("asked", "");
      }
      world.store()->wait({"asked"});
    }
    EXPECT_EQ(num_returned, rank == 0 ? 3 : 0);
  });
}

TEST_P(Calls, AMessageTimesOutWhileOperationsGoOn) {
  run(2, [](const World& world) {
    std::thread waiting;
    if (world.rank() == 0) {
      waiting = std::thread([&] {
        world.backend()->setTimeout(seconds(2));
        Tensors tensors = {at::ones({1000})};
        const Work work = world.backend()->recv(tensors, 1, 0);
        EXPECT_FALSE(work->isCompleted());
        EXPECT_THROW(work->wait(), TimeoutError);
      });
    }
    const auto start = std::chrono::steady_clock::now();
    const auto go_on = [&] {
      while (std::chrono::steady_clock::now() - start < seconds(20)) world.sum(1);
    };
    EXPECT_THROW(go_on(), Error) << "the message's failure is the engine's";
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(12));
    if (waiting.joinable()) waiting.join();
  });
}

TEST_P(Calls, AllFuturesAreCompleteWhenTheWorldHasEnded) {
  run_ranks(2, [](int rank) {
    std::vector<Future> futures;
    {
      const World world = join();
      if (rank == 0) {
        Tensors tensors = {at::ones({1000})};
        for (int tag = 0; tag < 3; ++tag) {
          futures.push_back(world.backend()->recv(tensors, 1, tag)->getFuture());
          futures.push_back(world.backend()->allreduce(tensors)->getFuture());
        }
        world.store()->set("asked", "");
      }
      world.store()->wait({"asked"});
    }
    for (const Future& future : futures) {
      ASSERT_TRUE(future->completed());
      EXPECT_TRUE(future->hasError());
    }
  });
}

// Its thread then ends the engine that the thread belongs to.
TEST_P(Calls, AFuturesCallbackMayHoldTheLastHandleOfTheWorld) {
  run_ranks(2, [](int rank) {
    std::promise<void> is_last;
    std::promise<void> has_ended;
    {
      auto world = std::make_shared<World>(join());
      Tensors in = {at::zeros({1000})};
      Tensors out = {at::ones({1000})};
      world->backend()
          ->recv(in, rank, 0)
          ->getFuture()
          ->addCallback([world, last = is_last.get_future().share(),
                         &has_ended](c10::ivalue::Future&) mutable {
            last.wait();
            world.reset();
            has_ended.set_value();
          });
      world->backend()->send(out, rank, 0)->wait();
    }
    is_last.set_value();
    EXPECT_EQ(has_ended.get_future().wait_for(seconds(30)), std::future_status::ready);
    std::this_thread::sleep_for(milliseconds(100));  // until that thread is gone, too
  });
}

TEST_P(Calls, AWorkCanBeAskedWhileAnotherThreadWaitsForIt) {
  run(2, [](const World& world) {
    Tensors tensors = {at::ones({1000})};
    if (world.rank() == 0) {
      const Work work = world.backend()->allreduce(tensors);
      std::thread waiting([&] { work->wait(); });
      std::this_thread::sleep_for(milliseconds(50));  // until it waits
      EXPECT_FALSE(work->isCompleted());
      EXPECT_FALSE(work->isSuccess());
      EXPECT_THROW(work->wait(milliseconds(20)), TimeoutError);
      world.store()->set("asked", "");
      waiting.join();
      EXPECT_TRUE(work->isCompleted());
    } else {
      world.store()->wait({"asked"});
      world.backend()->allreduce(tensors)->wait();
    }
    expect_usable(world);
  });
}

// Segments of this process: its own and those of others that it has mapped.
int num_segments() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:lockstep (") != std::string::npos ? 1 : 0;
  }
  return count;
}

// As after an exception in the middle of a step: what was started still has the engine's memory,
// which has the engine.
TEST_P(Calls, UnfinishedOperationsKeepNoMemoryWhenTheWorldHasEnded) {
  run_ranks(2, [](int rank) {
    {
      const World world = join();
      expect_usable(world);
      if (rank == 0) {
        for (int i = 0; i < 3; ++i) {
          Tensors tensors = {world.backend()->allocateTensor(300000, at::kFloat).zero_()};
          world.backend()->allreduce(tensors);
          world.backend()->recv(tensors, 1, i);
        }
        EXPECT_GT(num_segments(), 0);
        world.store()->set("posted", "1");
      } else {
        world.store()->wait({"posted"});  // before it leaves, which would be an error there
      }
    }
    EXPECT_EQ(num_segments(), 0);
  });
}

// .grad of a model is such memory, and the model outlives wrapper and world.
TEST_P(Calls, ARankThatKeepsTheEnginesMemoryIsSeenToLeave) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("lockstep-left-" + GetParam() + std::to_string(::getpid()));
  run_ranks(2, [&](int rank) {
    at::Tensor kept;
    Work work;
    {
      const World world = join(std::chrono::minutes(10));
      kept = world.backend()->allocateTensor(1000, at::kFloat).fill_(7);
      Tensors tensors = {at::ones({10})};
      work = world.backend()->allreduce(tensors);  // works are no part of the world, either
      work->wait();
      if (rank == 0) {
        try {
          world.barrier();
          ADD_FAILURE();
        } catch (const PeerLostError& error) {
          EXPECT_NE(error.message().find("which has left this world"), std::string::npos)
              << error.what();
        }
        std::ofstream(path) << "seen";
      }
    }
    for (int i = 0; i < 3000 && !std::filesystem::exists(path); ++i) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_TRUE(std::filesystem::exists(path)) << "it was not seen while this process lived";
    EXPECT_EQ(kept.sum().item<int>(), 7000);
  });
  EXPECT_TRUE(std::filesystem::remove(path));
}

}  // namespace
}  // namespace lockstep::test
