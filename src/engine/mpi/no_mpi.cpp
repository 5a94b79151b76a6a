// In place of mpi.cpp where there is no MPI.

#include "engine/engines.h"

namespace lockstep {

std::string why_no_mpi() { return LOCKSTEP_NO_MPI; }

bool has_started_ranks_by_mpi(const EngineContext&) { return false; }

Backend make_mpi(const EngineContext& context) {
  throw_not_built(context.rank, "mpi", why_no_mpi());
}

}  // namespace lockstep
