// The models that the benchmarks train, as a user of torch::nn would write them; peers/ddp.py has
// their twins in Python.
//
//   mlp    85 k parameters: 784-100-60-10, batch of 64
//   cnn   1.2 M parameters: two convolutions and two linear layers, 64 images of 1 x 28 x 28
//   gpt  10.8 M parameters: 6 layers, 6 heads, width 384, 65 characters, 4 x 128 tokens
//   gpt2  124 M parameters: GPT-2 small, 1 x 64 tokens
//   gpt2_medium  355 M parameters: GPT-2 medium, 1 x 32 tokens
//   many  1000 tensors of 10 numbers: hardly any work but that of 1000 hooks
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep::bench {

struct Model : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& input) = 0;
};

// A model and the batch it is trained on, again and again.
struct Workload {
  std::shared_ptr<Model> model;
  at::Tensor input;
  at::Tensor target;  // classes, one per row of the model's output

  at::Tensor loss() const;
};

// Weights are the same on all ranks, batches are not. Throws: UsageError if there is no such model.
Workload make_workload(const std::string& name, int rank);

}  // namespace lockstep::bench
