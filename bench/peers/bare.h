// The peer that has replicas of nothing: what is left of a rank's memory is that of the process, of
// activations and of gradients on their way.
#pragma once

#include <lockstep/world.h>

#include <vector>

namespace lockstep::bench {

// Collective. From now on all ranks have rank 0's parameters in one memory, and backward() leaves
// no gradients.
void make_bare(const World& world, const std::vector<at::Tensor>& parameters);

}  // namespace lockstep::bench
