// The NCCL engine: LibTorch's ProcessGroupNCCL for tensors on GPUs, and the engine that the ranks
// would have without GPUs for tensors in main memory, which NCCL does not take.
//
// Compiled and linked against a LibTorch with CUDA; not run by our tests, as no machine of theirs
// has a GPU (docs/design/0010-nccl.md).

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>

#include "engine/by_device.h"
#include "engine/engines.h"

namespace lockstep {

std::string why_no_nccl() { return {}; }

Backend make_nccl(const EngineContext& context, const Backend& cpu) {
  using Nccl = c10d::ProcessGroupNCCL;
  // NCCL's watchdog gives up what fails or takes too long, and leaves the process alone: it is
  // thrown by the reducer's next step, or the world's next call. A program may set another value.
  const std::string clean_up = std::to_string(c10d::CleanUpOnly);
  ::setenv(c10d::TORCH_NCCL_ASYNC_ERROR_HANDLING.front().c_str(), clean_up.c_str(),
           /*overwrite=*/0);
  auto options = Nccl::Options::create();
  options->timeout = ByDevice::kGpuPatience * context.timeout;
  Backend gpu =
      c10::make_intrusive<Nccl>(c10::make_intrusive<c10d::PrefixStore>("nccl", context.store),
                                context.rank, context.size(), options);
  return c10::make_intrusive<ByDevice>("nccl", context.global_rank(), cpu, gpu);
}

}  // namespace lockstep
