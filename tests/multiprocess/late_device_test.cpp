// The late device itself: it is late, its memory is not the host's, and what is not ordered goes
// wrong. Otherwise the tests over it would show nothing.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <thread>

#include "support/late_device.h"
#include "support/on_late_device.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;

at::TensorOptions there() { return at::device(late::device()); }

// Not in the test itself: a process that has used the device forks no ranks.
void in_a_process(const std::function<void()>& body) {
  EXPECT_TRUE(all_passed(run_ranks(1, [&](int) { body(); })));
}

TEST(LateDevice, TheHostCannotReadItsMemory) {
  const auto results = run_ranks(1, [](int) {
    const at::Tensor tensor = at::ones({4}, there());
    late::synchronize_all();
    const auto* const data = static_cast<const volatile float*>(tensor.data_ptr());
    std::fprintf(stderr, "read %f\n", static_cast<double>(data[0]));
  });
  EXPECT_FALSE(results[0].status.is_ok());
  EXPECT_EQ(results[0].output.find("read"), std::string::npos) << results[0].output;
}

TEST(LateDevice, OperationsRunLateAndInOrder) {
  in_a_process([] {
    late::set_delays({.max_us = 0, .fixed_us = 20000});
    const auto began = late::Clock::now();
    at::Tensor value = at::zeros({3}, there());
    for (int i = 0; i < 10; ++i) value = value * 2 + 1;
    c10::Event event(at::kPrivateUse1);
    event.record(late::stream());
    EXPECT_FALSE(event.query());
    EXPECT_LT(late::Clock::now() - began, milliseconds(200));
    event.synchronize();
    EXPECT_TRUE(event.query());
    EXPECT_GT(late::Clock::now() - began, milliseconds(400));
    EXPECT_TRUE(at::equal(value.cpu(), at::full({3}, 1023.0)));
  });
}

TEST(LateDevice, StreamsAreOrderedByEventsAlone) {
  in_a_process([] {
    for (const bool has_event : {false, true}) {
      late::set_delays({.max_us = 0, .fixed_us = 10000});
      at::Tensor value = at::zeros({100}, there());
      for (int i = 0; i < 5; ++i) value.add_(1);
      const c10::Stream side = late::new_stream();
      c10::Event event(at::kPrivateUse1);
      event.record(late::stream());
      if (has_event) event.block(side);
      at::Tensor result;
      {
        const c10::StreamGuard guard(side);
        result = value + 1;
        late::synchronize(side.id());
      }
      EXPECT_EQ(at::equal(result.cpu(), at::full({100}, 6.0)), has_event);
      late::synchronize_all();
    }
  });
}

TEST(LateDevice, MemoryThatIsFreedIsKeptForStreamsThatWereRecorded) {
  in_a_process([] {
    for (const bool is_recorded : {false, true}) {
      late::set_delays({.max_us = 0, .fixed_us = 20000});
      at::Tensor value = at::ones({100}, there());
      late::synchronize_all();
      const c10::Stream side = late::new_stream();
      const c10::StreamGuard guard(side);
      const at::Tensor result = value + 1;  // in 20 ms
      if (is_recorded) value.record_stream(side);
      value.reset();
      late::synchronize(side.id());
      EXPECT_EQ(at::equal(result.cpu(), at::full({100}, 2.0)), is_recorded);
    }
  });
}

TEST(LateDevice, WaitsOfTheHostAreCounted) {
  in_a_process([] {
    const auto count = [](const std::function<void()>& call) {
      const std::int64_t before = late::num_syncs();
      call();
      return late::num_syncs() - before;
    };
    at::Tensor value = at::ones({5}, there());
    const at::Tensor host = at::ones({5});
    EXPECT_EQ(count([&] { value = value.mul(2).add(value).relu(); }), 0);
    EXPECT_EQ(count([&] { value.add_(host.to(late::device(), /*non_blocking=*/true)); }), 0);
    EXPECT_EQ(count([&] { value.copy_(host); }), 1);
    EXPECT_EQ(count([&] { value.cpu(); }), 1);
    EXPECT_EQ(count([&] { value.sum().item<float>(); }), 1);
    EXPECT_GE(count([&] { value.nonzero(); }), 1);
    const at::Tensor pinned = at::empty({5}).pin_memory();
    EXPECT_EQ(count([&] { pinned.copy_(value, /*non_blocking=*/true); }), 0);
    late::synchronize_all();
    EXPECT_TRUE(at::equal(pinned, host));
  });
}

// Gradients are computed in a thread of the device, in the stream of their forward.
TEST(LateDevice, AutogradRunsThere) {
  in_a_process([] {
    const at::Tensor weight = numbers({6, 4}, 1).to(late::device()).requires_grad_();
    const at::Tensor on_host = numbers({6, 4}, 1).requires_grad_();
    const auto loss = [](const at::Tensor& one) {
      const at::Tensor rows = at::layer_norm(at::linear(one, one.tanh()), {6});
      return (at::gelu(rows).pow(2).mean() + at::log_softmax(rows, 1).sum());
    };
    std::thread::id thread;
    std::int64_t stream = -1;
    weight.register_hook([&](const at::Tensor&) {
      thread = std::this_thread::get_id();
      stream = late::stream().id();
    });
    const c10::Stream side = late::new_stream();
    const std::int64_t before = late::num_syncs();
    {
      const c10::StreamGuard guard(side);
      loss(weight).backward();
    }
    EXPECT_EQ(late::num_syncs(), before);
    loss(on_host).backward();
    EXPECT_NE(thread, std::this_thread::get_id());
    EXPECT_EQ(stream, side.id());
    late::synchronize_all();
    EXPECT_TRUE(at::allclose(weight.grad().cpu(), on_host.grad(), 1e-4, 1e-5));
  });
}

TEST(LateDevice, IsWhatAWorldSaysRanksComputeOn) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    EXPECT_EQ(world.device(), late::device());
    EXPECT_EQ(world.device("late"), late::device());
    EXPECT_EQ(world.device("late:0"), late::device());
    EXPECT_TRUE(world.device("cpu").is_cpu());
    EXPECT_THROW(world.device("cuda"), UsageError);
    EXPECT_THROW(world.device("late:1"), UsageError);
    EXPECT_EQ(world.split(world.rank())->device(), late::device());
  })));
}

// Also if it is one device: two ranks would compute on it without a word.
TEST(LateDevice, OfTwoRanksThatSeeOneDeviceNeitherMayUseIt) {
  const late::Scope scope;
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join(late::join_options());
    try {
      world.device();
      ADD_FAILURE();
    } catch (const UsageError& error) {
      EXPECT_NE(error.message().find("Rank 1 has no device of its own: it sees 1 of type late"),
                std::string::npos)
          << error.what();
    }
    EXPECT_TRUE(world.device("cpu").is_cpu());
  })));
}

// An engine that cannot move its tensors: training there would fail at the first step.
TEST(LateDevice, IsNotTakenByItselfIfTheEngineDoesNotTakeIt) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    late::show_own_device(rank);
    const World world = World::join({.engine = "shm"});
    EXPECT_TRUE(world.device().is_cpu());
    EXPECT_EQ(world.device("late"), late::device());  // as asked for
  })));
}

TEST(LateDevice, LoadersCopyWithoutWaiting) {
  in_a_process([] {
    late::set_delays({.max_us = 0, .fixed_us = 3000});
    const at::Tensor data = at::arange(40.0).view({20, 2});
    const auto dataset = std::make_shared<TensorDataset>(data, at::arange(20));
    for (const int threads : {0, 2}) {
      Loader loader(dataset, DistributedSampler(20, 0, 1),
                    {.batch_size = 5, .threads = threads, .device = late::device()});
      const std::int64_t before = late::num_syncs();
      std::vector<Batch> batches;
      for (int i = 0; i < 4; ++i) batches.push_back(*loader.next());
      EXPECT_EQ(late::num_syncs(), before) << threads;
      for (const Batch& one : batches) {
        EXPECT_EQ(one.data.device(), late::device());
        const std::vector<std::int64_t> rows(one.indices.begin(), one.indices.end());
        EXPECT_TRUE(at::equal(one.data.cpu(), data.index_select(0, at::tensor(rows))));
        EXPECT_TRUE(at::equal(one.target.cpu(), at::tensor(rows)));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
