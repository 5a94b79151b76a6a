// AdamW by ATen's fused kernel, with the defaults of Python's AdamW(lr=1e-4, fused=True), so that
// all peers of a benchmark take the same step.
#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace lockstep::bench {

class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& parameter : parameters_) {
      means_.push_back(at::zeros_like(parameter));
      squares_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}, at::kFloat));
    }
  }

  // Requires: every parameter has a gradient.
  void step() {
    const at::NoGradGuard guard;
    gradients_.clear();
    for (const at::Tensor& parameter : parameters_) gradients_.push_back(parameter.grad());
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients_, means_, squares_, {}, steps_, /*lr=*/1e-4,
                      /*beta1=*/0.9, /*beta2=*/0.999, /*weight_decay=*/1e-2, /*eps=*/1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    gradients_.clear();  // zero_grad() frees them only if nobody else holds them
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> means_;    // of gradients
  std::vector<at::Tensor> squares_;  // means of their squares
  std::vector<at::Tensor> steps_;    // one per parameter, as the kernel wants it
};

}  // namespace lockstep::bench
