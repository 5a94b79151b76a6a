// The MPI peer of the benchmarks: plain MPI calls on raw memory.
#pragma once

#include <cstddef>
#include <string>

namespace lockstep::bench {

// False if the benchmark was built without MPI, or not started by mpirun.
bool join_mpi();
void leave_mpi();
std::string mpi_version();

void mpi_barrier();
void mpi_all_reduce_f32(void* memory, std::size_t count);  // in place
void mpi_broadcast(void* memory, std::size_t bytes);       // from rank 0
void mpi_all_gather(const void* input, void* output, std::size_t bytes_of_part);
void mpi_reduce_scatter_f32(const void* input, void* output, std::size_t count_of_part);

}  // namespace lockstep::bench
