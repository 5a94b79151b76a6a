// Whole trainings with DdpOptions::shard: models of three kinds, every optimizer, and a loop with
// all that programs have in one. After every step the bits are those of replicas.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>

#include "multiprocess/run_models.h"
#include "multiprocess/sharded_model.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

// One training with an optimizer of type T, in all modes at once.
template <typename Model, typename T, typename Options>
class TrainingRun {
 public:
  TrainingRun(const World& world, const Options& options)
      : world_(world), twins_(world, options, {}, {}, [&](to::Optimizer& optimizer) {
          // LibTorch's has no states for parameters that come later.
          if (std::is_same_v<T, to::Adagrad>) return;
          auto& all = optimizer.param_groups()[0].params();
          const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
          const std::vector<at::Tensor> others(middle, all.end());
          all.erase(middle, all.end());
          optimizer.add_param_group({others, std::make_unique<Options>(1e-3)});
        }) {
    for (auto& twin : twins_.all) {
      schedules_.emplace_back(*twin->optimizer, optim::warm_up(5, optim::cosine(60, 0.1)));
      scalers_.push_back(std::make_unique<GradScaler>(world, ScalerOptions{.scale = 256}));
    }
  }

  void train(int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      std::size_t index = 0;
      twins_.step(step, [&](auto& twin) {
        one_step(twin, *scalers_[index], step);
        schedules_[index++].step();
      });
      if (testing::Test::HasFailure()) return;
      // Ranks run out of data one after the other, now and then.
      if (step % 20 == 9) twins_.step(step, [&](auto& twin) { uneven_end(twin, step); });
    }
    const auto expected = twins_.all.front()->model->named_buffers();
    for (auto& twin : twins_.all) {
      for (const auto& one : twin->model->named_buffers()) {
        EXPECT_TRUE(one.value().equal(expected[one.key()])) << one.key();
      }
      twin->ddp->check_replicas();
    }
  }

 private:
  at::Tensor loss(Twin<Model>& twin, int step) {
    torch::manual_seed(static_cast<std::uint64_t>(1000 * step + world_.rank()));  // of dropout
    return loss_of(twin.model->forward(world_.rank(), step));
  }

  void one_step(Twin<Model>& twin, GradScaler& scaler, int step) {
    twin.optimizer->zero_grad();
    if (step % 4 == 3) {  // two batches for a step
      const auto guard = twin.ddp->no_sync();
      scaler.scale(loss(twin, 500 + step)).backward();
    }
    if (step % 3 == 1) twin.ddp->set_weight(1 + world_.rank());
    scaler.scale(loss(twin, step)).backward();
    scaler.unscale(*twin.optimizer);
    optim::clip_grad_norm(twin.model->parameters(), 0.5);
    EXPECT_TRUE(scaler.step(*twin.optimizer));
    scaler.update();
  }

  void uneven_end(Twin<Model>& twin, int step) {
    const auto update = [&] {
      twin.optimizer->step();
      twin.optimizer->zero_grad();
    };
    twin.optimizer->zero_grad();
    for (int i = 0; i < 1 + world_.rank(); ++i) {
      loss(twin, 1000 + step + i).backward();
      update();
    }
    twin.ddp->join(update);
  }

  World world_;
  Twins<T, Options, Model> twins_;
  std::vector<optim::Schedule> schedules_;
  std::vector<std::unique_ptr<GradScaler>> scalers_;
};

std::vector<OnEngine> run_worlds() {
  std::vector<OnEngine> rows = {{"solo", "a"}, {"shm", "aa"}, {"shm", "aaa"}, {"shm", "aaaa"}};
  if (why_no_engine("gloo").empty()) rows.push_back({"hierarchical", "aabb"});
#ifdef LOCKSTEP_SANITIZED
  rows = {{"shm", "aa"}};  // it reaches all code
#endif
  return rows;
}

#ifdef LOCKSTEP_SANITIZED
constexpr int kStepsInCi = 5;
#else
constexpr int kStepsInCi = 12;  // with one end of uneven data
#endif

class ShardedRuns : public testing::TestWithParam<OnEngine> {
 protected:
  template <typename Model>
  void expect_same_bits() {
    EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
      at::set_num_threads(1);
      const int steps = soak(kStepsInCi, 100);
      TrainingRun<Model, optim::AdamW, to::AdamWOptions>(world, to::AdamWOptions(1e-2))
          .train(steps);
      TrainingRun<Model, optim::Adam, to::AdamOptions>(world, to::AdamOptions(1e-2)).train(steps);
      TrainingRun<Model, optim::SGD, to::SGDOptions>(world, to::SGDOptions(0.05).momentum(0.9))
          .train(steps);
      TrainingRun<Model, to::RMSprop, to::RMSpropOptions>(world, to::RMSpropOptions(1e-3))
          .train(steps);
      TrainingRun<Model, to::Adagrad, to::AdagradOptions>(world, to::AdagradOptions(1e-2))
          .train(steps);
    })));
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedRuns, testing::ValuesIn(run_worlds()),
                         [](const auto& test) { return name_of(test); });

TEST_P(ShardedRuns, Mlp) { expect_same_bits<Mlp>(); }
TEST_P(ShardedRuns, CnnWithBatchNorm) { expect_same_bits<Cnn>(); }
TEST_P(ShardedRuns, Gpt) { expect_same_bits<SmallGpt>(); }

}  // namespace
}  // namespace lockstep::test
