// In place of gloo.cpp where Gloo's headers were not found.

#include "engine/engines.h"

namespace lockstep {

std::string why_no_gloo() { return LOCKSTEP_NO_GLOO; }

Backend make_gloo(const EngineContext& context) {
  throw_not_built(context.rank, "gloo", why_no_gloo());
}

}  // namespace lockstep
