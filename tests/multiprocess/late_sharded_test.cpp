// DdpOptions::shard on a device, over the late one: each rank keeps its slices of gradients and
// optimizer states, and the bits are those of replicas.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <thread>

#include "ddp/slices.h"
#include "multiprocess/late_sharded.h"
#include "multiprocess/sharded_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/on_late_device.h"

namespace lockstep::test {
namespace {

class LateShardedBits : public testing::TestWithParam<int> {
 protected:
  // Steps with a gradient for everything, then with a branch that is not used.
  template <typename T, typename Options>
  void expect_same_bits(const Options& options) {
    EXPECT_TRUE(all_passed(late::run(GetParam(), [&](const World& world) {
      at::set_num_threads(1);
      Twins<T, Options> twins(world, options);
      for (int step = 0; step < 5; ++step) {
        const at::Tensor input = batch(world.rank(), step);
        twins.step(step, [&](auto& twin) {
          twin.optimizer->zero_grad();
          loss_of(twin.model->forward(input, step % 3 != 2)).backward();
          twin.optimizer->step();
        });
      }
      for (auto& twin : twins.all) twin->ddp->check_replicas();
    })));
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, LateShardedBits, testing::Values(2, 3),
                         [](const auto& one) { return std::to_string(one.param); });

TEST_P(LateShardedBits, OurAdamW) { expect_same_bits<optim::AdamW>(to::AdamWOptions(1e-2)); }
TEST_P(LateShardedBits, OurSgd) {
  expect_same_bits<optim::SGD>(to::SGDOptions(1e-2).momentum(0.9).dampening(0.1));
}
TEST_P(LateShardedBits, Adam) {
  expect_same_bits<to::Adam>(to::AdamOptions(1e-2).amsgrad(true).weight_decay(0.1));
}
TEST_P(LateShardedBits, RmsProp) {
  expect_same_bits<to::RMSprop>(to::RMSpropOptions(1e-3).momentum(0.9).centered(true));
}
TEST_P(LateShardedBits, Adagrad) {
  expect_same_bits<to::Adagrad>(to::AdagradOptions(1e-2).initial_accumulator_value(0.1));
}

// A loop with weights, accumulation, uneven ends, two groups and a schedule.
TEST_P(LateShardedBits, AWholeLoop) {
  EXPECT_TRUE(all_passed(late::run(GetParam(), [&](const World& world) {
    at::set_num_threads(1);
    const auto cut_groups = [](to::Optimizer& optimizer) {
      auto& all = optimizer.param_groups()[0].params();
      const std::vector<at::Tensor> others(all.begin() + 4, all.end());
      all.resize(4);
      optimizer.add_param_group({others, std::make_unique<to::AdamWOptions>(1e-3)});
    };
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2), {}, {}, cut_groups);
    std::vector<optim::Schedule> schedules;
    for (auto& twin : twins.all) {
      schedules.emplace_back(*twin->optimizer, optim::warm_up(3, optim::cosine(10, 0.1)));
    }
    const auto backward = [&](auto& twin, int number) {
      loss_of(twin.model->forward(batch(world.rank(), number))).backward();
    };
    for (int step = 0; step < 6; ++step) {
      std::size_t index = 0;
      twins.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        if (step % 2 == 1) {
          const auto guard = twin.ddp->no_sync();
          backward(twin, 50 + step);
        }
        if (step % 3 == 1) twin.ddp->set_weight(1 + world.rank());
        backward(twin, step);
        twin.optimizer->step();
        schedules[index++].step();
      });
    }
    twins.step(6, [&](auto& twin) {
      const auto update = [&] {
        twin.optimizer->step();
        twin.optimizer->zero_grad();
      };
      twin.optimizer->zero_grad();
      for (int i = 0; i < 1 + world.rank(); ++i) {
        backward(twin, 100 + i);
        update();
      }
      twin.ddp->join(update);
    });
  })));
}

// bf16 parameters beside f32 ones, with f32 sums and master weights.
TEST_P(LateShardedBits, MasterWeights) {
  EXPECT_TRUE(all_passed(late::run(GetParam(), [&](const World& world) {
    at::set_num_threads(1);
    Twins<optim::AdamW, to::AdamWOptions> twins(
        world, to::AdamWOptions(1e-3), {.reduce_type = at::kFloat},
        [](WideNet& model) {
          model->wide->to(at::kBFloat16);
          model->last->to(at::kBFloat16);
        },
        [](to::Optimizer& one) { dynamic_cast<optim::MasterWeights&>(one).use_master_weights(); });
    for (int step = 0; step < 4; ++step) {
      twins.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        auto& net = *twin.model;
        const at::Tensor hidden = torch::tanh(net.first(batch(world.rank(), step)));
        const at::Tensor wide = net.wide(hidden.to(at::kBFloat16)).to(at::kFloat);
        loss_of(net.last(net.other(wide).to(at::kBFloat16)).to(at::kFloat)).backward();
        twin.optimizer->step();
      });
    }
  })));
}

// Clipping adds up squares of slices in another order than norms of whole tensors.
TEST(LateSharded, ClipsAndScales) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    std::vector<std::unique_ptr<GradScaler>> scalers;
    for (std::size_t i = 0; i < twins.all.size(); ++i) {
      scalers.push_back(std::make_unique<GradScaler>(world, ScalerOptions{.scale = 1024}));
    }
    for (int step = 0; step < 5; ++step) {
      std::vector<double> norms;
      for (std::size_t i = 0; i < twins.all.size(); ++i) {
        auto& twin = *twins.all[i];
        twin.optimizer->zero_grad();
        const bool is_bad = step == 3 && world.rank() == 1;  // one rank's overflow is everybody's
        const at::Tensor loss = loss_of(twin.model->forward(batch(world.rank(), step)));
        scalers[i]->scale(is_bad ? loss * 1e38 : loss).backward();
        scalers[i]->unscale(*twin.optimizer);
        norms.push_back(optim::clip_grad_norm(twin.model->parameters(), 0.01));
        EXPECT_EQ(scalers[i]->step(*twin.optimizer), step != 3);
        scalers[i]->update();
        if (step != 3) expect_same_bits(world, *twin.model);
      }
      if (step == 3) continue;
      EXPECT_GT(norms[0], 0.01) << "nothing was clipped";
      for (const double one : norms) EXPECT_NEAR(one, norms[0], 1e-6 * norms[0]);
      for (std::size_t i = 1; i < twins.all.size(); ++i) {
        const auto expected = twins.all[0]->model->parameters();
        const auto found = twins.all[i]->model->parameters();
        for (std::size_t k = 0; k < found.size(); ++k) {
          EXPECT_TRUE(at::allclose(found[k], expected[k], 1e-5, 1e-6)) << i << ", " << k;
        }
      }
    }
    // What is not finite is told on all ranks, also by those whose slices are.
    auto& twin = *twins.all[2];
    twin.optimizer->zero_grad();
    (loss_of(twin.model->forward(batch(world.rank(), 9))) * 1e38).backward();
    const std::string text =
        error_of([&] { optim::clip_grad_norm(twin.model->parameters(), 1, true); });
    EXPECT_TRUE(has(text, "not finite is number")) << text;
    twin.ddp->discard();
  })));
}

std::int64_t num_state_elements(to::Optimizer& optimizer) {
  std::int64_t count = 0;
  for (const auto& [key, state] : optimizer.state()) {
    count += static_cast<to::AdamWParamState&>(*state).exp_avg().numel();
  }
  return count;
}

// Each rank keeps its part of states and gradients, and no more; a backward leaves no .grad.
TEST(LateSharded, ARankKeepsItsPart) {
  EXPECT_TRUE(all_passed(late::run(3, [](const World& world) {
    WideNet replicated;
    DistributedDataParallel its_ddp(replicated, world, kSmallBuckets);
    loss_of(replicated->forward(batch(world.rank()))).backward();
    for (const Shard mode : {Shard::kOptimizer, Shard::kGradients}) {
      WideNet model;
      const DistributedDataParallel ddp(model, world, with(mode));
      ShardedAdamW optimizer(model->parameters(), 1e-2);
      loss_of(model->forward(batch(world.rank()))).backward();
      std::int64_t all = 0;
      const auto expected = replicated->named_parameters();
      const auto full = ddp.full_gradients();
      EXPECT_EQ(full.size(), model->parameters().size());
      for (const NamedTensor& one : full) {
        EXPECT_TRUE(one.tensor.equal(expected[one.name].grad())) << one.name;
      }
      std::int64_t gradients = 0;
      for (const auto& one : model->named_parameters()) {
        all += one.value().numel();
        EXPECT_EQ(one.value().grad().defined(), mode == Shard::kOptimizer) << one.key();
        const auto slices = Slices::holder_of(one.value());
        const at::Tensor mine = slices->gradient(slices->slot_of(one.value()));
        if (mine.defined()) gradients += mine.numel();
      }
      optimizer.step();
      const double part = static_cast<double>(all) / world.size();
      EXPECT_NEAR(static_cast<double>(num_state_elements(optimizer)), part, 0.05 * part);
      if (mode == Shard::kGradients) {
        EXPECT_NEAR(static_cast<double>(gradients), part, 0.05 * part);
      }
      EXPECT_EQ(world.sum(static_cast<double>(num_state_elements(optimizer))), all);
    }
  })));
}

TEST(LateSharded, TheHostWaitsForNothingInAStep) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    for (const Shard mode : {Shard::kOptimizer, Shard::kGradients}) {
      WideNet model;
      DistributedDataParallel ddp(model, world, with(mode));
      ShardedAdamW optimizer(model->parameters(), 1e-2);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor input = batch(world.rank(), step);
        const at::Tensor rows = here(at::arange(5));
        const std::int64_t before = late::num_syncs();
        optimizer.zero_grad();
        const at::Tensor hidden = model->norm(torch::tanh(model->first(input)));
        loss_of(model->last(model->other(torch::tanh(model->wide(hidden)) + hidden))).backward();
        optimizer.step();
        if (step > 0) {
          EXPECT_EQ(late::num_syncs(), before) << "step " << step << ", " << name_of(mode);
        }
      }
      expect_same_bits(world, *model);
    }
  })));
}

class LateShardedStreams : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Types, LateShardedStreams, testing::Bool(),
                         [](const auto& one) { return one.param ? "bf16" : "f32"; });

void hold_up(const c10::Stream& stream, int time) {
  late::enqueue(stream.id(), [=] { std::this_thread::sleep_for(std::chrono::milliseconds(time)); });
}

// The bucket with the gradients of both branches is posted in the stream of the left one, before
// that of the right one is there, and is copied after the right one's memory was given back. In
// bf16 gradients are copied to f32 first, and then to all buckets that they are cut into.
TEST_P(LateShardedStreams, GradientsComeInAnyOfThem) {
  EXPECT_TRUE(all_passed(late::run(2, [is_cast = GetParam()](const World& world) {
    const c10::Stream main = late::stream();
    const c10::Stream side = late::new_stream();
    const at::ScalarType type = is_cast ? at::kBFloat16 : at::kFloat;
    // The first bucket ends with the bias of the left branch, and need not wait for a place.
    DdpOptions options = {.bucket_bytes = 1200, .first_bucket_bytes = 1200};
    if (is_cast) options.reduce_type = at::kFloat;
    const auto train = [&](Net& model, int step, bool is_held_up) {
      const at::Tensor hidden = torch::tanh(model->first(batch(world.rank(), step).to(type)));
      // Autograd runs the backward of what was computed in a stream in that stream.
      const at::Tensor left =
          late::in_stream(side, [&] { return torch::tanh(model->left(hidden)); });
      // Made after the left one, so its gradients come first.
      const at::Tensor right = torch::tanh(model->right(hidden));
      if (is_held_up) {
        right.register_hook([&](const at::Tensor&) { hold_up(main, 20); });
        left.register_hook([&](const at::Tensor&) { hold_up(side, 40 * (step % 2)); });
      }
      loss_of(model->last(hidden + (left + right))).backward();
    };
    Net model;
    Net replicated;
    for (Net* const one : {&model, &replicated}) (*one)->to(type);
    const DistributedDataParallel ddp(model, world, with(Shard::kGradients, options));
    const DistributedDataParallel its_ddp(replicated, world, options);
    ShardedAdamW optimizer(model->parameters(), 1e-2);
    optim::AdamW its_optimizer(replicated->parameters(), 1e-2);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      its_optimizer.zero_grad();
      train(model, step, true);
      train(replicated, step, false);
      optimizer.step();
      its_optimizer.step();
      const auto expected = replicated->named_parameters();
      for (const auto& one : model->named_parameters()) {
        EXPECT_TRUE(one.value().equal(expected[one.key()])) << one.key() << ", step " << step;
      }
    }
  })));
}

// Of master weights there would be a part.
TEST(LateSharded, AveragesOfWeights) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Twins<optim::AdamW, to::AdamWOptions> twins(
        world, to::AdamWOptions(1e-2), {}, [](WideNet& model) { model->last->to(at::kBFloat16); },
        [](to::Optimizer& one) { dynamic_cast<optim::MasterWeights&>(one).use_master_weights(); });
    std::vector<std::unique_ptr<WeightAverage>> averages;
    for (auto& twin : twins.all) {
      averages.push_back(
          std::make_unique<WeightAverage>(twin->model, AveragingOptions{.decay = 0.5}));
    }
    for (int step = 0; step < 3; ++step) {
      std::size_t index = 0;
      twins.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        auto& net = *twin.model;
        const at::Tensor hidden = net.other(torch::tanh(net.first(batch(world.rank(), step))));
        loss_of(net.last(hidden.to(at::kBFloat16)).to(at::kFloat)).backward();
        twin.optimizer->step();
        averages[index++]->update();
      });
    }
    for (auto& average : averages) {
      for (std::size_t i = 0; i < average->tensors().size(); ++i) {
        EXPECT_TRUE(average->tensors()[i].tensor.equal(averages[0]->tensors()[i].tensor)) << i;
      }
    }
    averages[2]->use_masters_of(dynamic_cast<optim::MasterWeights&>(*twins.all[2]->optimizer));
    const std::string text = error_of([&] { averages[2]->update(); });
    EXPECT_TRUE(has(text, "a part of the master weights")) << text;
  })));
}

// A hook with sharded states; gradients that come after their bucket was sent; a parameter without
// elements; clipping together with a model that is not sharded.
TEST(LateSharded, LessCommonGradients) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    std::vector<std::vector<at::Tensor>> results;
    for (const Shard mode : kAllModes) {
      const std::vector<NamedTensor> parameters = {
          {"first", numbers({300}, 1).set_requires_grad(true)},
          {"empty", numbers({0}, 2).set_requires_grad(true)},
          {"twice", numbers({70, 3}, 3).set_requires_grad(true)}};
      std::vector<at::Tensor> all;
      for (const NamedTensor& one : parameters) all.push_back(one.tensor);
      DdpOptions options = with(mode, {.bucket_bytes = 512, .first_bucket_bytes = 256});
      const DistributedDataParallel ddp(parameters, world, options);
      auto optimizer = make_optimizer<optim::SGD>(mode, all, to::SGDOptions(0.1).momentum(0.9));
      Net other;
      const DistributedDataParallel its_ddp(other, world);
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        other->zero_grad();
        const at::Tensor input = numbers({70, 3}, 7 * step + world.rank());
        // Backward begins with what is computed last.
        const at::Tensor late = (Reentrant::apply(input, all[2]) * all[2]).sum();
        const at::Tensor loss = late + (all[0] * all[0]).sum() + all[1].sum();
        (loss + loss_of(other->forward(batch(world.rank(), step)))).backward();
        std::vector<at::Tensor> clipped = all;
        for (const auto& one : other->parameters()) clipped.push_back(one);
        optim::clip_grad_norm_async(clipped, 1e-2);
        optimizer->step();
      }
      results.push_back(all);
    }
    for (const auto& result : results) {
      for (std::size_t i = 0; i < result.size(); ++i) {
        EXPECT_TRUE(at::allclose(result[i], results[0][i], 1e-5, 1e-6)) << i;
      }
    }
  })));
}

TEST(LateSharded, HooksWithShardedStates) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    std::vector<std::vector<at::Tensor>> results;
    for (const Shard mode : {Shard::kNone, Shard::kOptimizer}) {
      WideNet model;
      DdpOptions options = kSmallBuckets;
      options.shard = mode;
      options.shard_min_bytes = 0;
      options.hook = bf16_hook();
      DistributedDataParallel ddp(model, world, options);
      auto optimizer =
          make_optimizer<optim::AdamW>(mode, model->parameters(), to::AdamWOptions(1e-2));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        loss_of(model->forward(batch(world.rank(), step))).backward();
        optimizer->step();
      }
      results.push_back(model->parameters());
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[0][i].equal(results[1][i])) << i;
    }
  })));
}

}  // namespace
}  // namespace lockstep::test
