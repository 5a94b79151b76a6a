// DdpOptions::shard and optim::Sharded: the bits of a training without them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include "multiprocess/sharded_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

std::vector<OnEngine> worlds() {
  std::vector<OnEngine> rows = {{"shm", "aa"}, {"shm", "aaa"}, {"solo", "a"}};
  if (why_no_engine("gloo").empty()) rows.push_back({"hierarchical", "aabb"});
  return rows;
}

class ShardedBits : public testing::TestWithParam<OnEngine> {
 protected:
  // Steps with a gradient for everything, then with a branch that is not used.
  template <typename T, typename Options>
  void expect_same_bits(const Options& options) {
    EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
      at::set_num_threads(1);
      Twins<T, Options> twins(world, options);
      for (int step = 0; step < 6; ++step) {
        twins.step(step, [&](auto& twin) {
          twin.optimizer->zero_grad();
          loss_of(twin.model->forward(batch(world.rank(), step), step % 3 != 2)).backward();
          twin.optimizer->step();
        });
      }
    })));
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedBits, testing::ValuesIn(worlds()),
                         [](const auto& test) { return name_of(test); });

TEST_P(ShardedBits, OurAdamW) { expect_same_bits<optim::AdamW>(to::AdamWOptions(1e-2)); }
TEST_P(ShardedBits, OurAdam) {
  expect_same_bits<optim::Adam>(to::AdamOptions(1e-2).amsgrad(true).weight_decay(0.1));
}
TEST_P(ShardedBits, OurSgd) {
  expect_same_bits<optim::SGD>(to::SGDOptions(1e-2).momentum(0.9).dampening(0.1));
}
TEST_P(ShardedBits, AdamW) { expect_same_bits<to::AdamW>(to::AdamWOptions(1e-2)); }
TEST_P(ShardedBits, Adam) { expect_same_bits<to::Adam>(to::AdamOptions(1e-2).weight_decay(0.1)); }
TEST_P(ShardedBits, Sgd) {
  expect_same_bits<to::SGD>(to::SGDOptions(1e-2).momentum(0.9).dampening(0.1).weight_decay(0.1));
}
TEST_P(ShardedBits, RmsProp) {
  expect_same_bits<to::RMSprop>(to::RMSpropOptions(1e-3).momentum(0.9).centered(true));
}
TEST_P(ShardedBits, Adagrad) {
  expect_same_bits<to::Adagrad>(to::AdagradOptions(1e-2).initial_accumulator_value(0.1));
}

// Clipping, an overflow that leaves out a step, a schedule and averages of weights, together.
TEST_P(ShardedBits, ClippingScalingAndAveraging) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
    at::set_num_threads(1);
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    std::vector<std::unique_ptr<GradScaler>> scalers;
    std::vector<std::unique_ptr<WeightAverage>> averages;
    for (auto& twin : twins.all) {
      scalers.push_back(std::make_unique<GradScaler>(world, ScalerOptions{.scale = 1024}));
      averages.push_back(
          std::make_unique<WeightAverage>(twin->model, AveragingOptions{.decay = 0.9}));
    }
    std::vector<double> norms(twins.all.size());
    for (int step = 0; step < 8; ++step) {
      for (std::size_t i = 0; i < twins.all.size(); ++i) {
        auto& twin = *twins.all[i];
        twin.optimizer->zero_grad();
        // One rank's overflow is everybody's.
        const bool is_bad = step == 3 && world.rank() == world.size() - 1;
        const at::Tensor loss = loss_of(twin.model->forward(batch(world.rank(), step)));
        scalers[i]->scale(is_bad ? loss * 1e38 : loss).backward();
        scalers[i]->unscale(*twin.optimizer);
        norms[i] = optim::clip_grad_norm(twin.model->parameters(), 0.01);
        EXPECT_EQ(scalers[i]->step(*twin.optimizer), step != 3);
        scalers[i]->update();
        averages[i]->update();
      }
      twins.expect_same(step);
      for (std::size_t i = 1; i < norms.size(); ++i) {
        EXPECT_TRUE(norms[i] == norms[0] || step == 3)
            << step << ": " << norms[0] << ", " << norms[i];
        EXPECT_TRUE(norms[i] > 0.01 || step == 3) << "nothing was clipped";
        const auto expected = averages[0]->tensors();
        const auto its = averages[i]->tensors();
        for (std::size_t k = 0; k < its.size(); ++k) {
          EXPECT_TRUE(its[k].tensor.equal(expected[k].tensor)) << its[k].name << step;
        }
      }
    }
    // The averages in place of the weights, on one rank at a time, and back.
    for (auto& average : averages) {
      if (world.rank() != 0) continue;
      const auto applied = average->apply();
    }
    world.barrier();
    twins.expect_same(8);
    for (std::size_t i = 0; i < averages.size(); ++i) {
      const at::Tensor before = twins.all[i]->model->first->weight.clone();
      {
        const auto applied = averages[i]->apply();
        EXPECT_FALSE(twins.all[i]->model->first->weight.equal(before));
      }
      EXPECT_TRUE(twins.all[i]->model->first->weight.equal(before));
    }
    twins.step(9, [&](auto& twin) {
      twin.optimizer->zero_grad();
      loss_of(twin.model->forward(batch(world.rank(), 9))).backward();
      twin.optimizer->step();
    });
  })));
}

// One rank has the averages in its model: the others do not wait for it.
TEST(Sharded, AveragesThatAreAppliedOnOneRankAreNotUpdated) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm", .timeout = std::chrono::seconds(20)});
    Twin<> twin(world, Shard::kOptimizer, [](std::vector<at::Tensor> parameters) {
      return make_optimizer<optim::AdamW>(Shard::kOptimizer, std::move(parameters),
                                          to::AdamWOptions(1e-2));
    });
    WeightAverage average(twin.model, {.decay = 0.5});
    average.update();
    const auto began = std::chrono::steady_clock::now();
    const auto refused = [&] {
      const std::string text = error_of([&] { average.update(); });
      EXPECT_TRUE(has(text, "The averaged weights are in the model")) << text;
    };
    if (rank == 1) {
      const auto applied = average.apply();
      refused();
    } else {
      refused();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
    average.update();
    EXPECT_EQ(average.num_updates(), 2);
  })));
}

// Parameters of 16 bits with master weights and others of 32 in one group, of the same sizes.
TEST(Sharded, MasterWeightsAreTheirParametersAlone) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm"});
    at::set_num_threads(1);
    std::vector<std::vector<at::Tensor>> results;
    for (const Shard mode : kAllModes) {
      std::vector<NamedTensor> tensors;
      std::vector<at::Tensor> parameters;
      for (int i = 0; i < 6; ++i) {
        const auto type = i % 2 == 0 ? at::kBFloat16 : at::kFloat;
        parameters.push_back(numbers({300}, i).to(type).detach().requires_grad_());
        tensors.push_back({"p" + std::to_string(i), parameters.back()});
      }
      const DistributedDataParallel ddp(tensors, world, {.shard = mode, .shard_min_bytes = 0});
      auto optimizer = make_optimizer<optim::AdamW>(mode, parameters, to::AdamWOptions(1e-4));
      dynamic_cast<optim::AdamW&>(*optimizer).use_master_weights();
      for (int step = 0; step < 5; ++step) {
        optimizer->zero_grad();
        at::Tensor loss = at::zeros({});
        for (const at::Tensor& one : parameters) {
          loss = loss + (one.to(at::kFloat) * numbers({300}, 7 * step + rank)).pow(2).mean();
        }
        loss.backward();
        optimizer->step();
      }
      results.push_back(parameters);
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[1][i].equal(results[0][i])) << i;
      EXPECT_TRUE(results[2][i].equal(results[0][i])) << i;
    }
  })));
}

TEST(Sharded, AParameterHasOneOptimizer) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join({.engine = "shm"});
    WideNet model;
    {
      const DistributedDataParallel ddp(model, world,
                                        {.shard = Shard::kOptimizer, .shard_min_bytes = 0});
      const auto train = [&](torch::optim::Optimizer& optimizer) {
        loss_of(model->forward(batch(world.rank()))).backward();
        optimizer.step();
      };
      std::vector<at::Tensor> twice = model->parameters();
      twice.push_back(model->wide->weight);
      optim::Sharded<optim::SGD> of_twice(twice, to::SGDOptions(0.1));
      expect_says(thrown_by<UsageError>([&] { train(of_twice); }), {"wide.weight", "twice"});
      optim::Sharded<optim::SGD> first(model->parameters(), to::SGDOptions(0.1));
      train(first);
      optim::Sharded<optim::SGD> second(model->parameters(), to::SGDOptions(0.1));
      expect_says(thrown_by<UsageError>([&] { train(second); }), {"two optimizers"});
    }
    expect_says(thrown_by<UsageError>([&] { const DistributedDataParallel ddp(model, world); }),
                {"share the parameters", "DdpOptions::shard"});
  })));
}

// What exists once: parameters on all ranks of a host are one memory.
TEST(Sharded, ParametersAreTheHosts) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join({.engine = "shm"});
    Twin<> twin(world, Shard::kGradients, [](std::vector<at::Tensor> parameters) {
      return make_optimizer<optim::AdamW>(Shard::kGradients, std::move(parameters),
                                          to::AdamWOptions(1e-2));
    });
    twin.ddp->change_parameters([&] { twin.model->last->bias.fill_(7); });
    EXPECT_TRUE(twin.model->last->bias.detach().equal(at::full({3}, 7.0F)));
    world.barrier();
    if (world.rank() == 1) twin.model->last->bias.data().fill_(8);
    world.barrier();
    EXPECT_TRUE(twin.model->last->bias.detach().equal(at::full({3}, 8.0F)));
    world.barrier();
    const auto error = thrown_by<UsageError>(
        [&] { loss_of(twin.model->forward(batch(world.rank()))).backward(); });
    expect_says(error, {"last.bias", "change_parameters()"});
  })));
}

TEST(Sharded, ASmallModelStaysReplicas) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm"});
    const auto is_shared = [&](const at::Tensor& large) {
      at::Tensor small = at::ones({300}).requires_grad_();
      const DistributedDataParallel ddp({{"small", small}, {"large", large}}, world,
                                        {.shard = Shard::kGradients});
      optim::Sharded<optim::SGD> optimizer(std::vector<at::Tensor>{small}, to::SGDOptions(1));
      (small * (rank + 1)).sum().backward();
      EXPECT_EQ(ddp.full_gradients().size(), 1U);
      const bool has_own = small.grad().defined();
      optimizer.step();
      EXPECT_TRUE(small.detach().equal(at::full({300}, -0.5F)));
      return !has_own;
    };
    const int num_elements = (1 << 20) - 300;          // f32
    EXPECT_TRUE(is_shared(at::ones({num_elements})));  // frozen parameters count
    EXPECT_FALSE(is_shared(at::ones({num_elements - 1})));

    // What is refused does not depend on the size.
    WideNet model;
    const auto wrap = [&](DdpOptions options) {
      options.shard = Shard::kGradients;
      const DistributedDataParallel ddp(model, world, options);
    };
    expect_says(thrown_by<UsageError>([&] { wrap({.hook = bf16_hook()}); }), {"hook bf16"});
    const std::size_t bytes = rank == 0 ? 0 : 4 << 20;
    expect_says(thrown_by<MismatchError>([&] { wrap({.shard_min_bytes = bytes}); }),
                {"from 0 bytes", "from 4194304 bytes"});
  })));
}

}  // namespace
}  // namespace lockstep::test
