// DdpOptions::shard on a device, over the late one: each rank keeps its slices of gradients and
// optimizer states, and the bits are those of replicas.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <filesystem>
#include <thread>

#include "ddp/slices.h"
#include "multiprocess/sharded_saves.h"
#include "support/error_of.h"
#include "support/fault_script.h"
#include "support/has.h"
#include "support/on_late_device.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

using AdamW = optim::Sharded<optim::AdamW>;

// Several buckets; tensors of half a bucket are cut.
const DdpOptions kSmallBuckets = {.bucket_bytes = 100'000, .first_bucket_bytes = 10'000};

DdpOptions with(Shard shard, DdpOptions options = kSmallBuckets) {
  options.shard = shard;
  return options;
}

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
      AdamW optimizer(model->parameters(), 1e-2);
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
      AdamW optimizer(model->parameters(), 1e-2);
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
    AdamW optimizer(model->parameters(), 1e-2);
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

class LateShardedSaves : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, LateShardedSaves,
                         testing::Values("AdamW", "TiedAndFrozen", "Masters"),
                         [](const auto& test) { return test.param; });

// From one world and mode to the next, beside the same without sharding: the same files.
TEST_P(LateShardedSaves, AreThoseOfATrainingWithoutShardingInAnyWorld) {
  const TempFolder folder;
  const std::vector<std::pair<int, Shard>> stages = {{3, Shard::kGradients},
                                                     {2, Shard::kNone},
                                                     {2, Shard::kOptimizer},
                                                     {3, Shard::kNone},
                                                     {2, Shard::kGradients}};
  for (std::int64_t stage = 0; stage < std::ssize(stages); ++stage) {
    const auto [size, mode] = stages[static_cast<std::size_t>(stage)];
    const auto body = [&, mode = mode](const World& world) {
      at::set_num_threads(1);
      torch::manual_seed(5);
      const std::string paths[] = {folder.path() + "/replicated", folder.path() + "/sliced"};
      SavedTwin replicated(world, Shard::kNone, recipe_of(GetParam()), paths[0]);
      SavedTwin sliced(world, mode, recipe_of(GetParam()), paths[1]);
      const std::int64_t from = 3 * stage;
      const std::int64_t to = from + 3;
      EXPECT_EQ(replicated.checkpoints.load_latest().step, from);
      EXPECT_EQ(sliced.checkpoints.load_latest().step, from);
      sliced.expect_same(replicated);
      replicated.run(from, to);
      sliced.run(from, to);
      sliced.expect_same(replicated);
      replicated.checkpoints.save(to);
      if (stage % 2 == 0) {
        sliced.checkpoints.save(to);
      } else {
        sliced.checkpoints.save_async(to);
        sliced.checkpoints.wait();
      }
      if (world.rank() != 0) return;
      const std::string name = "/" + std::to_string(stage) + "-step-" + std::to_string(to);
      expect_same_files(paths[0] + name, paths[1] + name);
    };
    ASSERT_TRUE(all_passed(late::run(size, body))) << "stage " << stage;
  }
}

// Wrapped again with another layout, as a parameter is frozen: states are cut anew.
TEST(LateSharded, RewrappingKeepsStates) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    at::set_num_threads(1);
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    const auto train = [&](int from, int to) {
      for (int step = from; step < to; ++step) {
        twins.step(step, [&](auto& twin) {
          twin.optimizer->zero_grad();
          loss_of(twin.model->forward(batch(world.rank(), step))).backward();
          twin.optimizer->step();
        });
      }
    };
    train(0, 2);
    for (auto& twin : twins.all) twin->ddp->rewrap();  // nothing has changed
    train(2, 4);
    for (auto& twin : twins.all) {
      twin->model->wide->weight.set_requires_grad(false);
      twin->optimizer->zero_grad();
      twin->ddp->rewrap();
    }
    train(4, 6);
    // Without sharding nobody puts the slices together.
    for (auto& twin : twins.all) {
      if (twin->mode == Shard::kNone) continue;
      const std::string text =
          error_of([&] { const DistributedDataParallel other(twin->model, world); });
      EXPECT_TRUE(has(text, "Another wrapper with DdpOptions::shard")) << text;
      twin->ddp.reset();
      const DistributedDataParallel other(twin->model, world);
      loss_of(twin->model->forward(batch(world.rank()))).backward();
      const std::string refusal = error_of([&] { twin->optimizer->step(); });
      EXPECT_TRUE(has(refusal, "has a part of what it keeps")) << refusal;
    }
  })));
}

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
    AdamW optimizer(model->parameters(), 1e-2);
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

TEST(LateSharded, MisuseIsAnErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    WideNet model;
    DistributedDataParallel ddp(model, world, with(Shard::kGradients));
    AdamW optimizer(model->parameters(), 1e-2);
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
    AdamW optimizer(model->parameters(), 1e-2);
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
    AdamW optimizer(model->parameters(), 1e-2);
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
    AdamW optimizer(model->parameters(), 1e-2);
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
