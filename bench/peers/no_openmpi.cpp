// In place of openmpi.cpp where there is no MPI: join_mpi() says so, and nothing else is called.

#include "peers/openmpi.h"

namespace lockstep::bench {

bool join_mpi() { return false; }
void leave_mpi() {}
std::string mpi_version() { return {}; }
void mpi_barrier() {}
void mpi_all_reduce_f32(void*, std::size_t) {}
void mpi_broadcast(void*, std::size_t) {}
void mpi_all_gather(const void*, void*, std::size_t) {}
void mpi_reduce_scatter_f32(const void*, void*, std::size_t) {}

}  // namespace lockstep::bench
