// DdpOptions::shard with the rest of the kit: whatever else a training does, the bits are those of
// a training without it.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include "multiprocess/sharded_model.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

// Under sanitizers two of them, which reach all code.
std::vector<OnEngine> kit_worlds() {
  std::vector<OnEngine> rows = {{"shm", "aa"}};
  if (why_no_engine("gloo").empty()) rows.push_back({"hierarchical", "aab"});
#ifndef LOCKSTEP_SANITIZED
  rows.push_back({"shm", "aaa"});
#endif
  return rows;
}

class ShardedKit : public testing::TestWithParam<OnEngine> {
 protected:
  static void run(const std::function<void(const World&)>& body) {
    EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
      at::set_num_threads(1);
      body(world);
    })));
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedKit, testing::ValuesIn(kit_worlds()),
                         [](const auto& test) { return name_of(test); });

at::Tensor data(const World& world, int step) { return batch(world.rank(), step); }

// One step of one mode, with a loss of the usual kind.
template <typename Model>
void plain_step(Twin<Model>& twin, const at::Tensor& input, bool use_wide = true) {
  twin.optimizer->zero_grad();
  loss_of(twin.model->forward(input, use_wide)).backward();
  twin.optimizer->step();
}

// The second half of the parameters in a group of its own, with another rate.
template <typename Options>
void split_groups(to::Optimizer& optimizer, const Options& options) {
  std::vector<at::Tensor>& all = optimizer.param_groups()[0].params();
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
  std::vector<at::Tensor> second(middle, all.end());
  all.erase(middle, all.end());
  optimizer.add_param_group({std::move(second), std::make_unique<Options>(options)});
}

TEST_P(ShardedKit, AddsUpGradients) {
  run([](const World& world) {
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    for (auto& twin : twins.all) twin->ddp->accumulate(2);
    for (int step = 0; step < 3; ++step) {
      twins.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        // The wide layer has a gradient of the first backward alone.
        (loss_of(twin.model->forward(data(world, 2 * step))) / 2).backward();
        EXPECT_EQ(twin.ddp->num_pending(), 1);
        (loss_of(twin.model->forward(data(world, 2 * step + 1), false)) / 2).backward();
        twin.optimizer->step();
      });
    }
    for (auto& twin : twins.all) twin->ddp->accumulate(1);
    for (int step = 3; step < 6; ++step) {
      twins.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        for (int i = 0; i < 2; ++i) {
          const auto guard = twin.ddp->no_sync();
          loss_of(twin.model->forward(data(world, 3 * step + i))).backward();
        }
        loss_of(twin.model->forward(data(world, 3 * step + 2))).backward();
        twin.optimizer->step();
      });
    }
  });
}

TEST_P(ShardedKit, WeighsRanks) {
  run([](const World& world) {
    Twins<optim::SGD, to::SGDOptions> twins(world, to::SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      twins.step(step, [&](auto& twin) {
        twin.ddp->set_weight(step == 1 ? 3 * world.rank() : 1 + 2 * world.rank());
        plain_step(twin, data(world, step));
      });
    }
  });
}

// A backward within backward reaches a layer again whose gradient, in several parts, has been sent.
TEST_P(ShardedKit, AddsLateGradients) {
  run([](const World& world) {
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-3));
    for (int step = 0; step < 4; ++step) {
      twins.step(step, [&](auto& twin) {
        auto& net = *twin.model;
        twin.optimizer->zero_grad();
        if (step == 3) twin.ddp->set_weight(1 + world.rank());
        at::Tensor hidden = net.first(data(world, step));
        if (step != 2 || world.rank() == 1) hidden = Reentrant::apply(hidden, net.wide->weight);
        hidden = net.norm(torch::tanh(hidden));
        loss_of(net.last(torch::tanh(net.other(net.wide(hidden))))).backward();
        twin.optimizer->step();
      });
    }
  });
}

TEST_P(ShardedKit, TakesBranchesOfSomeRanksAndOfNone) {
  run([](const World& world) {
    Twins<optim::Adam, to::AdamOptions> twins(world, to::AdamOptions(1e-2));
    for (int step = 0; step < 6; ++step) {
      twins.step(step, [&](auto& twin) {
        plain_step(twin, data(world, step), step % 3 != 1 && (world.rank() + step) % 2 == 0);
      });
    }
  });
}

struct SparseWideNet : WideNet {
  SparseWideNet() : WideNet(true) {}
};

TEST_P(ShardedKit, UpdatesSparseEmbeddings) {
  run([](const World& world) {
    Twins<to::SGD, to::SGDOptions, SparseWideNet> sgd(world, to::SGDOptions(0.1));
    Twins<to::Adagrad, to::AdagradOptions, SparseWideNet> adagrad(world, to::AdagradOptions(0.05));
    for (int step = 0; step < 4; ++step) {
      sgd.step(step, [&](auto& twin) { plain_step(twin, data(world, step)); });
      adagrad.step(step, [&](auto& twin) { plain_step(twin, data(world, step)); });
    }
  });
}

TEST_P(ShardedKit, FollowsGroupsSchedulesAndNewParameters) {
  run([](const World& world) {
    std::vector<at::Tensor> later;
    Twins<optim::AdamW, to::AdamWOptions> twins(
        world, to::AdamWOptions(1e-2), {}, {}, [&](to::Optimizer& optimizer) {
          auto& all = optimizer.param_groups()[0].params();
          later.push_back(all.back());
          all.pop_back();
          split_groups(optimizer, to::AdamWOptions(3e-3).weight_decay(0.2));
        });
    std::vector<optim::Schedule> schedules;
    for (auto& twin : twins.all) {
      schedules.emplace_back(*twin->optimizer, optim::warm_up(3, optim::cosine(5)));
    }
    for (int step = 0; step < 6; ++step) {
      std::size_t index = 0;
      twins.step(step, [&](auto& twin) {
        if (step == 3) {
          twin.optimizer->add_param_group(
              {{later[index]}, std::make_unique<to::AdamWOptions>(0.02)});
        }
        plain_step(twin, data(world, step), step != 4);
        if (step < 3) schedules[index].step();
        ++index;
      });
    }
  });
}

// The optimizer has all parameters, as most programs give it.
TEST_P(ShardedKit, LeavesFrozenLayersAlone) {
  run([](const World& world) {
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2), {}, [](auto& model) {
      for (auto& one : model->wide->parameters()) one.set_requires_grad(false);
      model->table->weight.set_requires_grad(false);
    });
    const at::Tensor before = twins.all.front()->model->wide->weight.clone();
    for (int step = 0; step < 3; ++step) {
      twins.step(step, [&](auto& twin) { plain_step(twin, data(world, step)); });
    }
    for (auto& twin : twins.all) EXPECT_TRUE(twin->model->wide->weight.equal(before));
  });
}

TEST_P(ShardedKit, KeepsMasterWeights) {
  run([](const World& world) {
    const auto make_bf16 = [](auto& model) { model->to(at::kBFloat16); };
    const auto use_masters = [](to::Optimizer& optimizer) {
      dynamic_cast<optim::MasterWeights&>(optimizer).use_master_weights();
    };
    DdpOptions options;
    options.reduce_type = at::kFloat;
    Twins<optim::AdamW, to::AdamWOptions> adam(world, to::AdamWOptions(1e-3).amsgrad(true), options,
                                               make_bf16, use_masters);
    Twins<optim::SGD, to::SGDOptions> sgd(world, to::SGDOptions(1e-2).momentum(0.9), {}, make_bf16,
                                          use_masters);
    for (auto& twin : adam.all) twin->ddp->accumulate(2);
    for (int step = 0; step < 5; ++step) {
      adam.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        for (int i = 0; i < 2; ++i) {
          loss_of(twin.model->forward(data(world, 2 * step + i).to(at::kBFloat16))).backward();
        }
        twin.optimizer->step();
      });
      sgd.step(step, [&](auto& twin) { plain_step(twin, data(world, step).to(at::kBFloat16)); });
    }
    // The copies, too.
    const auto master = [](auto& twin) {
      return dynamic_cast<optim::MasterWeights&>(*twin.optimizer)
          .master_of(twin.model->wide->weight);
    };
    for (auto& twin : adam.all) EXPECT_TRUE(master(*twin).equal(master(*adam.all.front())));
  });
}

TEST_P(ShardedKit, JoinsWithUnevenInputs) {
  run([](const World& world) {
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    for (int epoch = 0; epoch < 2; ++epoch) {
      const bool divide = epoch == 1;
      twins.step(epoch, [&](auto& twin) {
        for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
          plain_step(twin, data(world, 10 * epoch + step));
        }
        twin.ddp->join([&] { twin.optimizer->step(); }, {.divide_by_initial_world_size = divide});
      });
    }
  });
}

// Weights of convolutions that lie channels last, and running means.
struct ImageNetImpl : torch::nn::Module {
  ImageNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 150, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(150));
    mix = register_module("mix", torch::nn::Conv2d(torch::nn::Conv2dOptions(150, 60, 3)));
    const torch::NoGradGuard no_grad;
    int seed = 0;
    for (auto& one : parameters()) one.copy_(0.1 * numbers(one.sizes().vec(), ++seed));
    for (auto* const layer : {&conv, &mix}) {
      at::Tensor& weight = (*layer)->weight;
      weight.set_data(weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  at::Tensor forward(const at::Tensor& input, bool) {
    return mix(torch::relu(norm(conv(input.contiguous(at::MemoryFormat::ChannelsLast)))));
  }
  torch::nn::Conv2d conv{nullptr}, mix{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
};
TORCH_MODULE(ImageNet);

TEST_P(ShardedKit, TrainsConvolutionsThatLieChannelsLast) {
  run([](const World& world) {
    Twins<to::SGD, to::SGDOptions, ImageNet> sgd(world, to::SGDOptions(0.05).momentum(0.9));
    Twins<optim::AdamW, to::AdamWOptions, ImageNet> adam(world, to::AdamWOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor images = numbers({2, 3, 8, 8}, 7 * step + world.rank());
      sgd.step(step, [&](auto& twin) { plain_step(twin, images); });
      adam.step(step, [&](auto& twin) { plain_step(twin, images); });
    }
    for (auto& twin : adam.all) {
      EXPECT_TRUE(twin->model->mix->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
      EXPECT_TRUE(
          twin->model->norm->running_mean.equal(adam.all.front()->model->norm->running_mean));
    }
  });
}

TEST_P(ShardedKit, UsesSeveralThreads) {
  run([](const World& world) {
    at::set_num_threads(2);
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      twins.step(step, [&](auto& twin) { plain_step(twin, data(world, step), step != 2); });
    }
  });
}

// A hook changes what the mean is, and the same for both.
TEST_P(ShardedKit, HasHooksWithOptimizersThatShare) {
  run([](const World& world) {
    for (const bool is_power : {false, true}) {
      std::vector<std::unique_ptr<Twin<>>> twins;
      for (const Shard mode : {Shard::kNone, Shard::kOptimizer}) {
        DdpOptions options;
        options.hook = is_power ? power_sgd_hook() : bf16_hook();
        twins.push_back(std::make_unique<Twin<>>(
            world, mode,
            [&](std::vector<at::Tensor> parameters) {
              return make_optimizer<optim::AdamW>(mode, std::move(parameters),
                                                  to::AdamWOptions(1e-2));
            },
            options));
      }
      for (int step = 0; step < 3; ++step) {
        for (auto& twin : twins) plain_step(*twin, data(world, step));
        for (const auto& one : twins[1]->model->named_parameters()) {
          EXPECT_TRUE(one.value().equal(twins[0]->model->named_parameters()[one.key()]))
              << one.key() << " after step " << step;
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
