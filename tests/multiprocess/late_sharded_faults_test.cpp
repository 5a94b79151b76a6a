// What goes wrong with DdpOptions::shard on the late device: steps left out or failed on one rank,
// misuse, gathers that fail, lost ranks.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <filesystem>
#include <thread>

#include "multiprocess/late_sharded.h"
#include "multiprocess/sharded_saves.h"
#include "support/error_of.h"
#include "support/fault_script.h"
#include "support/has.h"
#include "support/on_late_device.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

// A rank does not come to a step. When all wrap again, they count the same steps, and save with the
// engine that works.
TEST(LateSharded, GoesOnAfterAStepThatARankHasLeftOut) {
  const late::Scope scope;
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    late::show_own_device(rank);
    JoinOptions options = late::join_options();
    options.timeout = std::chrono::seconds(2);
    const World world = World::join(options);
    WideNet model;
    DistributedDataParallel ddp(model, world, with(Shard::kGradients));
    ShardedAdamW optimizer(model->parameters(), 1e-2);
    const auto step = [&](int number) {
      loss_of(model->forward(batch(rank, number))).backward();
      optimizer.step();
    };
    step(0);
    loss_of(model->forward(batch(rank, 1))).backward();
    if (rank == 0) {
      const std::string text = error_of([&] { optimizer.step(); });
      EXPECT_TRUE(has(text, "those before this step")) << text;
    }
    ddp.discard();
    world.store()->set("here" + std::to_string(rank), "1");
    world.store()->wait({"here0", "here1"});
    ddp.rewrap();
    step(2);
    expect_same_bits(world, *model);
    Checkpointer(folder.path(), world).add(model).add(optimizer).save(3);
    late::synchronize_all();
  })));
}

bool fails_in_step = false;  // of this process
struct FailingAdamW : optim::AdamW {
  using optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(fails_in_step, false)) throw std::runtime_error("No step today.");
    return optim::AdamW::step(std::move(closure));
  }
};

// Others have written their slices: the model is not used any more until a checkpoint is loaded.
TEST(LateSharded, AStepThatFailsOnOneRankLeavesTornParameters) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(late::run(2, [&](const World& world) {
    WideNet model;
    DistributedDataParallel ddp(model, world, with(Shard::kGradients));
    optim::Sharded<FailingAdamW> optimizer(model->parameters(), to::AdamWOptions(1e-2));
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(model).add(optimizer);
    const auto backward = [&](int step) {
      loss_of(model->forward(batch(world.rank(), step))).backward();
    };
    backward(0);
    optimizer.step();
    checkpoints.save(1);
    backward(1);
    fails_in_step = world.rank() == 1;
    std::string text = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(has(text, "No step today.")) << text;
    ddp.discard();
    for (int round = 0; round < 2; ++round) {
      text = error_of([&] { backward(2); });
      EXPECT_TRUE(has(text, "has ended in the middle")) << text;
      text = error_of([&] { checkpoints.save(2); });
      EXPECT_TRUE(has(text, "has ended in the middle")) << text;
      ddp.rewrap();  // does not help
    }
    EXPECT_EQ(checkpoints.load_latest().step, 1);
    backward(1);
    optimizer.step();
    expect_same_bits(world, *model);
    // Without the wrapper it is not forgotten either.
    backward(2);
    fails_in_step = world.rank() == 1;
    EXPECT_THROW(optimizer.step(), Error);
    { const DistributedDataParallel ended = std::move(ddp); }
    text = error_of([&] { const DistributedDataParallel other(model, world); });
    EXPECT_TRUE(has(text, "has ended in the middle")) << text;
  })));
}

TEST(LateSharded, MisuseIsAnErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    WideNet model;
    DistributedDataParallel ddp(model, world, with(Shard::kGradients));
    ShardedAdamW optimizer(model->parameters(), 1e-2);
    const auto backward = [&](int step) {
      loss_of(model->forward(batch(world.rank(), step))).backward();
    };
    backward(0);
    optimizer.step();
    // Options that differ.
    static_cast<to::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(0.1 + world.rank());
    backward(1);
    std::string text = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(has(text, "lr 0.1")) << text;
    static_cast<to::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(0.1);
    optimizer.step();
    // A backward whose means nobody has used.
    backward(2);
    text = error_of([&] { backward(3); });
    EXPECT_TRUE(has(text, "were not used")) << text;
    ddp.discard();
    // Only one rank's parameter is elsewhere.
    if (world.rank() == 1) model->last->bias.set_data(model->last->bias.detach().clone());
    text = error_of([&] { backward(4); });
    EXPECT_TRUE(has(text, "last.bias is not where it was")) << text;
    ddp.rewrap();
    backward(5);
    optimizer.step();
    // A step after a local backward.
    {
      const auto guard = ddp.no_sync();
      backward(6);
    }
    text = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(has(text, "was local")) << text;
    ddp.discard();
    // A graph from before a step.
    const at::Tensor old = loss_of(model->forward(batch(world.rank(), 7)));
    backward(7);
    optimizer.step();
    EXPECT_THROW(old.backward(), c10::Error);
  })));
}

TEST(LateSharded, WhatCannotBeCutIsRefused) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    const auto refusal = [&](const auto& model, DdpOptions options = {}) {
      options.shard = Shard::kOptimizer;
      options.shard_min_bytes = 0;
      return error_of([&] { const DistributedDataParallel ddp(model, world, options); });
    };
    WideNet sparse(true);
    std::string text = refusal(sparse);
    EXPECT_TRUE(has(text, "sparse gradients on devices")) << text;
    WideNet mixed;
    mixed->last->to(at::kCPU);
    text = refusal(mixed);
    EXPECT_TRUE(has(text, "parameters in main memory")) << text;
    WideNet gaps;
    const at::Tensor wide = here(at::zeros({3, 2 * 37})).slice(1, 0, 74, 2);
    gaps->last->weight.set_data(wide);
    text = refusal(gaps);
    EXPECT_TRUE(has(text, "last.weight has gaps")) << text;
    WideNet tied;
    tied->norm->bias.set_data(tied->norm->weight.detach());
    text = refusal(tied);
    EXPECT_TRUE(has(text, "norm.bias shares its memory")) << text;
    // An optimizer whose wrapper has gone.
    WideNet model;
    ShardedAdamW optimizer(model->parameters(), 1e-2);
    {
      const DistributedDataParallel ddp(model, world, with(Shard::kOptimizer));
      loss_of(model->forward(batch(world.rank()))).backward();
      optimizer.step();
    }
    text = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(has(text, "has a part of what it keeps")) << text;
  })));
}

// The parameters that a rank did not get are told of in a later step, on all ranks.
TEST(LateSharded, AGatherThatFailsIsALaterStepsErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    WideNet model;
    DistributedDataParallel ddp(model, world, with(Shard::kGradients));
    ShardedAdamW optimizer(model->parameters(), 1e-2);
    const auto backward = [&](int step) {
      loss_of(model->forward(batch(world.rank(), step))).backward();
    };
    backward(0);
    optimizer.step();
    backward(1);
    late::synchronize_all();
    if (world.rank() == 1) late::fail_next();
    optimizer.step();
    late::synchronize_all();
    const std::string text = error_of([&] { backward(2); });
    EXPECT_TRUE(has(text, "all_gather of parameters failed after step() had returned")) << text;
    EXPECT_TRUE(has(text, "Load a checkpoint")) << text;
    backward(3);  // goes on
    optimizer.step();
  })));
}

class LateShardedLost : public testing::TestWithParam<late::LostPeer> {};
INSTANTIATE_TEST_SUITE_P(Engine, LateShardedLost,
                         testing::Values(late::LostPeer::kFails, late::LostPeer::kHangs),
                         [](const auto& one) {
                           return one.param == late::LostPeer::kFails ? "ItsCollectivesFail"
                                                                      : "ItsCollectivesHang";
                         });

// Its means may not have arrived yet.
TEST_P(LateShardedLost, BeforeAStepIsAnErrorInTime) {
  const late::Scope scope;
  late::set_lost_peer(GetParam());
  const auto results = run_ranks(2, [](int rank) {
    const World world = World::join(late::join_options());
    WideNet model;
    DistributedDataParallel ddp(model, world, with(Shard::kGradients));
    ShardedAdamW optimizer(model->parameters(), 1e-2);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      loss_of(model->forward(batch(rank, step))).backward();
      FaultScript().kill_at(1, 3).play(rank, step);
      const auto began = std::chrono::steady_clock::now();
      try {
        optimizer.step();
        EXPECT_LT(step, 3);
      } catch (const PeerLostError& error) {
        EXPECT_EQ(step, 3);
        EXPECT_EQ(error.peer(), 1) << error.what();
        EXPECT_TRUE(has(error.message(), "those before this step")) << error.what();
        EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
        EXPECT_TRUE(at::isfinite(model->first->weight.cpu()).all().item<bool>());
        return;
      }
    }
  });
  late::set_lost_peer(late::LostPeer::kFails);
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
}

}  // namespace
}  // namespace lockstep::test
