// The f32 master weights that optimizers keep of 16-bit parameters, as part of an optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>

#include "checkpoint/parts.h"

namespace lockstep {

// Of the optimizer's states for this parameter, which are as wide as what is updated.
at::ScalarType state_type(torch::optim::Optimizer& optimizer, const at::Tensor& parameter);

// Adds them to what is saved of the optimizer.
void save_masters(torch::optim::Optimizer& optimizer, const std::string& name, Snapshot& snapshot);
// Adds them to what is to be loaded. `values` are the optimizer's.
void load_masters(torch::optim::Optimizer& optimizer, const std::string& name, const Json& values,
                  Wish& wish);

}  // namespace lockstep
