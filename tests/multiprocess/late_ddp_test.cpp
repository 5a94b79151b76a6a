// DistributedDataParallel on a device, over the late one: all of ddp_checks.cpp, and that the same
// comes out as in main memory, with hooks, buffers, optimizers and checkpoints, while the host
// waits for nothing.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/optim.h>

#include <filesystem>

#include "multiprocess/checks.h"
#include "support/on_late_device.h"

namespace lockstep::test {
namespace {

using std::chrono::seconds;

void train(Net& model, int rank, int step = 0) {
  loss_of(model->forward(batch(rank, step))).backward();
}

double ms_since(late::Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(late::Clock::now() - began).count();
}

class LateContract : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LateContract, testing::Values(1, 2, 3),
                         testing::PrintToStringParamName());

TEST_P(LateContract, IsKept) {
  const late::Scope scope;
  run_checks(GetParam(), late::join_options(), {.deadline = seconds(110)});
}

// One block of a GPT.
struct GptImpl : torch::nn::Module {
  GptImpl() {
    register_module("tokens", tokens);
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("last_norm", last_norm);
    register_module("up", up);
    register_module("down", down);
    register_module("head", head);
    move_here(*this);
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = tokens(input);
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const at::Tensor scores = torch::matmul(parts[0], parts[1].transpose(-1, -2)) / 4;
    x = x + torch::matmul(torch::softmax(scores, -1), parts[2]);
    x = x + down(torch::gelu(up(last_norm(x))));
    return head(x);
  }
  torch::nn::Embedding tokens{20, 16};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear qkv{16, 48};
  torch::nn::LayerNorm last_norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear up{16, 64};
  torch::nn::Linear down{64, 16};
  torch::nn::Linear head{16, 20};
};
TORCH_MODULE(Gpt);

// With operations that take 1 ms each the host queues step after step, and waits for other hosts
// only.
TEST(LateDdp, TheHostWaitsForNothingInAStep) {
  const auto results = late::run(2, [](const World& world) {
    Gpt model;
    DistributedDataParallel ddp(model, world, {.bucket_bytes = 4096, .first_bucket_bytes = 1024});
    ddp.accumulate(2);
    optim::AdamW optimizer(model->parameters(), 1e-3);
    optim::Schedule schedule(optimizer, optim::cosine(10));
    const at::Tensor input =
        here(torch::arange(4 * 8).remainder(20).view({4, 8}) + world.rank()).remainder(20);
    const at::Tensor target = input.roll(1, 1).view(-1);
    for (int step = 0; step < 6; ++step) {
      if (step == 3) late::set_delays({.max_us = 0, .fixed_us = 1000});
      const std::int64_t before = late::num_syncs();
      optimizer.zero_grad(step % 2 == 0);
      if (step == 4) ddp.set_weight(world.rank() + 1);
      const auto began = late::Clock::now();
      for (int i = 0; i < 2; ++i) {
        torch::nn::functional::cross_entropy(model->forward(input).view({-1, 20}), target)
            .backward();
      }
      optim::clip_grad_norm_async(model->parameters(), 0.1);
      optimizer.step();
      schedule.step();
      // In the first step it looks once whether all ranks read the same data.
      if (step > 0) {
        EXPECT_EQ(late::num_syncs() - before, 0) << "step " << step;
      }
      if (step >= 3) std::printf("step %d: host %.1f ms\n", step, ms_since(began));
    }
    const auto began = late::Clock::now();
    late::synchronize_all();
    std::printf("the device needs %.1f ms more\n", ms_since(began));
    EXPECT_GT(ms_since(began), 100) << "the device was not late";
    expect_same_bits(world, *model);
  });
  EXPECT_TRUE(all_passed(results));
  std::fputs(results[0].output.c_str(), stdout);
}

struct NormImpl : torch::nn::Module {
  NormImpl() {
    register_module("first", first);
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("last", last);
    move_here(*this);
    const torch::NoGradGuard no_grad;
    int seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes().vec(), ++seed));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor image = input.view({-1, 1, 2, 3});
    return last(torch::tanh(norm(first(input) + conv(image).flatten(1))));
  }
  torch::nn::Linear first{6, 8};
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 4, 2)};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Linear last{8, 3};
};
TORCH_MODULE(Norm);

TEST(LateDdp, SyncBatchNormAndBuffers) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Norm model;
    Norm other = late::on_cpu([] { return Norm(); });
    const SyncBatchNorm sync(model, world);
    const SyncBatchNorm its_sync(other, world);
    DistributedDataParallel ddp(model, world, {.buffers = BufferSync::kMean});
    DistributedDataParallel its_ddp(other, world, {.buffers = BufferSync::kMean});
    for (int step = 0; step < 4; ++step) {
      const at::Tensor input = batch(world.rank(), step, 4 + world.rank());
      const at::Tensor its_input = input.cpu();
      model->zero_grad();
      other->zero_grad();
      const std::int64_t before = late::num_syncs();
      loss_of(model->forward(input)).backward();
      if (step > 0) {
        EXPECT_EQ(late::num_syncs(), before);
      }
      loss_of(other->forward(its_input)).backward();
      late::expect_close(*model, *other, 1e-4);
      EXPECT_TRUE(
          at::allclose(model->norm->running_var.cpu(), other->norm->running_var, 1e-4, 1e-5));
      EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), step + 1);
    }
    expect_same_bits(world, *model);
    expect_same_bits(world, model->norm->running_mean, "running_mean");
  })));
}

TEST(LateDdp, ABatchOfOneRowIsRefusedOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    torch::nn::BatchNorm1d layer(4);
    layer->to(late::device());
    std::string error;
    try {
      const SyncBatchNorm sync(layer, world);
      layer(numbers({8, 4}, 1));
      layer(numbers({world.rank() == 1 ? 1 : 8, 4}, 2));
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    EXPECT_NE(error.find(world.rank() == 1 ? "Expected more than 1 value per channel"
                                           : "Rank 1 could not call the layer"),
              std::string::npos)
        << error;
  })));
}

TEST(LateDdp, BuffersFollowRank0) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Norm model;
    DistributedDataParallel ddp(model, world);
    for (int step = 0; step < 3; ++step) {
      loss_of(model->forward(batch(world.rank(), step))).backward();
      const at::Tensor all = world.all_gather(model->norm->running_mean);
      EXPECT_TRUE(at::equal(all[0], all[1]));
    }
  })));
}

using MakeHook = std::shared_ptr<CommHook> (*)();
struct HookCase {
  const char* name;
  MakeHook make;
  double tolerance;
};

class LateHooks : public testing::TestWithParam<HookCase> {};
INSTANTIATE_TEST_SUITE_P(
    Hooks, LateHooks,
    testing::Values(
        HookCase{"bf16", bf16_hook, 1e-5}, HookCase{"fp16", fp16_hook, 1e-5},
        HookCase{"power_sgd",
                 [] { return power_sgd_hook({.rank = 2, .start_step = 1, .min_compression = 1}); },
                 1e-3},
        HookCase{"top_k", [] { return top_k_hook({.fraction = 0.3}); }, 1e-5}),
    [](const auto& one) { return std::string(one.param.name); });

// The same on the device and on the CPU, with what a hook keeps from step to step.
TEST_P(LateHooks, DoTheSameAsOnTheCpuAndDoNotWait) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    Net other = late::on_cpu([] { return Net(); });
    const DdpOptions options{.bucket_bytes = 512, .first_bucket_bytes = 512};
    DdpOptions mine = options;
    DdpOptions its = options;
    mine.hook = GetParam().make();
    its.hook = GetParam().make();
    DistributedDataParallel ddp(model, world, mine);
    DistributedDataParallel its_ddp(other, world, its);
    const c10::Stream side = late::new_stream();
    for (int step = 0; step < 6; ++step) {
      const at::Tensor input = batch(world.rank(), step);
      const at::Tensor its_input = input.cpu();
      model->zero_grad();
      other->zero_grad();
      const std::int64_t before = late::num_syncs();
      // A hook is started in the stream of the forward, and ends in that of the caller.
      const at::Tensor loss = late::in_stream(side, [&] { return loss_of(model->forward(input)); });
      loss.backward();
      if (step > 0) {
        EXPECT_EQ(late::num_syncs(), before) << "step " << step;
      }
      loss_of(other->forward(its_input)).backward();
      late::expect_close(*model, *other, GetParam().tolerance);
      expect_same_bits(world, *model);
    }
  })));
}

// A factor of gradients that are not finite leaves no traces: the next step is right.
TEST(LateDdp, PowerSgdForgetsAStepThatIsNotFinite) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(model, world,
                                {.hook = power_sgd_hook({.start_step = 0, .min_compression = 1})});
    for (int step = 0; step < 5; ++step) {
      model->zero_grad();
      const double factor =
          step == 2 && world.rank() == 1 ? std::numeric_limits<double>::infinity() : 1;
      (loss_of(model->forward(batch(world.rank(), step))) * factor).backward();
      const bool is_finite = at::isfinite(model->left->weight.grad()).all().item<bool>();
      EXPECT_EQ(is_finite, step != 2) << "step " << step;
    }
    expect_same_bits(world, *model);
  })));
}

TEST(LateDdp, GradScalerSkipsAndScales) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    Net other = late::on_cpu([] { return Net(); });
    DistributedDataParallel ddp(model, world);
    DistributedDataParallel its_ddp(other, world);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    torch::optim::SGD its_optimizer(other->parameters(), 0.1);
    GradScaler scaler(world, {.scale = 64});
    for (int step = 0; step < 4; ++step) {
      const bool is_bad = step == 1;
      optimizer.zero_grad();
      its_optimizer.zero_grad();
      const double factor =
          is_bad && world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
      scaler.scale(loss_of(model->forward(batch(world.rank(), step))) * factor).backward();
      const std::int64_t before = late::num_syncs();
      EXPECT_EQ(scaler.step(optimizer), !is_bad);
      scaler.update();
      EXPECT_EQ(late::num_syncs() - before, 1) << "whether there was an overflow";
      if (is_bad) continue;
      loss_of(other->forward(batch(world.rank(), step).cpu())).backward();
      its_optimizer.step();
      late::expect_close(*model, *other);
    }
    expect_same_bits(world, *model);
  })));
}

// Half of the model on the device, half in main memory: two threads of autograd, two engines, one
// order of buckets.
TEST(LateDdp, OneModelOnTheDeviceAndOnTheCpu) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    const auto make = [](bool is_split) {
      std::vector<NamedTensor> all;
      for (int i = 0; i < 8; ++i) {
        at::Tensor tensor = numbers({6, 6}, i).cpu();
        if (is_split && i % 2 == 0) tensor = tensor.to(late::device());
        all.push_back({"p" + std::to_string(i), tensor.requires_grad_()});
      }
      return all;
    };
    const auto loss = [](const std::vector<NamedTensor>& all, int rank) {
      at::Tensor value = batch(rank).cpu();
      for (const NamedTensor& one : all) {
        value = torch::tanh(torch::matmul(value.to(one.tensor.device()), one.tensor));
      }
      return loss_of(value);
    };
    const auto mine = make(true);
    const auto its = make(false);
    DistributedDataParallel ddp(mine, world, {.bucket_bytes = 300, .first_bucket_bytes = 150});
    DistributedDataParallel its_ddp(its, world);
    for (int step = 0; step < 5; ++step) {
      for (const auto* all : {&mine, &its}) {
        for (const NamedTensor& one : *all) one.tensor.mutable_grad() = at::Tensor();
        loss(*all, world.rank() + step).backward();
      }
      for (std::size_t i = 0; i < mine.size(); ++i) {
        EXPECT_TRUE(at::allclose(mine[i].tensor.grad().cpu(), its[i].tensor.grad(), 1e-4, 1e-6))
            << mine[i].name;
      }
    }
  })));
}

// The host waits no more than for a step after backward: not at all.
TEST(LateDdp, OptimizerInBackwardDoesTheSameAndDoesNotWait) {
  for (const bool has_hook : {false, true}) {
    EXPECT_TRUE(all_passed(late::run(2, [&](const World& world) {
      Net model;
      Net twin;
      const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
      torch::optim::SGD inner(model->parameters(), sgd);
      torch::optim::SGD outer(twin->parameters(), sgd);
      const auto options = [&](torch::optim::Optimizer* optimizer) {
        return DdpOptions{.bucket_bytes = 300,
                          .first_bucket_bytes = 64,
                          .hook = has_hook ? bf16_hook() : nullptr,
                          .optimizer = optimizer};
      };
      DistributedDataParallel ddp(model, world, options(&inner));
      DistributedDataParallel its_ddp(twin, world, options(nullptr));
      for (int step = 0; step < 5; ++step) {
        const at::Tensor input = batch(world.rank(), step);
        const std::int64_t before = late::num_syncs();
        loss_of(model->forward(input)).backward();
        if (step > 0) {  // in the first, it looks whether all ranks read the same data
          EXPECT_EQ(late::num_syncs(), before) << "step " << step;
        }
        twin->zero_grad();
        loss_of(twin->forward(input)).backward();
        outer.step();
        const auto theirs = twin->named_parameters();
        for (const auto& one : model->named_parameters()) {
          EXPECT_TRUE(at::equal(one.value(), theirs[one.key()])) << one.key() << " in " << step;
          EXPECT_FALSE(one.value().grad().defined()) << one.key();
        }
      }
      EXPECT_GT(ddp.stats().buckets, 2);
      expect_same_bits(world, *model);
    })));
  }
}

TEST(LateDdp, BucketsAreOfTheEnginesMemory) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(model, world);
    EXPECT_EQ(late::num_allocated(), 0);
    train(model, world.rank());
    EXPECT_EQ(late::num_allocated(), 1);
  })));
}

TEST(LateDdp, CheckpointsGoOnExactly) {
  const std::string folder = testing::TempDir() + "lockstep_late_" + std::to_string(::getpid());
  EXPECT_TRUE(all_passed(late::run(2, [&](const World& world) {
    const auto run = [&](int from, int to, bool is_resumed) {
      Norm model;
      DistributedDataParallel ddp(
          model, world, {.hook = power_sgd_hook({.start_step = 0, .min_compression = 1})});
      torch::optim::Adam optimizer(model->parameters(), 0.01);
      Checkpointer checkpointer(folder, world);
      checkpointer.add(model).add(optimizer).add(ddp);
      if (is_resumed) {
        EXPECT_EQ(checkpointer.load_latest().step, from);
      }
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(world.rank(), step))).backward();
        optimizer.step();
        if (step + 1 == 3 && !is_resumed) checkpointer.save(3);
      }
      std::vector<at::Tensor> result;
      for (const auto& parameter : model->parameters()) result.push_back(parameter.detach().cpu());
      return result;
    };
    const auto whole = run(0, 6, false);
    const auto resumed = run(3, 6, true);
    for (std::size_t i = 0; i < whole.size(); ++i)
      EXPECT_TRUE(at::equal(whole[i], resumed[i])) << i;
  })));
  std::filesystem::remove_all(folder);
}

// On a device nobody looks at bits: what lockstep writes has to be known without.
TEST(LateDdp, MasterWeightsFollowJoin) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    const at::Tensor weight = here(at::ones({40}, at::kBFloat16)).requires_grad_();
    DistributedDataParallel ddp({{"weight", weight}}, world);
    optim::SGD optimizer({weight}, 0.125);
    optimizer.use_master_weights();
    const auto step = [&] {
      optimizer.zero_grad();
      weight.sum().backward();
      optimizer.step();
    };
    for (int i = 0; i < (world.rank() == 0 ? 4 : 1); ++i) step();
    ddp.join();
    const std::int64_t before = late::num_syncs();
    step();
    EXPECT_EQ(late::num_syncs(), before);
    EXPECT_TRUE(at::equal(weight.detach().cpu(), at::full({40}, 0.375, at::kBFloat16)))
        << weight.cpu();
  })));
}

}  // namespace
}  // namespace lockstep::test
