// DdpOptions::shard where a program changes something between steps, has several models or
// optimizers, or uses an engine that adds up in an order of its own.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include "multiprocess/sharded_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using AdamTwins = Twins<optim::AdamW, torch::optim::AdamWOptions>;

std::vector<OnEngine> hosts_to_change_on() {
  std::vector<OnEngine> rows = {{"shm", "aa"}};
  if (why_no_engine("gloo").empty()) rows.push_back({"hierarchical", "aab"});
  return rows;
}

class ShardedChanges : public testing::TestWithParam<OnEngine> {
 protected:
  static void run(const std::function<void(const World&)>& body) {
    EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
      at::set_num_threads(1);
      body(world);
    })));
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedChanges, testing::ValuesIn(hosts_to_change_on()),
                         [](const auto& test) { return name_of(test); });

template <typename T>
void train_step(T& twin, const World& world, int step) {
  twin.optimizer->zero_grad();
  loss_of(twin.model->forward(batch(world.rank(), step))).backward();
  twin.optimizer->step();
}

TEST_P(ShardedChanges, WrapsAgain) {
  run([](const World& world) {
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    int step = 0;
    const auto train = [&] {
      for (int i = 0; i < 2; ++i, ++step) {
        twins.step(step, [&](auto& twin) { train_step(twin, world, step); });
      }
    };
    train();
    for (auto& twin : twins.all) twin->ddp->rewrap();
    train();
    // Frozen: states of the others move along; thawed: it goes on with its own.
    for (const bool is_trained : {false, true}) {
      for (auto& twin : twins.all) {
        twin->model->wide->weight.set_requires_grad(is_trained);
        twin->model->first->bias.set_requires_grad(is_trained);
        twin->optimizer->zero_grad();
        twin->ddp->rewrap();
      }
      train();
    }
  });
}

// One rank's tensor was replaced: all of them come to the same memory again.
TEST_P(ShardedChanges, WrapsAgainWhereOneRankHasReplacedATensor) {
  run([](const World& world) {
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    twins.step(0, [&](auto& twin) { train_step(twin, world, 0); });
    for (auto& twin : twins.all) {
      at::Tensor& weight = twin->model->other->weight;
      if (world.rank() == 1) weight.set_data(weight.detach().clone());
      twin->ddp->rewrap();
    }
    for (int step = 1; step < 3; ++step) {
      twins.step(step, [&](auto& twin) { train_step(twin, world, step); });
    }
  });
}

TEST_P(ShardedChanges, DropsGradients) {
  run([](const World& world) {
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    twins.step(0, [&](auto& twin) { train_step(twin, world, 0); });
    for (auto& twin : twins.all) {
      loss_of(twin->model->forward(batch(world.rank(), 5))).backward();
      twin->ddp->discard();
      EXPECT_TRUE(twin->ddp->full_gradients().empty());
      twin->ddp->accumulate(2);
      loss_of(twin->model->forward(batch(world.rank(), 6))).backward();
      twin->ddp->discard();
      twin->ddp->accumulate(1);
    }
    twins.step(1, [&](auto& twin) { train_step(twin, world, 1); });
  });
}

TEST_P(ShardedChanges, ShowsWholeGradients) {
  run([](const World& world) {
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      for (auto& twin : twins.all) {
        twin->optimizer->zero_grad();
        if (step == 2) twin->ddp->set_weight(2 + world.rank());
        // One layer is used by one rank, or, in the last step, by none.
        loss_of(twin->model->forward(batch(world.rank(), step), world.rank() == 1 && step < 3))
            .backward();
      }
      const auto expected = twins.all.front()->ddp->full_gradients();
      EXPECT_EQ(expected.size(), step == 3 ? 9U : 11U);
      for (auto& twin : twins.all) {
        const auto found = twin->ddp->full_gradients();
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_EQ(found[i].name, expected[i].name);
          EXPECT_TRUE(found[i].tensor.equal(expected[i].tensor))
              << found[i].name << " in step " << step << ", " << name_of(twin->mode);
        }
        const bool has_own = twin->model->last->weight.grad().defined();
        EXPECT_EQ(has_own, twin->mode != Shard::kGradients);
      }
      twins.step(step, [&](auto& twin) { twin.optimizer->step(); });
    }
    EXPECT_TRUE(twins.all.back()->ddp->full_gradients().empty());
  });
}

TEST_P(ShardedChanges, WritesToParametersByHand) {
  run([](const World& world) {
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      twins.step(step, [&](auto& twin) {
        twin.optimizer->zero_grad();
        loss_of(twin.model->forward(batch(world.rank(), step))).backward();
        // Gradients that wait for their step stay.
        twin.ddp->change_parameters([&] {
          twin.model->wide->weight.mul_(0.5);
          twin.model->last->bias.fill_(step);
        });
        twin.optimizer->step();
      });
    }
    for (auto& twin : twins.all) {
      if (twin->mode == Shard::kNone) continue;
      const std::string error = error_of(
          [&] { twin->ddp->change_parameters([] { throw UsageError({}, "not this time"); }); });
      EXPECT_TRUE(has(error, "not this time")) << error;
    }
    twins.step(9, [&](auto& twin) { train_step(twin, world, 9); });
  });
}

// One for the table and the first layer, another for the rest.
TEST_P(ShardedChanges, HasTwoOptimizersForAModel) {
  run([](const World& world) {
    using Optimizers = std::vector<std::unique_ptr<torch::optim::Optimizer>>;
    std::vector<Optimizers> optimizers;
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    for (auto& twin : twins.all) {
      auto all = twin->model->parameters();
      Optimizers& its = optimizers.emplace_back();
      its.push_back(make_optimizer<optim::SGD>(twin->mode, {all.begin(), all.begin() + 3},
                                               torch::optim::SGDOptions(0.1).momentum(0.9)));
      its.push_back(make_optimizer<optim::AdamW>(twin->mode, {all.begin() + 3, all.end()},
                                                 torch::optim::AdamWOptions(1e-2)));
    }
    for (int step = 0; step < 4; ++step) {
      auto its = optimizers.begin();
      twins.step(step, [&](auto& twin) {
        for (auto& one : *its) one->zero_grad();
        loss_of(twin.model->forward(batch(world.rank(), step))).backward();
        for (auto& one : *its) one->step();
        ++its;
      });
    }
  });
}

// Two models in one loss and one optimizer, which has a parameter besides that nobody shares.
TEST_P(ShardedChanges, HasTwoModelsInOneOptimizer) {
  run([](const World& world) {
    AdamTwins a(world, torch::optim::AdamWOptions(1e-2));
    AdamTwins b(world, torch::optim::AdamWOptions(1e-2));
    std::vector<at::Tensor> own;
    std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
    for (std::size_t i = 0; i < a.all.size(); ++i) {
      std::vector<at::Tensor> all = a.all[i]->model->parameters();
      const auto more = b.all[i]->model->parameters();
      all.insert(all.end(), more.begin(), more.end());
      own.push_back(at::ones({3}).requires_grad_());
      all.insert(all.begin() + 4, own.back());
      optimizers.push_back(
          make_optimizer<optim::AdamW>(a.all[i]->mode, all, torch::optim::AdamWOptions(1e-2)));
    }
    for (int step = 0; step < 4; ++step) {
      for (std::size_t i = 0; i < a.all.size(); ++i) {
        optimizers[i]->zero_grad();
        const at::Tensor output = a.all[i]->model->forward(batch(world.rank(), step)) * own[i] +
                                  b.all[i]->model->forward(batch(world.rank() + 5, step));
        loss_of(output).backward();
        optimizers[i]->step();
        EXPECT_TRUE(own[i].equal(own[0]));
      }
      a.expect_same(step);
      b.expect_same(step);
    }
  });
}

// Two models, with a loss each or one for both, weights that differ, and ranks that run out of data
// one after the other.
TEST_P(ShardedChanges, PlaysOutTheStepsOfTwoModels) {
  run([](const World& world) {
    for (const bool is_one_loss : {true, false}) {
      AdamTwins a(world, torch::optim::AdamWOptions(1e-2));
      AdamTwins b(world, torch::optim::AdamWOptions(1e-2));
      for (std::size_t i = 0; i < a.all.size(); ++i) {
        Twin<>& first = *a.all[i];
        Twin<>& second = *b.all[i];
        const auto step_both = [&] {
          for (Twin<>* const one : {&first, &second}) one->optimizer->step();
          for (Twin<>* const one : {&first, &second}) one->optimizer->zero_grad();
        };
        for (int step = 0; step < 3 + 2 * world.rank(); ++step) {
          for (Twin<>* const one : {&first, &second}) one->ddp->set_weight(1 + world.rank() + step);
          const at::Tensor output = first.model->forward(batch(world.rank(), step));
          const at::Tensor other = second.model->forward(batch(world.rank() + 5, step));
          if (is_one_loss) {
            loss_of(output + other).backward();
          } else {
            loss_of(output).backward();
            loss_of(other).backward();
          }
          step_both();
        }
        lockstep::join({first.ddp.get(), second.ddp.get()}, step_both);
      }
      a.expect_same(is_one_loss ? 1 : 2);
      b.expect_same(is_one_loss ? 1 : 2);
    }
  });
}

// Options that a constructor would refuse (a rate below zero climbs), and groups that are added.
TEST_P(ShardedChanges, AddsGroups) {
  run([](const World& world) {
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    for (auto& twin : twins.all) {
      auto all = twin->model->parameters();
      twin->optimizer = make_optimizer<torch::optim::AdamW>(
          twin->mode, {all.begin(), all.begin() + 3}, torch::optim::AdamWOptions(1e-2));
      twin->optimizer->add_param_group(std::vector<at::Tensor>(all.begin() + 3, all.end()));
      auto& of_group = twin->optimizer->param_groups()[1].options();
      static_cast<torch::optim::AdamWOptions&>(of_group).lr(-1e-3);
    }
    for (int step = 0; step < 3; ++step) {
      twins.step(step, [&](auto& twin) { train_step(twin, world, step); });
    }
  });
}

// LibTorch's Adagrad has no states for a group that is added, and its step fails: ours has.
TEST_P(ShardedChanges, AddsGroupsToAdagrad) {
  run([](const World& world) {
    using Groups = std::vector<torch::optim::OptimizerParamGroup>;
    const auto options = torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1);
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    for (auto& twin : twins.all) {
      auto all = twin->model->parameters();
      const std::vector<at::Tensor> some(all.begin(), all.begin() + 3);
      const std::vector<at::Tensor> others(all.begin() + 3, all.end());
      if (twin->mode == Shard::kNone) {
        twin->optimizer = std::make_unique<torch::optim::Adagrad>(Groups{some, others}, options);
      } else {
        twin->optimizer = std::make_unique<optim::Sharded<torch::optim::Adagrad>>(some, options);
        twin->optimizer->add_param_group(others);
      }
    }
    for (int step = 0; step < 3; ++step) {
      twins.step(step, [&](auto& twin) { train_step(twin, world, step); });
    }
  });
}

// Engines that add up in an order that depends on where an element lies in a bucket: what is in
// the same buckets has the same bits.
class ShardedElsewhere : public testing::TestWithParam<OnEngine> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedElsewhere,
                         testing::ValuesIn(engines_where(3,
                                                         [](const OnEngine& row) {
                                                           return row.engine == "gloo" ||
                                                                  row.engine == "mpi";
                                                         })),
                         [](const auto& test) { return name_of(test); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ShardedElsewhere);

TEST_P(ShardedElsewhere, TrainsAsWithoutIt) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
    at::set_num_threads(1);
    AdamTwins twins(world, torch::optim::AdamWOptions(1e-2));
    const auto expect_close = [&](int step) {
      for (const auto& twin : twins.all) {
        const auto expected = twins.all.front()->model->named_parameters();
        for (const auto& one : twin->model->named_parameters()) {
          const bool is_same = one.value().equal(expected[one.key()]);
          EXPECT_TRUE(is_same || (twin->mode == Shard::kGradients &&
                                  at::allclose(one.value(), expected[one.key()], 1e-3, 1e-4)))
              << one.key() << " after step " << step << ", " << name_of(twin->mode);
          expect_same_bits(world, one.value(), one.key());
        }
      }
    };
    for (int step = 0; step < 6; ++step) {
      for (auto& twin : twins.all) {
        twin->optimizer->zero_grad();
        if (step >= 3) twin->ddp->set_weight(1 + world.rank());
        loss_of(twin->model->forward(batch(world.rank(), step), (step + world.rank()) % 2 == 0))
            .backward();
        twin->optimizer->step();
      }
      expect_close(step);
    }
    for (auto& twin : twins.all) {
      for (int step = 0; step < 1 + world.rank(); ++step) train_step(*twin, world, step);
      twin->ddp->join([&] { twin->optimizer->step(); });
    }
    expect_close(9);
  })));
}

}  // namespace
}  // namespace lockstep::test
