// A model for the tests of DdpOptions::shard, whose tensors are cut into pieces that leave rests,
// and twins of it that are trained in all modes at once.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "multiprocess/ddp_model.h"
#include "multiprocess/on_engines.h"

namespace lockstep::test {

inline std::string name_of(Shard shard) {
  return shard == Shard::kNone ? "kNone" : shard == Shard::kOptimizer ? "kOptimizer" : "kGradients";
}

struct WideNetImpl : torch::nn::Module {
  explicit WideNetImpl(bool is_sparse = false) {
    table = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 6).sparse(is_sparse)));
    first = register_module("first", torch::nn::Linear(6, 263));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({263})));
    wide = register_module("wide", torch::nn::Linear(263, 263));  // more than one piece
    other = register_module("other", torch::nn::Linear(263, 37));
    last = register_module("last", torch::nn::Linear(37, 3));
    move_here(*this);
    const torch::NoGradGuard no_grad;
    int seed = 0;
    for (auto& parameter : parameters())
      parameter.copy_(0.1 * numbers(parameter.sizes().vec(), ++seed));
  }
  at::Tensor forward(const at::Tensor& input, bool use_wide = true) {
    const at::Tensor rows = (input.select(1, 0).to(at::kFloat).abs() * 10).to(at::kLong);
    const at::Tensor hidden = norm(torch::tanh(first(input + table(rows).to(input.dtype()))));
    return last(torch::tanh(other(use_wide ? hidden + torch::tanh(wide(hidden)) : hidden)));
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear first{nullptr}, wide{nullptr}, other{nullptr}, last{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(WideNet);

// One mode of training: `make` makes its optimizer.
template <typename Model = WideNet>
struct Twin {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

  Twin(const World& world, Shard shard, const Make& make, DdpOptions options = {},
       const std::function<void(Model&)>& before = {})
      : mode(shard) {
    if (before) before(model);
    options.shard = shard;
    options.shard_min_bytes = 0;
    options.bucket_bytes = 100'000;  // several, and the wide one is cut
    options.first_bucket_bytes = 10'000;
    ddp = std::make_unique<DistributedDataParallel>(model, world, options);
    optimizer = make(model->parameters());
  }

  Shard mode;
  Model model;
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

// An optimizer of type T without sharding, and Sharded<T> with it.
template <typename T, typename Options>
std::unique_ptr<torch::optim::Optimizer> make_optimizer(Shard shard,
                                                        std::vector<at::Tensor> parameters,
                                                        const Options& options) {
  if (shard == Shard::kNone) return std::make_unique<T>(std::move(parameters), options);
  return std::make_unique<optim::Sharded<T>>(std::move(parameters), options);
}

inline constexpr Shard kAllModes[] = {Shard::kNone, Shard::kOptimizer, Shard::kGradients};

// Every mode of one training, step by step; all have the same bits after each.
template <typename T, typename Options, typename Model = WideNet>
struct Twins {
  Twins(const World& its_world, const Options& options, const DdpOptions& ddp_options = {},
        const std::function<void(Model&)>& before = {},
        const std::function<void(torch::optim::Optimizer&)>& after = {})
      : world(its_world) {
    for (const Shard mode : kAllModes) {
      all.push_back(std::make_unique<Twin<Model>>(
          world, mode,
          [&](std::vector<at::Tensor> parameters) {
            auto made = make_optimizer<T>(mode, std::move(parameters), options);
            if (after) after(*made);
            return made;
          },
          ddp_options, before));
    }
  }

  void step(int number, const std::function<void(Twin<Model>&)>& body) {
    for (auto& twin : all) body(*twin);
    expect_same(number);
  }
  void expect_same(int number) const {
    const auto expected = all.front()->model->named_parameters();
    for (const auto& twin : all) {
      for (const auto& one : twin->model->named_parameters()) {
        ASSERT_TRUE(one.value().equal(expected[one.key()]))
            << one.key() << " after step " << number << ", " << name_of(twin->mode);
      }
    }
  }

  World world;
  std::vector<std::unique_ptr<Twin<Model>>> all;
};

}  // namespace lockstep::test
