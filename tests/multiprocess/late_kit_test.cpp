// The training kit on a device, over the late one: it does the same as in main memory, and the host
// waits where it is said to, and nowhere else.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/optim.h>

#include <limits>
#include <optional>

#include "support/fault_script.h"
#include "support/on_late_device.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

// A model on the device, and one in main memory that is trained in the same way.
struct Pair {
  explicit Pair(at::ScalarType type = at::kFloat) : other(late::on_cpu([] { return Net(); })) {
    model->to(type);
    other->to(type);
  }
  template <typename F>
  void each(const F& f) {
    f(model);
    f(other);
  }
  // A backward of both.
  void train(int rank, int step) {
    const at::Tensor input = batch(rank, step).to(model->first->weight.scalar_type());
    const at::Tensor its_input = input.cpu();
    each([](Net& net) { net->zero_grad(); });
    loss_of(model->forward(input)).backward();
    loss_of(other->forward(its_input)).backward();
  }

  Net model;
  Net other;
};

TEST(LateKit, ClipsWithOneWaitOrNone) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Pair pair;
    const DistributedDataParallel ddp(pair.model, world);
    const DistributedDataParallel its_ddp(pair.other, world);
    for (int step = 0; step < 4; ++step) {
      for (const double max_norm : {0.01, 100.0}) {
        pair.train(world.rank(), step);
        const double expected = optim::clip_grad_norm(pair.other->parameters(), max_norm);
        const std::int64_t before = late::num_syncs();
        if (step % 2 == 0) {
          EXPECT_NEAR(optim::clip_grad_norm(pair.model->parameters(), max_norm), expected, 1e-5);
          EXPECT_EQ(late::num_syncs() - before, 1);
        } else {
          const at::Tensor norm = optim::clip_grad_norm_async(pair.model->parameters(), max_norm);
          EXPECT_EQ(late::num_syncs() - before, 0);
          EXPECT_NEAR(norm.item<double>(), expected, 1e-5);
        }
        late::expect_close(*pair.model, *pair.other);
      }
    }
    // What is not finite stays as it is, for who looks at it.
    for (const auto& one : pair.model->parameters()) one.mutable_grad().fill_(2);
    pair.model->last->bias.mutable_grad().fill_(std::numeric_limits<float>::quiet_NaN());
    EXPECT_TRUE(optim::clip_grad_norm_async(pair.model->parameters(), 1).isnan().item<bool>());
    EXPECT_TRUE(pair.model->first->weight.grad().eq(2).all().item<bool>());
    EXPECT_THROW(optim::clip_grad_norm_async(pair.model->parameters(), 0), UsageError);
    // In main memory it is the same call.
    const at::Tensor norm = optim::clip_grad_norm_async(pair.other->parameters(), 100);
    EXPECT_EQ(norm.item<double>(), optim::clip_grad_norm(pair.other->parameters(), 100));
  })));
}

// Two parts train a model each, and the whole world a third, in one loss.
TEST(LateKit, HalvesTrainTwoModelsAndTheWholeWorldAThird) {
  EXPECT_TRUE(all_passed(late::run(4, [](const World& world) {
    const int color = world.rank() / 2;
    const auto half = world.split(color);
    Pair own;
    Pair common;
    const DistributedDataParallel of_half(own.model, *half, {.name = "own"});
    const DistributedDataParallel of_all(common.model, world, {.name = "common"});
    const DistributedDataParallel its_half(own.other, *half, {.name = "own, cpu"});
    const DistributedDataParallel its_all(common.other, world, {.name = "common, cpu"});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor input = batch(world.rank(), step);
      const at::Tensor its_input = input.cpu();
      for (Pair* const pair : {&own, &common}) pair->each([](Net& net) { net->zero_grad(); });
      const std::int64_t before = late::num_syncs();
      (loss_of(own.model->forward(input)) + loss_of(common.model->forward(input))).backward();
      if (step > 0) {
        EXPECT_EQ(late::num_syncs(), before) << "step " << step;
      }
      (loss_of(own.other->forward(its_input)) + loss_of(common.other->forward(its_input)))
          .backward();
      late::expect_close(*own.model, *own.other);
      late::expect_close(*common.model, *common.other);
    }
    expect_same_bits(*half, *own.model);
    expect_same_bits(world, *common.model);
  })));
}

// bf16 parameters, f32 sums and master weights.
TEST(LateKit, AddsUpIn32Bits) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Pair pair(at::kBFloat16);
    DistributedDataParallel ddp(pair.model, world, {.reduce_type = at::kFloat});
    DistributedDataParallel its_ddp(pair.other, world, {.reduce_type = at::kFloat});
    optim::AdamW optimizer(pair.model->parameters(), 1e-2);
    optim::AdamW its_optimizer(pair.other->parameters(), 1e-2);
    for (auto* const one : {&optimizer, &its_optimizer}) one->use_master_weights();
    for (int step = 0; step < 4; ++step) {
      pair.train(world.rank(), step);
      EXPECT_EQ(pair.model->first->weight.grad().scalar_type(), at::kFloat);
      late::expect_close(*pair.model, *pair.other, 2e-2);
      const std::int64_t before = late::num_syncs();
      optimizer.step();
      EXPECT_EQ(late::num_syncs(), before);
      its_optimizer.step();
    }
    expect_same_bits(world, *pair.model);
  })));
}

TEST(LateKit, AveragesWeightsWithoutWaiting) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    for (const AverageRule rule : {AverageRule::kExponential, AverageRule::kEqual}) {
      Pair pair;
      DistributedDataParallel ddp(pair.model, world);
      DistributedDataParallel its_ddp(pair.other, world);
      torch::optim::SGD optimizer(pair.model->parameters(), 0.1);
      torch::optim::SGD its_optimizer(pair.other->parameters(), 0.1);
      WeightAverage average(pair.model, {.rule = rule, .decay = 0.5});
      WeightAverage its_average(pair.other, {.rule = rule, .decay = 0.5});
      for (int step = 0; step < 4; ++step) {
        pair.train(world.rank(), step);
        const std::int64_t before = late::num_syncs();
        optimizer.step();
        average.update();
        EXPECT_EQ(late::num_syncs(), before) << "step " << step;
        its_optimizer.step();
        its_average.update();
      }
      const at::Tensor trained = pair.model->first->weight.detach().clone();
      {
        const auto applied = average.apply();
        const auto its_applied = its_average.apply();
        EXPECT_FALSE(at::equal(pair.model->first->weight, trained));
        late::expect_close(*pair.model, *pair.other);
      }
      EXPECT_TRUE(at::equal(pair.model->first->weight, trained));
    }
  })));
}

// Ranks train apart from step 1 on, and their weights are averaged every second step.
TEST(LateKit, AveragesReplicasNowAndThen) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Pair pair;
    const auto hook = [] {
      return post_local_sgd_hook({.start_step = 1, .averages_in_part = false});
    };
    DistributedDataParallel ddp(pair.model, world, {.hook = hook()});
    DistributedDataParallel its_ddp(pair.other, world, {.hook = hook()});
    torch::optim::SGD optimizer(pair.model->parameters(), 0.1);
    torch::optim::SGD its_optimizer(pair.other->parameters(), 0.1);
    PeriodicAverager averager(optimizer, world, {.start_step = 1, .period = 2});
    PeriodicAverager its_averager(its_optimizer, world, {.start_step = 1, .period = 2});
    for (int step = 0; step < 6; ++step) {
      pair.train(world.rank(), step);
      optimizer.step();
      averager.step();
      its_optimizer.step();
      its_averager.step();
      late::expect_close(*pair.model, *pair.other);
    }
  })));
}

// The rank without data plays along in both models.
TEST(LateKit, JoinsTwoModelsWithUnevenData) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Pair first;
    Pair second;
    std::vector<std::unique_ptr<DistributedDataParallel>> wrapped;
    std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
    for (Pair* const pair : {&first, &second}) {
      pair->each([&](Net& net) {
        wrapped.push_back(std::make_unique<DistributedDataParallel>(net, world));
        optimizers.push_back(std::make_unique<torch::optim::SGD>(net->parameters(), 0.1));
      });
    }
    const auto step_all = [&] {
      for (auto& one : optimizers) one->step();
      for (auto& one : optimizers) one->zero_grad();
    };
    for (int step = 0; step < 2 + 3 * world.rank(); ++step) {
      first.train(world.rank(), step);
      second.train(world.rank() + 3, step);
      step_all();
    }
    std::vector<DistributedDataParallel*> models;
    for (auto& one : wrapped) models.push_back(one.get());
    join(models, step_all);
    for (Pair* const pair : {&first, &second}) {
      late::expect_close(*pair->model, *pair->other);
      expect_same_bits(world, *pair->model);
    }
  })));
}

// The next step begins while the checkpoint is written. Master weights, and the random numbers of
// the device, go on as well.
TEST(LateKit, SavesWhileItTrains) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(late::run(2, [&](const World& world) {
    at::Generator random = at::globalContext().defaultGenerator(late::device());
    std::vector<std::uint64_t> drawn;
    const auto run = [&](int from, int to, bool is_resumed) {
      Net model;
      model->to(at::kBFloat16);
      DistributedDataParallel ddp(model, world, {.reduce_type = at::kFloat});
      optim::AdamW optimizer(model->parameters(), 1e-3);
      optimizer.use_master_weights();
      WeightAverage average(model, {.decay = 0.5});
      Checkpointer checkpointer(folder.path(), world);
      checkpointer.add(model).add(optimizer).add(average).add(ddp);
      random.set_current_seed(static_cast<std::uint64_t>(is_resumed ? 99 : 5 + world.rank()));
      if (is_resumed) {
        EXPECT_EQ(checkpointer.load_latest().step, from);
      }
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(world.rank(), step).to(at::kBFloat16))).backward();
        optimizer.step();
        average.update();
        drawn.push_back(at::check_generator<at::CPUGeneratorImpl>(random)->random64());
        if (step + 1 == 3 && !is_resumed) checkpointer.save_async(3);
      }
      checkpointer.wait();
      std::vector<at::Tensor> result;
      for (const auto& one : model->parameters()) result.push_back(one.detach().cpu());
      for (const NamedTensor& one : average.tensors()) result.push_back(one.tensor.cpu());
      return result;
    };
    const auto whole = run(0, 6, false);
    const auto resumed = run(3, 6, true);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(at::equal(whole[i], resumed[i])) << i;
    }
    EXPECT_TRUE(std::equal(drawn.begin() + 3, drawn.begin() + 6, drawn.begin() + 6));
  })));
}

// A call of the world, not of a model: whoever queues operations for a lost rank is told.
TEST(LateKit, ALostRankEndsCallsOfTheWorld) {
  const late::Scope scope;
  const auto results = run_ranks(2, [](int rank) {
    late::show_own_device(rank);
    JoinOptions options = late::join_options();
    options.timeout = std::chrono::seconds(3);
    const World world = World::join(options);
    const at::Tensor numbers = here(at::ones({100}));
    const auto began = std::chrono::steady_clock::now();
    try {
      for (int step = 0;; ++step) {
        late::synchronize_all();
        FaultScript().kill_at(1, 3).play(rank, step);
        const at::Tensor sum = world.all_reduce(numbers.clone());
        EXPECT_LE(step, 4);
        EXPECT_TRUE(sum.eq(2).all().item<bool>() || step >= 3) << step;
      }
    } catch (const Error& error) {
      const bool is_right =
          error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kTimeout;
      EXPECT_TRUE(is_right) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(2 * 3 + 2));
  });
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
}

}  // namespace
}  // namespace lockstep::test
