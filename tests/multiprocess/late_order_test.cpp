// What must come after what on a device, and what makes the host wait: over the late one, with
// streams that are held up where it matters.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <thread>

#include "support/error_of.h"
#include "support/has.h"
#include "support/on_late_device.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong(100);  // a step takes about 5 ms

// What is queued in the stream from now on comes that much later.
void hold_up(const c10::Stream& stream, milliseconds time = kLong) {
  late::enqueue(stream.id(), [time] { std::this_thread::sleep_for(time); });
}

// The input is made before a stream is held up: copying it to the device waits.
void train(Net& model, const at::Tensor& input) { loss_of(model->forward(input)).backward(); }

void expect_mean(const Net& model, int step) {
  expect_gradients(model, mean_gradients(2, [step](Net& local, int rank) {
                     loss_of(local->forward(batch(rank, step))).backward();
                   }));
}

// Sums in the memory of the bucket.
class InPlaceHook : public CommHook {
 public:
  std::string text() const override { return "in_place"; }
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    auto work = comm.all_reduce(bucket.flat);
    if (std::exchange(throws_next, false)) throw std::runtime_error("A hook has failed.");
    return [work, flat = bucket.flat, size = comm.size()] {
      work->wait();
      flat.div_(size);
    };
  }

  bool throws_next = false;
};

// Zeros are still summed in the buckets on this rank, as rank 1 is late, when it goes on.
TEST(LateOrder, TheLastRoundOfJoinIsDoneBeforeTheNextStep) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(model, world);
    for (int epoch = 0; epoch < 3; ++epoch) {
      train(model, batch(world.rank(), epoch));
      expect_mean(model, epoch);
      model->zero_grad();
      if (world.rank() == 1) hold_up(late::stream());
      ddp.join([] {});
    }
  })));
}

class LateDroppedStep : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Reducer, LateDroppedStep, testing::Bool(),
                         [](const auto& one) { return one.param ? "WithAHook" : "WithoutAHook"; });

TEST_P(LateDroppedStep, IsDoneBeforeTheNextOne) {
  EXPECT_TRUE(all_passed(late::run(2, [has_hook = GetParam()](const World& world) {
    Net model;
    DdpOptions options;
    if (has_hook) options.hook = std::make_shared<InPlaceHook>();
    DistributedDataParallel ddp(model, world, options);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor input = batch(world.rank(), step);
      train(model, input);
      expect_mean(model, step);
      model->zero_grad();
      if (world.rank() == 1) {
        hold_up(late::stream());
        model->left->weight.requires_grad_(false);
      }
      EXPECT_THROW(train(model, input), UsageError);
      model->left->weight.requires_grad_(true);
      model->zero_grad();
    }
  })));
}

// The same after a hook's own error: it has begun to sum.
TEST(LateOrder, AStepWhoseHookFailsIsDoneBeforeTheNextOne) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    const auto hook = std::make_shared<InPlaceHook>();
    DistributedDataParallel ddp(model, world, {.hook = hook});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor input = batch(world.rank(), step);
      train(model, input);
      expect_mean(model, step);
      model->zero_grad();
      if (world.rank() == 1) hold_up(late::stream());
      hook->throws_next = true;
      EXPECT_TRUE(has(error_of([&] { train(model, input); }), "A hook has failed"));
      model->zero_grad();
    }
  })));
}

// Writes to the bucket late, in the stream that it is called in.
class LateWritingHook : public InPlaceHook {
 public:
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    if (!throws_next) return InPlaceHook::start(std::move(bucket), comm);
    hold_up(late::stream());
    bucket.flat.add_(1);
    throw std::runtime_error("A hook has failed.");
  }
};

// What a failed hook has queued is done before the memory of buckets is anybody else's.
TEST(LateOrder, AFailedHookIsDoneBeforeItsBucketsGo) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    const at::Tensor input = batch(world.rank());
    std::int64_t bytes = 0;
    {
      const auto hook = std::make_shared<LateWritingHook>();
      DistributedDataParallel ddp(model, world, {.hook = hook});
      train(model, input);
      model->zero_grad();
      train(model, input);  // the buckets are laid out once more
      bytes = static_cast<std::int64_t>(model->first->weight.grad().storage().nbytes());
      model->zero_grad();
      late::synchronize_all();
      hook->throws_next = true;
      EXPECT_TRUE(has(error_of([&] { train(model, input); }), "A hook has failed"));
    }
    late::synchronize(late::stream().id());
    std::this_thread::sleep_for(kLong / 4);  // the engine's stream has used the memory, too
    const at::Tensor fresh =
        at::zeros({bytes / 4}, at::TensorOptions(at::kFloat).device(late::device()));
    late::synchronize_all();
    EXPECT_TRUE(fresh.eq(0).all().item<bool>()) << fresh.cpu();
  })));
}

// Sums in memory of its own, which goes when the last operation on it is queued.
class OwnMemoryHook : public CommHook {
 public:
  std::string text() const override { return "own_memory"; }
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    at::Tensor own = bucket.flat / comm.size();
    auto work = comm.all_reduce(own);
    return [work, own, flat = bucket.flat]() mutable {
      work->wait();
      hold_up(late::stream());
      flat.copy_(own);
      own.reset();
    };
  }
};

// It is used for something else after what is in the stream that it belongs to: start() and what it
// returns are called in the same.
TEST(LateOrder, WhatAHookAllocatesBelongsToTheStreamThatItEndsIn) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(model, world, {.hook = std::make_shared<OwnMemoryHook>()});
    for (int step = 0; step < 3; ++step) {
      train(model, batch(world.rank(), step));
      expect_mean(model, step);
      model->zero_grad();
    }
  })));
}

// Gloo sums in threads of its own: in main memory the host waits.
TEST(LateOrder, ADroppedStepIsDoneInMainMemory) {
  if (std::ranges::any_of(engines(), [](const EngineInfo& info) {
        return info.name == "gloo" && !info.unavailable.empty();
      })) {
    GTEST_SKIP() << "there is no Gloo";
  }
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "gloo"});
    const at::Tensor large = at::zeros({4 << 20}).requires_grad_();
    const at::Tensor small = at::zeros({1}).requires_grad_();
    const std::vector<NamedTensor> all = {{"large", large}, {"small", small}};
    DistributedDataParallel ddp(all, world, {.hook = std::make_shared<InPlaceHook>()});
    const auto train_with = [&](double factor) {
      for (const NamedTensor& one : all) one.tensor.mutable_grad() = at::Tensor();
      ((large * factor).sum() + small.sum()).backward();
    };
    for (int step = 1; step < 4; ++step) {
      train_with(step * (rank + 1));
      EXPECT_TRUE(large.grad().eq(1.5 * step).all().item<bool>()) << step;
      if (rank == 1) small.requires_grad_(false);
      EXPECT_THROW(train_with(100), UsageError);
      small.requires_grad_(true);
    }
  })));
}

struct Branches {
  Branches(const World& its_world, const DdpOptions& options)
      : world(its_world), ddp(model, its_world, options) {
    place() = at::kCPU;
    other = Net();
    place() = late::device();
    its_ddp.emplace(other, its_world);
  }

  // Compares with the same step in main memory.
  void expect_same(int step) {
    loss_of(other->forward(batch(world.rank(), step).cpu())).backward();
    const auto theirs = other->named_parameters();
    for (const auto& one : model->named_parameters()) {
      EXPECT_TRUE(at::allclose(one.value().grad().cpu(), theirs[one.key()].grad(), 1e-5, 1e-5))
          << one.key() << " in step " << step;
    }
    model->zero_grad();
    other->zero_grad();
  }

  World world;
  Net model;
  Net other{nullptr};
  DistributedDataParallel ddp;
  std::optional<DistributedDataParallel> its_ddp;
  c10::Stream main = late::stream();
  c10::Stream side = late::new_stream();
};

// A bucket with gradients of both branches is full in the middle of backward: the hook in one
// stream posts it while the other one's gradient is not yet there.
TEST(LateOrder, ABucketIsSentAfterAllStreamsThatWriteToIt) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Branches both(world, {.bucket_bytes = 600, .first_bucket_bytes = 128});
    Net& model = both.model;
    model->right->weight.register_hook(
        [&](const at::Tensor&) { hold_up(both.main, milliseconds(20)); });
    for (int step = 0; step < 4; ++step) {
      const at::Tensor hidden = torch::tanh(model->first(batch(world.rank(), step)));
      late::order(both.main, both.side);
      at::Tensor left;
      {
        const c10::StreamGuard in_side(both.side);
        hidden.record_stream(both.side);
        left = torch::tanh(model->left(hidden));
      }
      // Made after the left one, so its gradients come first.
      const at::Tensor right = torch::tanh(model->right(hidden));
      late::order(both.side, both.main);
      left.record_stream(both.main);
      loss_of(model->last(hidden + (left + right))).backward();
      EXPECT_GT(both.ddp.stats().buckets, 2);
      both.expect_same(step);
    }
  })));
}

// The first hook, in a side stream, lays the buckets out and clears them.
TEST(LateOrder, BucketsAreReadyBeforeAnotherStreamWritesToThem) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    for (int round = 0; round < 2; ++round) {
      Branches both(world, {});
      Net& model = both.model;
      for (const at::Tensor& one : model->last->parameters()) {  // whichever comes first
        one.register_hook([&](const at::Tensor&) { hold_up(both.side); });
      }
      const at::Tensor hidden = torch::tanh(model->first(batch(world.rank())));
      const at::Tensor sum =
          hidden + torch::tanh(model->left(hidden)) + torch::tanh(model->right(hidden));
      late::order(both.main, both.side);
      at::Tensor loss;
      {
        const c10::StreamGuard in_side(both.side);
        sum.record_stream(both.side);
        loss = loss_of(model->last(sum));
      }
      late::order(both.side, both.main);
      loss.record_stream(both.main);
      loss.backward();
      both.expect_same(0);
    }
  })));
}

// Backward again, with parameters that have not changed and other data, in a stream that the
// program has not ordered after the one before: without lockstep it need not.
void train_in_both_streams(Branches& both, int step) {
  const at::Tensor other = batch(both.world.rank(), step + 50);
  const at::Tensor input = batch(both.world.rank(), step);
  late::synchronize_all();
  if (both.world.rank() == 1) hold_up(both.main);
  train(both.model, other);
  both.model->zero_grad();
  {
    const c10::StreamGuard in_side(both.side);
    train(both.model, input);
  }
  late::order(both.side, both.main);
  both.expect_same(step);
}

TEST(LateOrder, TheNextStepMayBeInAnotherStream) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Branches both(world, {});
    late::synchronize_all();
    for (int step = 0; step < 3; ++step) {
      train_in_both_streams(both, step);
    }
  })));
}

// The second step of a wrapper lays the buckets out anew, and clears them.
TEST(LateOrder, BucketsMayBeLaidOutAnewInAnotherStream) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    for (int round = 0; round < 3; ++round) {
      Branches both(world, {.hook = std::make_shared<InPlaceHook>()});
      train_in_both_streams(both, round);
    }
  })));
}

// The buckets were made in the stream of the forward, and gradients are used in another, even after
// the wrapper.
TEST(LateOrder, GradientsOutliveTheWrapper) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    const c10::Stream side = late::new_stream();
    at::Tensor used;
    {
      Net model;
      DistributedDataParallel ddp(model, world);
      late::in_stream(side, [&] {
        return loss_of(model->forward(batch(world.rank())));
      }).backward();
      late::synchronize_all();
      late::set_delays({.max_us = 0, .fixed_us = 20000});
      used = model->first->weight.grad() * 1;
    }
    late::synchronize_all();
    late::set_delays({});
    const auto expected = mean_gradients(
        2, [](Net& local, int rank) { loss_of(local->forward(batch(rank))).backward(); });
    EXPECT_TRUE(at::allclose(used, expected[0], 1e-5, 1e-6));
  })));
}

TEST(LateOrder, AModelThatWasNotMovedIsAnErrorOnAllRanks) {
  const late::Scope scope;
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join(late::join_options());
    if (rank == 1) place() = at::kCPU;
    Net model;
    const std::string error = error_of([&] { DistributedDataParallel ddp(model, world); });
    EXPECT_TRUE(has(error, "rank 0: parameter first.weight Float [8, 6] on late")) << error;
    EXPECT_TRUE(has(error, "rank 1: parameter first.weight Float [8, 6] on cpu")) << error;
  })));
}

// The factors then begin as they would have, with vectors that differ.
TEST(LateOrder, PowerSgdForgetsAFirstStepThatIsNotFinite) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(
        model, world, {.hook = power_sgd_hook({.rank = 2, .start_step = 0, .min_compression = 1})});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const double factor =
          step == 0 && world.rank() == 1 ? std::numeric_limits<double>::infinity() : 1;
      (loss_of(model->forward(batch(world.rank(), step))) * factor).backward();
      EXPECT_EQ(at::isfinite(model->left->weight.grad()).all().item<bool>(), step != 0);
      int num_factors = 0;
      for (const auto& [name, tensor] : ddp.hook_state()) {
        if (!name.ends_with(".right")) continue;
        ++num_factors;
        EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;
        EXPECT_FALSE(at::allclose(tensor[0], tensor[1])) << name << " in step " << step;
      }
      EXPECT_GT(num_factors, 0);
    }
    expect_same_bits(world, *model);
  })));
}

TEST(LateOrder, SyncBatchNormFindsCallsThatOthersHaveNotMade) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    torch::nn::BatchNorm1d layer(4);
    layer->to(late::device());
    const auto call = [&](int rows) { layer(numbers({rows, 4}, world.rank())); };
    const SyncBatchNorm sync(layer, world);
    if (world.rank() == 0) layer->num_batches_tracked.fill_(1000);  // has loaded weights
    for (int step = 0; step < 3; ++step) call(8);
    if (world.rank() == 1) {
      EXPECT_THROW(call(1), c10::Error);
    }
    const std::string error = error_of([&] { call(8); });
    EXPECT_TRUE(has(error, "was called 1 times on rank 0, but 2 times on rank 1")) << error;
  })));
}

// Rank 0 writes the counter once more than the others, and all have its value then.
TEST(LateOrder, SyncBatchNormGoesOnAfterRank0HasLoadedBuffers) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    torch::nn::BatchNorm1d layer(4);
    layer->to(late::device());
    const SyncBatchNorm sync(layer, world);
    DistributedDataParallel ddp(layer, world);
    const auto call = [&] { layer(numbers({8, 4}, world.rank())); };
    for (int step = 0; step < 3; ++step) call();
    if (world.rank() == 0) layer->num_batches_tracked.fill_(1000);
    ddp.rewrap();
    EXPECT_EQ(error_of(call), "no error");
    EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 1001);
  })));
}

// In all other steps the host waits for no device (LateDdp.TheHostWaitsForNothingInAStep).
TEST(LateOrder, ComparingReplicasWaitsOnce) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(model, world, {.check_every = 3});
    for (int step = 0; step < 7; ++step) {
      const at::Tensor input = batch(world.rank(), step);
      model->zero_grad();
      const std::int64_t before = late::num_syncs();
      loss_of(model->forward(input)).backward();
      if (step == 0) continue;  // it looks whether all ranks read the same data
      EXPECT_EQ(late::num_syncs() - before, (step + 1) % 3 == 0 ? 1 : 0) << "step " << step;
    }
    const torch::NoGradGuard no_grad;
    if (world.rank() == 1) model->right->bias.add_(1);
    EXPECT_TRUE(has(error_of([&] { ddp.check_replicas(); }), "right.bias is not the same"));
  })));
}

}  // namespace
}  // namespace lockstep::test
