// In place of nccl.cpp where LibTorch is not built for CUDA, or headers are missing.

#include "engine/engines.h"

namespace lockstep {

std::string why_no_nccl() { return LOCKSTEP_NO_NCCL; }

Backend make_nccl(const EngineContext& context, const Backend&) {
  throw_not_built(context.rank, "nccl", why_no_nccl());
}

}  // namespace lockstep
