// Mixed precision and seeds, over ranks.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <lockstep/amp.h>
#include <lockstep/ddp.h>
#include <lockstep/error.h>
#include <lockstep/seed.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <limits>

#include "support/golden.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

TEST(Autocast, IsAScope) {
  const auto a = at::randn({4, 4});
  const auto type = [&] { return at::mm(a, a).scalar_type(); };
  EXPECT_EQ(type(), at::kFloat);
  {
    const Autocast outer(at::kBFloat16);
    EXPECT_EQ(type(), at::kBFloat16);
    {
      const Autocast inner(at::kHalf);
      EXPECT_EQ(type(), at::kHalf);
    }
    EXPECT_EQ(type(), at::kBFloat16);
  }
  EXPECT_EQ(type(), at::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_THROW(Autocast autocast(at::kDouble), UsageError);
}

// Casts of weights are kept within a scope; a step between two scopes must be seen.
TEST(Autocast, SeesNewWeightsInTheNextScope) {
  auto weight = at::ones({2, 2}).requires_grad_();
  const auto input = at::ones({1, 2});
  const auto compute = [&] {
    const Autocast autocast;
    return at::mm(input, weight).sum().item<float>();
  };
  EXPECT_EQ(compute(), 4);
  weight.data().mul_(2);
  EXPECT_EQ(compute(), 8);
}

TEST(Autocast, TrainsInBf16) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    seed_all(1, world);
    torch::nn::Linear model(8, 1);
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    at::manual_seed(10 + static_cast<std::uint64_t>(rank));
    float first = 0;
    float last = 0;
    for (int step = 0; step < 100; ++step) {
      const auto input = at::randn({16, 8});
      optimizer.zero_grad();
      at::Tensor loss;
      {
        const Autocast autocast;
        loss = (model(input) - input.sum(1, true)).pow(2).mean();
      }
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<float>();
    }
    EXPECT_EQ(model->weight.scalar_type(), at::kFloat);
    EXPECT_LT(last, first / 20);
    ddp.check_replicas();
  })));
}

TEST(GradScaler, ScalesBackAndGrows) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    auto weight = at::ones({3}).requires_grad_();
    torch::optim::SGD optimizer({weight}, 0.1);
    GradScaler scaler(world, {.scale = 8, .growth_interval = 2});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      scaler.scale((weight * 2).sum()).backward();
      EXPECT_EQ(weight.grad()[0].item<float>(), 2 * scaler.current_scale());
      scaler.unscale(optimizer);
      EXPECT_EQ(weight.grad()[0].item<float>(), 2);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
    }
    EXPECT_EQ(scaler.current_scale(), 32);
    EXPECT_NEAR(weight[0].item<float>(), 1 - 4 * 0.1 * 2, 1e-6);
    EXPECT_EQ(scaler.skipped(), 0);
  })));
}

// The gradients are each rank's own here: only the scaler makes ranks agree.
TEST(GradScaler, AnInfOnOneRankSkipsTheStepOnAll) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      auto weight = at::ones({3}).requires_grad_();
      torch::optim::SGD optimizer({weight}, 0.1);
      GradScaler scaler(world, {.scale = 1024});
      weight.mutable_grad() = at::ones({3});
      if (rank == 1) weight.mutable_grad()[2] = bad;
      EXPECT_FALSE(scaler.step(optimizer));
      scaler.update();
      EXPECT_EQ(scaler.current_scale(), 512);
      EXPECT_EQ(scaler.skipped(), 1);
      EXPECT_TRUE(at::equal(weight.detach(), at::ones({3})));
      weight.mutable_grad() = at::ones({3});
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      GradScaler resumed(world);
      resumed.load_state(scaler.state());
      EXPECT_EQ(resumed.current_scale(), 512);
      EXPECT_EQ(resumed.state().good_steps, 1);
    }
  })));
}

// As with Python's: each optimizer has its own step, and there is one update for all.
TEST(GradScaler, ServesSeveralOptimizers) {
  const World world = World::join();
  auto first = at::ones({2}).requires_grad_();
  auto second = at::ones({2}).requires_grad_();
  torch::optim::SGD one({first}, 0.1);
  torch::optim::SGD other({second}, 0.1);
  GradScaler scaler(world, {.scale = 8});
  scaler.scale((first + second).sum()).backward();
  EXPECT_TRUE(scaler.step(one));
  EXPECT_TRUE(scaler.step(other));
  scaler.update();
  EXPECT_NEAR(first[0].item<float>(), 0.9, 1e-6);
  EXPECT_NEAR(second[0].item<float>(), 0.9, 1e-6);

  // Only the one whose gradients overflowed is left out; the scale shrinks once.
  first.mutable_grad() = at::full({2}, 8.0F);
  second.mutable_grad() = at::full({2}, std::numeric_limits<float>::infinity());
  scaler.unscale(one);
  EXPECT_TRUE(scaler.step(one));
  EXPECT_FALSE(scaler.step(other));
  EXPECT_THROW(scaler.step(one), UsageError);
  EXPECT_THROW(scaler.unscale(one), UsageError);
  scaler.update();
  EXPECT_NEAR(first[0].item<float>(), 0.8, 1e-6);
  EXPECT_NEAR(second[0].item<float>(), 0.9, 1e-6);
  EXPECT_EQ(scaler.current_scale(), 4);
  EXPECT_EQ(scaler.skipped(), 1);
}

TEST(GradScaler, StepsAndScalesAsPythons) {
  const auto golden = read_golden("kit_golden.json").at("scaler");
  const World world = World::join();
  auto first = at::ones({3}).requires_grad_();
  auto second = at::ones({3}).requires_grad_();
  torch::optim::SGD one({first}, 0.1);
  torch::optim::SGD other({second}, 0.1);
  GradScaler scaler(world, {.scale = 8, .growth_interval = 3});
  ASSERT_EQ(golden.size(), 12U);
  for (int step = 0; step < 12; ++step) {
    const bool overflows = step == 2 || step == 5 || step == 6;
    const double factor = overflows ? std::numeric_limits<double>::infinity() : step + 1;
    one.zero_grad();
    other.zero_grad();
    scaler.scale(first.sum() + (second * factor).sum()).backward();
    scaler.step(one);
    scaler.step(other);
    scaler.update();
    const auto& expected = golden[static_cast<std::size_t>(step)];
    EXPECT_EQ(scaler.current_scale(), expected["scale"].get<double>()) << step;
    EXPECT_NEAR(first[0].item<double>(), expected["weights"][0].get<double>(), 1e-6) << step;
    EXPECT_NEAR(second[0].item<double>(), expected["weights"][1].get<double>(), 1e-6) << step;
  }
}

TEST(GradScaler, CanBeSwitchedOff) {
  const World world = World::join();
  auto weight = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.1);
  GradScaler scaler(world, {.enabled = false});
  scaler.scale(weight.sum()).backward();
  scaler.unscale(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_NEAR(weight[0].item<float>(), 0.9, 1e-6);
  EXPECT_EQ(scaler.current_scale(), 1);
}

// Averaged gradients are the same everywhere, so a rank that is out of data is not waited for.
TEST(GradScaler, NeedsNoCollectiveWhereGradientsAreAveraged) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    auto weight = at::ones({2}).requires_grad_();
    DistributedDataParallel ddp({{"weight", weight}}, world);
    torch::optim::SGD optimizer({weight}, 0.1);
    GradScaler scaler(world, {.scale = 4, .growth_interval = 1});
    const auto step = [&] {
      scaler.step(optimizer);
      scaler.update();
    };
    for (int i = 0; i < (rank == 0 ? 3 : 1); ++i) {
      optimizer.zero_grad();
      const bool is_bad = rank == 0 && i == 1;
      scaler.scale(weight.sum() * (is_bad ? std::numeric_limits<float>::infinity() : 1)).backward();
      if (rank == 0 && i == 2) scaler.unscale(optimizer);  // without the other rank
      step();
    }
    ddp.join(step);
    world.barrier();
    EXPECT_EQ(scaler.skipped(), 1);
    EXPECT_NEAR(weight[0].item<float>(), 0.8, 1e-6);
  })));
}

TEST(GradScaler, MisuseIsNamed) {
  const World world = World::join();
  auto weight = at::ones({1}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.1);
  GradScaler scaler(world);
  EXPECT_THROW(scaler.update(), UsageError);
  scaler.unscale(optimizer);
  EXPECT_THROW(scaler.unscale(optimizer), UsageError);
  EXPECT_THROW(GradScaler(world, {.scale = 0}), UsageError);
  EXPECT_THROW(GradScaler(world, {.growth = 1}), UsageError);
  EXPECT_THROW(GradScaler(world, {.backoff = 2}), UsageError);
  EXPECT_THROW(scaler.load_state({.scale = -1}), UsageError);
}

TEST(Seed, SameModelEverywhereAndNumbersOfTheirOwn) {
  at::manual_seed(7);
  const auto alone = at::randn({4});
  EXPECT_TRUE(all_passed(run_ranks(3, [&](int rank) {
    const World world = World::join();
    seed_all(7, world);
    const auto numbers = at::randn({4});
    if (rank == 0) {
      EXPECT_TRUE(at::equal(numbers, alone));
    }
    const auto all = world.all_gather(numbers);
    EXPECT_FALSE(at::equal(all[0], all[1]));
    EXPECT_FALSE(at::equal(all[1], all[2]));
    seed_all(7, world);
    EXPECT_TRUE(at::equal(at::randn({4}), numbers));
    deterministic(true);
    EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
    deterministic(false);
  })));
}

}  // namespace
}  // namespace lockstep::test
