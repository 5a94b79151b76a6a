// The calls of a World, with gradients and without, messages and started operations over the late
// device: nothing reads what is not there yet, and ranks on different devices are told so.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "multiprocess/on_engines.h"
#include "support/on_late_device.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;

constexpr int kSize = 2;

// Rows of this rank's number, on the device.
at::Tensor rows_of(int rank) { return here(at::full({kSize, 3}, rank + 1.0f)); }

void expect_equal(const at::Tensor& tensor, const at::Tensor& expected) {
  EXPECT_FALSE(tensor.is_cpu());
  EXPECT_TRUE(at::equal(tensor.cpu(), expected)) << tensor.cpu() << "\nexpected\n" << expected;
}

// Delays that show what is read too early.
const late::Delays kLate = {.max_us = 0, .fixed_us = 3000};

TEST(LateWorld, CollectivesWithGradients) {
  const auto body = [](const World& world) {
    const int rank = world.rank();
    // The loss of rank r is (r + 1) times the sum of squares: together 3 times.
    const auto gradient_of = [&](const std::function<at::Tensor(const at::Tensor&)>& call) {
      const at::Tensor x = rows_of(rank).requires_grad_();
      (call(x).mul_(1.0).pow(2).sum() * (rank + 1)).backward();
      return x.grad();
    };
    expect_equal(gradient_of([&](const auto& x) { return functional::all_gather(x, world); }),
                 at::full({kSize, 3}, 6.0f * (rank + 1)));
    expect_equal(gradient_of([&](const auto& x) { return functional::all_reduce(x, world); }),
                 at::full({kSize, 3}, 18.0f));
    at::Tensor by_row = at::full({kSize, 3}, 6.0f);  // row r is used by rank r
    by_row[1] = 12;
    expect_equal(gradient_of([&](const auto& x) { return functional::reduce_scatter(x, world); }),
                 by_row);
    expect_equal(gradient_of([&](const auto& x) { return functional::all_to_all(x, world); }),
                 by_row * (rank + 1) / 3);
  };
  EXPECT_TRUE(all_passed(late::run(kSize, body, kLate)));
}

TEST(LateWorld, StartedOperations) {
  const auto body = [](const World& world) {
    const int rank = world.rank();
    const at::Tensor sum = rows_of(rank);
    const at::Tensor odd = here(at::full({4, 6}, rank + 1.0f)).slice(1, 0, 6, 2);
    const at::Tensor root = rows_of(rank);
    const at::Tensor part = here(at::zeros({3}));
    std::vector<Pending> started;
    started.push_back(world.all_reduce_async(sum));
    started.push_back(world.all_reduce_async(odd));
    started.push_back(world.broadcast_async(root, 1));
    started.push_back(world.all_gather_async(here(at::full({2}, rank + 0.0f))));
    started.push_back(world.reduce_scatter_async(rows_of(rank)));
    started.push_back(world.all_to_all_async(rows_of(rank)));
    started.push_back(world.gather_async(here(at::full({2}, rank + 0.0f)), 1));
    started.push_back(world.scatter_async(part, rank == 0 ? rows_of(6) : at::Tensor(), 0));
    started.push_back(world.all_gather_uneven_async(here(at::ones({rank + 1}))));
    started.push_back(world.barrier_async());
    for (const Pending& one : started) one.wait();
    expect_equal(started[0].result(), at::full({kSize, 3}, 3.0f));
    expect_equal(odd, at::full({4, 3}, 3.0f));
    expect_equal(root, at::full({kSize, 3}, 2.0f));
    expect_equal(started[3].result(), at::arange(2.0f).unsqueeze(1).expand({2, 2}));
    expect_equal(started[4].result(), at::full({3}, 3.0f));
    expect_equal(started[5].result(), (at::arange(2.0f) + 1).unsqueeze(1).expand({2, 3}));
    if (rank == 1) {
      expect_equal(started[6].result(), at::arange(2.0f).unsqueeze(1).expand({2, 2}));
    }
    expect_equal(part, at::full({3}, 7.0f));
    const auto uneven = started[8].results();
    expect_equal(uneven[0], at::ones({1}));
    expect_equal(uneven[1], at::ones({2}));
    for (const Pending& one : started) EXPECT_TRUE(one.is_done());
    const Moments moments = world.moments(rows_of(rank));
    EXPECT_EQ(moments.mean, 1.5);
  };
  EXPECT_TRUE(all_passed(late::run(kSize, body, kLate)));
}

TEST(LateWorld, MessagesAndTensorsOnDifferentDevices) {
  const auto body = [](const World& world) {
    if (world.rank() == 0) {
      world.send(rows_of(4), 1);
      world.send_async(here(at::arange(5, at::kShort)), 1, 3).wait();
      world.send(rows_of(8), 1);  // received into main memory
      world.send(at::full({2}, 9.0f), 1);
    } else {
      const at::Tensor room = here(at::zeros({kSize, 3}));
      expect_equal(world.recv(room, 0), at::full({kSize, 3}, 5.0f));
      const at::Tensor numbers = here(at::zeros({5}, at::kShort));
      expect_equal(world.recv_async(numbers, 0, 3).result(), at::arange(5, at::kShort));
      const auto error = thrown_by<MismatchError>([&] { world.recv(at::zeros({kSize, 3}), 0); });
      expect_says(error, {"recv was given Float[2, 3] on rank 1, but rank 0 sent Float[2, 3] on "
                          "late"});
      EXPECT_EQ(world.recv(at::zeros({2}), 0).sum().item<float>(), 18);
    }
    const at::Tensor mine = world.rank() == 0 ? rows_of(0) : at::ones({kSize, 3});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { world.gather(mine); }, [&] { world.all_to_all(mine); },
             [&] { functional::all_gather(mine, world); }}) {
      const auto devices = thrown_by<MismatchError>(call);
      expect_says(devices, {"Float[2, 3] on late", "Float[2, 3]"});
    }
    EXPECT_EQ(world.sum(1), kSize);
  };
  EXPECT_TRUE(all_passed(late::run(kSize, body, kLate)));
}

// The host has gone on when it fails, on one rank: the next call there says so, once.
TEST(LateWorld, WhatFailsAfterItsWaitIsTheNextCallsError) {
  const auto body = [](const World& world) {
    const bool is_failing = world.rank() == 1;
    for (const bool is_waited_for : {true, false}) {
      world.barrier();
      if (is_failing) late::fail_next();
      late::enqueue(late::stream().id(), [] { std::this_thread::sleep_for(milliseconds(50)); });
      {
        const Pending sum = world.all_reduce_async(rows_of(world.rank()));
        if (is_waited_for) sum.wait();
      }
      late::synchronize_all();
      if (is_failing) {
        const auto error = thrown_by<Error>([&] { world.all_reduce(rows_of(0)); });
        EXPECT_EQ(error.operation(), "all_reduce");
        expect_says(error, {"all_reduce of Float[2, 3], 24 bytes failed on its device",
                            "A test has asked for this failure"});
      }
      expect_equal(world.all_reduce(rows_of(world.rank())), at::full({kSize, 3}, 3.0f));
    }
    // One that has failed before its wait is that wait's error, and nobody else's.
    world.barrier();
    if (is_failing) late::fail_next();
    const Pending sum = world.all_reduce_async(rows_of(world.rank()));
    late::synchronize_all();
    if (is_failing) {
      EXPECT_THROW(sum.wait(), Error);
      EXPECT_THROW(sum.wait(), Error);
    }
    EXPECT_EQ(world.sum(1), kSize);
  };
  EXPECT_TRUE(all_passed(late::run(kSize, body)));
}

TEST(LateWorld, APartOfOneRankComputesWhereItsWorldDoes) {
  const late::Scope scope;
  EXPECT_TRUE(all_passed(run_ranks(kSize, [](int rank) {
    late::show_own_device(rank);
    const World world = World::join();
    EXPECT_TRUE(world.device().is_cpu());
    EXPECT_EQ(world.split(rank)->device(), world.device());
    const World on_device =
        World::join({.engine = "late",
                     .rank = rank,
                     .size = kSize,
                     .store = c10::make_intrusive<c10d::PrefixStore>("second", world.store())});
    EXPECT_FALSE(on_device.device().is_cpu());
    EXPECT_EQ(on_device.split(rank)->device(), on_device.device());
  })));
}

}  // namespace
}  // namespace lockstep::test
