// Moving many tensors, small ones together.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lockstep {

// Applies `move` to the tensors, packed by type and device into pieces of bounded size, and writes
// the result back without a trace in autograd: graphs that hold the tensors stay valid.
void move_packed(const std::vector<at::Tensor>& tensors,
                 const std::function<void(const at::Tensor&)>& move);

}  // namespace lockstep
