// The NCCL engine: LibTorch's ProcessGroupNCCL for tensors on GPUs, and the engine that the ranks
// would have without GPUs for tensors in main memory, which NCCL does not take.
//
// Compiled and linked against a LibTorch with CUDA; not run by our tests, as no machine of theirs
// has a GPU (docs/design/0010-nccl.md).

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "engine/by_device.h"
#include "engine/engines.h"

namespace lockstep {

std::string why_no_nccl() { return {}; }

Backend make_nccl(const EngineContext& context, const Backend& cpu) {
  using Nccl = c10d::ProcessGroupNCCL;
  auto options = Nccl::Options::create();
  options->timeout = context.timeout;
  Backend gpu =
      c10::make_intrusive<Nccl>(c10::make_intrusive<c10d::PrefixStore>("nccl", context.store),
                                context.rank, context.size(), options);
  return c10::make_intrusive<ByDevice>("nccl", cpu, gpu);
}

}  // namespace lockstep
