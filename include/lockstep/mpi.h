// A world of an MPI communicator, for programs that use MPI themselves. Needs lockstep with MPI.
#pragma once

#include <lockstep/export.h>
#include <lockstep/world.h>
#include <mpi.h>

namespace lockstep {

// Joins the world of the communicator's processes, with their ranks there. Collective over it.
// Needs no launcher's variables. The communicator itself is only copied: it stays the caller's.
// With `auto`, the engine is "mpi". Requires: MPI was initialised with MPI_THREAD_MULTIPLE; with
// MPI_THREAD_SERIALIZED, the program calls MPI only while no operation of lockstep is under way and
// nothing is left of the last one. Throws: UsageError, and what World::join throws.
LOCKSTEP_API World join_mpi(MPI_Comm communicator, JoinOptions options = {});

}  // namespace lockstep
