// Weights that are means over steps (WeightAverage), and statistics of BatchNorm that fit them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include <limits>

#include "multiprocess/checkpoint_run.h"
#include "multiprocess/ddp_model.h"
#include "support/error_of.h"
#include "support/golden.h"
#include "support/golden_tensor.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

TEST(WeightAverage, IsPythons) {
  const auto golden = read_golden("training_golden.json")["averages"];
  for (const bool is_swa : {false, true}) {
    torch::nn::Linear model(5, 3);
    WeightAverage average(
        model, {.rule = is_swa ? AverageRule::kEqual : AverageRule::kExponential, .decay = 0.9});
    for (int step = 0; step < 8; ++step) {
      const at::NoGradGuard no_grad;
      model->weight.copy_(numbers({3, 5}, step));
      model->bias.copy_(numbers({3}, 50 + step));
      average.update();
    }
    EXPECT_EQ(average.num_updates(), 8);
    const auto& expected = golden[is_swa ? "equal" : "exponential"];
    const auto guard = average.apply();
    expect_close(model->weight, expected["weight"]);
    expect_close(model->bias, expected["bias"]);
  }
}

TEST(WeightAverage, IsAppliedAndTakenBack) {
  DropNet model;
  WeightAverage average(model, {.decay = 0.5});
  EXPECT_TRUE(
      has(error_of([&] { const auto guard = average.apply(); }), "Nothing was averaged yet"));
  average.update();
  const auto state = [&] {
    std::vector<at::Tensor> all;
    for (const at::Tensor& one : model->parameters()) all.push_back(one.detach().clone());
    for (const at::Tensor& one : model->buffers()) all.push_back(one.detach().clone());
    return all;
  };
  const auto first = state();
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& one : model->parameters()) one.mul_(3);
  }
  const auto tripled = state();
  average.update();
  const at::Tensor loss = model->forward(at::ones({4, 4})).sum();  // a graph that has to stay valid
  const auto trained = state();
  {
    const auto applied = average.apply();
    EXPECT_TRUE(average.is_applied());
    EXPECT_TRUE(at::allclose(model->first->weight, first[0] * 2));
    model->forward(at::ones({4, 4}));  // writes the running statistics
    EXPECT_TRUE(has(error_of([&] { average.update(); }), "The averaged weights are in the model"));
    EXPECT_TRUE(has(error_of([&] { const auto guard = average.apply(); }),
                    "The averaged weights are in the model"));
  }
  EXPECT_FALSE(average.is_applied());
  EXPECT_TRUE(is_equal(state(), trained)) << "weights and statistics are what they were";
  EXPECT_TRUE(at::equal(model->first->weight, tripled[0]));
  loss.backward();
}

TEST(WeightAverage, Of16BitsIsInF32AndBuffersTakePartIfAsked) {
  at::Tensor weight = at::full({3}, 1.0, at::kBFloat16);
  const at::Tensor running = at::full({2}, 4.0F);
  const at::Tensor count = at::full({}, 7, at::kLong);
  WeightAverage average({{"weight", weight}}, {.decay = 0.999, .averages_buffers = true},
                        {{"running", running}, {"count", count}});
  average.update();
  weight.fill_(2);
  running.fill_(8);
  count.fill_(9);
  for (int i = 0; i < 10; ++i) average.update();
  // In bf16, 1 + 0.001 is 1.
  EXPECT_NEAR(average.tensors()[0].tensor[0].item<double>(), 2 - std::pow(0.999, 10), 1e-5);
  EXPECT_NEAR(average.tensors()[1].tensor[0].item<double>(), 8 - 4 * std::pow(0.999, 10), 1e-4);
  const auto guard = average.apply();
  EXPECT_EQ(count.item<std::int64_t>(), 9) << "whole numbers are the latest";
  EXPECT_LT(running[0].item<double>(), 5);
  EXPECT_TRUE(
      has(error_of([] { const WeightAverage bad(std::vector<NamedTensor>{}, {.decay = 1.5}); }),
          "decay is 1.5"));
  EXPECT_TRUE(has(error_of([] { const WeightAverage bad(std::shared_ptr<torch::nn::Module>{}); }),
                  "There is no model"));
}

TEST(WeightAverage, IsTheSameOnAllRanksAndGoesOnFromACheckpoint) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int) {
    const World world = World::join();
    const auto train = [](Training& training, WeightAverage& average, int steps) {
      for (int i = 0; i < steps; ++i) {
        training.step();
        average.update();
      }
    };
    Training whole(world);
    WeightAverage expected(whole.model, {.decay = 0.8});
    train(whole, expected, 9);
    for (const NamedTensor& one : expected.tensors()) expect_same_bits(world, one.tensor, one.name);
    {
      Training first(world);
      WeightAverage average(first.model, {.decay = 0.8});
      Checkpointer checkpoints(folder.path(), world);
      first.add_to(checkpoints);
      checkpoints.add(average);
      train(first, average, 5);
      {
        const auto guard = average.apply();
        EXPECT_TRUE(has(error_of([&] { checkpoints.save(5); }), "The averaged weights are in"));
      }
      checkpoints.save(5);
    }
    Training second(world);
    WeightAverage average(second.model, {.decay = 0.8});
    Checkpointer checkpoints(folder.path(), world);
    second.add_to(checkpoints);
    checkpoints.add(average);
    EXPECT_EQ(checkpoints.load_latest().step, 5);
    EXPECT_EQ(average.num_updates(), 5);
    train(second, average, 4);
    EXPECT_TRUE(is_equal(whole.state(), second.state()));
    for (std::size_t i = 0; i < average.tensors().size(); ++i) {
      EXPECT_TRUE(at::equal(average.tensors()[i].tensor, expected.tensors()[i].tensor));
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// Buffers that are each rank's own are saved as a module's are: rank 0's.
TEST(WeightAverage, OfBuffersThatDifferIsSaved) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join();
    torch::nn::BatchNorm1d model(3);
    DistributedDataParallel ddp(model, world, {.buffers = BufferSync::kOff});
    WeightAverage average(model, {.decay = 0.5, .averages_buffers = true});
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(model).add(average);
    average.update();
    model->running_mean.fill_(rank + 1);
    average.update();
    checkpoints.save(1);
    checkpoints.load_latest();
    ASSERT_EQ(average.num_buffers(), 3U);
    const NamedTensor& mean = average.tensors()[2];
    EXPECT_EQ(mean.name, "running_mean");
    EXPECT_TRUE(at::equal(mean.tensor, at::full({3}, 0.5))) << mean.tensor;
    // Parameters that differ are an error as before.
    model->weight.data().fill_(rank);
    average.update();
    EXPECT_TRUE(has(error_of([&] { checkpoints.save(2); }), "weight is not the same on rank 0"));
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST(WeightAverage, IsOfMasterWeightsIfAsked) {
  at::Tensor weight = at::ones({4}, at::kBFloat16).requires_grad_();
  optim::SGD optimizer({weight}, 5e-4);
  optimizer.use_master_weights();
  WeightAverage average(std::vector<NamedTensor>{{"weight", weight}}, {.decay = 0.5});
  average.use_masters_of(optimizer);
  average.update();
  for (int i = 0; i < 2; ++i) {
    weight.mutable_grad() = at::ones({4}, at::kBFloat16);
    optimizer.step();
    average.update();
  }
  EXPECT_EQ(weight[0].item<double>(), 1) << "steps are too small for 16 bits";
  EXPECT_NEAR(average.tensors()[0].tensor[0].item<double>(), 1 - 6.25e-4, 1e-6);
  // What is written to the parameter counts.
  weight.data().fill_(3);
  average.update();
  EXPECT_NEAR(average.tensors()[0].tensor[0].item<double>(), 2 - 3.125e-4, 1e-6);
}

TEST(WeightAverage, NumbersOfUpdatesThatCannotBeAreRefused) {
  WeightAverage average(std::vector<NamedTensor>{{"weight", at::ones({4})}});
  for (const std::int64_t bad : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
    EXPECT_TRUE(has(error_of([&] { average.load_state(bad); }), "updates cannot be"));
  }
}

torch::nn::Sequential norm_net() {
  torch::nn::Linear first(5, 4);
  const at::NoGradGuard no_grad;
  first->weight.copy_(numbers({4, 5}, 1));
  first->bias.copy_(numbers({4}, 2));
  return torch::nn::Sequential(first, torch::nn::BatchNorm1d(4));
}

TEST(RecomputeBatchNorm, IsPythonsOverTheBatchesOfAllRanks) {
  const auto golden = read_golden("training_golden.json")["batch_norm"];
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join();
    auto model = norm_net();
    auto* const norm = model->ptr(1)->as<torch::nn::BatchNorm1dImpl>();
    model->forward(numbers({6, 5}, 99));  // forgotten
    model->eval();
    // Rank 0 has three of the four batches.
    recompute_batch_norm(*model, world, [&] {
      EXPECT_TRUE(norm->is_training());
      for (int i = rank == 0 ? 0 : 3; i < (rank == 0 ? 3 : 4); ++i) {
        model->forward(numbers({6, 5}, 10 + i));
      }
    });
    expect_close(norm->running_mean, golden["mean"]);
    expect_close(norm->running_var, golden["variance"]);
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 4);
    expect_same_bits(world, norm->running_mean, "mean");
    expect_same_bits(world, norm->running_var, "variance");
    EXPECT_FALSE(norm->is_training());
    EXPECT_EQ(norm->options.momentum(), 0.1);

    // One rank's problem is all ranks', and costs nobody the statistics that there are.
    EXPECT_TRUE(has(error_of([&] {
                      recompute_batch_norm(*model, world, [&] {
                        model->forward(numbers({6, 5}, 77));
                        if (rank == 1) throw std::runtime_error("no more pictures");
                      });
                    }),
                    "no more pictures"));
    expect_close(norm->running_mean, golden["mean"]);
    EXPECT_TRUE(has(error_of([&] { recompute_batch_norm(*model, world, [] {}); }), "saw no batch"));
    // A layer that is not used comes after one that is.
    torch::nn::ModuleList both(model, torch::nn::BatchNorm1d(4));
    EXPECT_TRUE(
        has(error_of([&] {
              recompute_batch_norm(*both, world, [&] { model->forward(numbers({6, 5}, 77)); });
            }),
            "saw no batch"));
    EXPECT_EQ(norm->options.momentum(), 0.1);
    expect_close(norm->running_mean, golden["mean"]);
    expect_close(norm->running_var, golden["variance"]);
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 4);
    torch::nn::Linear without(2, 2);
    recompute_batch_norm(*without, world, [] { FAIL() << "there is nothing to compute"; });
  })));
}

}  // namespace
}  // namespace lockstep::test
