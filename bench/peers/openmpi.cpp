#include "peers/openmpi.h"

#include <mpi.h>

#include <cstdlib>

namespace lockstep::bench {

bool join_mpi() {
  if (std::getenv("OMPI_COMM_WORLD_RANK") == nullptr && std::getenv("PMI_RANK") == nullptr) {
    return false;
  }
  return MPI_Init(nullptr, nullptr) == MPI_SUCCESS;
}

void leave_mpi() { MPI_Finalize(); }

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string version(text, static_cast<std::size_t>(length));
  return version.substr(0, version.find(','));
}

void mpi_barrier() { MPI_Barrier(MPI_COMM_WORLD); }

void mpi_all_reduce_f32(void* memory, std::size_t count) {
  MPI_Allreduce(MPI_IN_PLACE, memory, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void mpi_broadcast(void* memory, std::size_t bytes) {
  MPI_Bcast(memory, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD);
}

void mpi_all_gather(const void* input, void* output, std::size_t bytes_of_part) {
  MPI_Allgather(input, static_cast<int>(bytes_of_part), MPI_BYTE, output,
                static_cast<int>(bytes_of_part), MPI_BYTE, MPI_COMM_WORLD);
}

void mpi_reduce_scatter_f32(const void* input, void* output, std::size_t count_of_part) {
  MPI_Reduce_scatter_block(input, output, static_cast<int>(count_of_part), MPI_FLOAT, MPI_SUM,
                           MPI_COMM_WORLD);
}

}  // namespace lockstep::bench
