// Models for whole trainings: an MLP with dropout, a CNN with BatchNorm and a frozen parameter, and
// a block of a GPT with tied weights. Their data depends on two numbers.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn.h>

#include "multiprocess/ddp_model.h"

namespace lockstep::test {

inline void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int seed = 0;
  for (auto& one : module.parameters()) one.copy_(0.1 * numbers(one.sizes().vec(), ++seed));
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() { fill(*this); }
  at::Tensor forward(int rank, int step) {
    const at::Tensor hidden =
        torch::relu(first(numbers({4, 20}, 31 * step + rank).to(first->weight.dtype())));
    return last(torch::dropout(torch::relu(middle(hidden)), 0.3, is_training()));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(20, 301));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(301, 97));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(97, 5));
};
TORCH_MODULE(Mlp);

struct CnnImpl : torch::nn::Module {
  CnnImpl() {
    fill(*this);
    norm->weight.set_requires_grad(false);  // frozen
  }
  at::Tensor forward(int rank, int step) {
    at::Tensor images = numbers({3, 3, 9, 9}, 37 * step + rank);
    if (is_augmented) {
      if (at::rand({1}).item<float>() < 0.5) images = images.flip({3});
      images = images + 0.1 * at::randn_like(images);
    }
    return last(torch::relu(norm(conv2(torch::relu(conv1(images))))).mean({2, 3}));
  }
  bool is_augmented = false;  // by random numbers
  torch::nn::Conv2d conv1 =
      register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 40, 3)));
  torch::nn::Conv2d conv2 =
      register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(40, 24, 3)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(24));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(24, 5));
};
TORCH_MODULE(Cnn);

// A block of a GPT; its embedding is its last layer, too.
struct SmallGptImpl : torch::nn::Module {
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
  torch::nn::Embedding tokens = register_module("tokens", torch::nn::Embedding(30, kWidth));
  torch::nn::LayerNorm norm1 =
      register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(kWidth, kWidth));
  torch::nn::LayerNorm norm2 =
      register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
};
TORCH_MODULE(SmallGpt);

}  // namespace lockstep::test
