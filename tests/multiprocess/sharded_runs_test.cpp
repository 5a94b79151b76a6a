// Whole trainings with DdpOptions::shard: models of three kinds, every optimizer, and a loop with
// all that programs have in one. After every step the bits are those of replicas.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include <algorithm>

#include "multiprocess/sharded_model.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace nn = torch::nn;
namespace to = torch::optim;

void fill(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int seed = 0;
  for (auto& one : module.parameters()) one.copy_(0.1 * numbers(one.sizes().vec(), ++seed));
}

struct MlpImpl : nn::Module {
  MlpImpl() { fill(*this); }
  at::Tensor forward(int rank, int step) {
    const at::Tensor hidden = torch::relu(first(numbers({4, 20}, 31 * step + rank)));
    return last(torch::dropout(torch::relu(middle(hidden)), 0.3, is_training()));
  }
  nn::Linear first = register_module("first", nn::Linear(20, 301));
  nn::Linear middle = register_module("middle", nn::Linear(301, 97));
  nn::Linear last = register_module("last", nn::Linear(97, 5));
};
TORCH_MODULE(Mlp);

struct CnnImpl : nn::Module {
  CnnImpl() {
    fill(*this);
    norm->weight.set_requires_grad(false);  // frozen
  }
  at::Tensor forward(int rank, int step) {
    const at::Tensor images = numbers({3, 3, 9, 9}, 37 * step + rank);
    return last(torch::relu(norm(conv2(torch::relu(conv1(images))))).mean({2, 3}));
  }
  nn::Conv2d conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, 40, 3)));
  nn::Conv2d conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(40, 24, 3)));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(24));
  nn::Linear last = register_module("last", nn::Linear(24, 5));
};
TORCH_MODULE(Cnn);

// A block of a GPT; its embedding is its last layer, too.
struct SmallGptImpl : nn::Module {
  static constexpr std::int64_t kWidth = 48;
  SmallGptImpl() { fill(*this); }
  at::Tensor forward(int rank, int step) {
    const at::Tensor text = (numbers({2, 7}, 41 * step + rank).abs() * 100).to(at::kLong) % 30;
    const at::Tensor x = tokens(text);
    const auto parts = qkv(norm1(x)).unflatten(2, {3, 4, -1}).permute({2, 0, 3, 1, 4}).unbind();
    const at::Tensor mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
    const at::Tensor y = x + out(mixed.transpose(1, 2).flatten(2));
    return torch::linear(y + down(torch::gelu(up(norm2(y)))), tokens->weight);
  }
  nn::Embedding tokens = register_module("tokens", nn::Embedding(30, kWidth));
  nn::LayerNorm norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::LayerNorm norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(4 * kWidth, kWidth));
};
TORCH_MODULE(SmallGpt);

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
