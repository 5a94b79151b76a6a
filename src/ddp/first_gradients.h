// FirstGradients: finds out whether all ranks read the same data. Then they do the same work N
// times and nothing looks wrong; usually somebody has forgotten the sampler.
//
// Their gradients tell: in the first step each rank compares its own with the mean, in the second
// all know what the others have found.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/world.h>

#include "ddp/step_numbers.h"

namespace lockstep {

class FirstGradients {
 public:
  // This rank's own, of the first bucket of the first step.
  void keep(const at::Tensor& flat);
  // Whether they were other than the mean.
  bool differ() const { return differ_; }
  // After a step: `mean` is the first bucket's. Warns on rank 0 in the second step.
  void compare(const at::Tensor& mean, std::int64_t step, const StepNumbers& numbers,
               const World& world);

 private:
  at::Tensor own_;
  bool differ_ = true;
};

}  // namespace lockstep
