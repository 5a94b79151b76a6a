// Gradients with few rows, as of embeddings: indices and values travel, not the whole tensor.
#pragma once

#include <lockstep/world.h>

namespace lockstep {

// The mean over ranks of the sparse gradients of a parameter, the same computation on all ranks.
// `gradient` is this rank's, undefined if it has none; `weight` is this rank's, `scale` corrects
// the mean for the weights of all. Collective.
at::Tensor mean_of_sparse(const World& world, at::Tensor gradient, const at::Tensor& parameter,
                          double weight, double scale);

}  // namespace lockstep
