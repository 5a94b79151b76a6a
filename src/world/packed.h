// Moving many tensors, small ones together.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lockstep {

// Applies `move` to the tensors, packed by type and device into pieces of bounded size, and writes
// the result back without a trace in autograd: graphs that hold the tensors stay valid. A tensor
// that `keeps` says no of is neither read nor written.
void move_packed(
    const std::vector<at::Tensor>& tensors, const std::function<void(const at::Tensor&)>& move,
    const std::function<bool(const at::Tensor&)>& keeps = [](const at::Tensor&) { return true; });

// For tensors that were written in such a way and are others now: autograd refuses graphs from
// before, and optimizers know that their copies are old.
void mark_written(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
