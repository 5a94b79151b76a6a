// Memory that the ranks of a host have once: a tensor that each of them maps.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/world.h>

#include <cstdint>
#include <memory>

namespace lockstep {

// Whose memory it is.
struct MemoryUse {
  std::weak_ptr<void> user = {};
  std::shared_ptr<void> record = {};  // lives as long as the memory does
};

// Makes a tensor of one dimension, zero at first, whose memory is the same on all ranks of `host`.
// It lives as long as a tensor of any rank uses it. Collective. Requires: all ranks are on one
// host. Throws on all ranks: SystemError if there is no room on one.
at::Tensor allocate_on_host(const World& host, std::int64_t num_elements, at::ScalarType type,
                            MemoryUse use = {});

// What allocate_on_host() was given for the memory of this tensor; null if it is in other memory.
const MemoryUse* use_of(const at::Tensor& tensor);

}  // namespace lockstep
