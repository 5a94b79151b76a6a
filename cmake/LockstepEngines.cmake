# Which engines are built, and why the others are not. An engine is a folder of
# src/engine with NAME.cpp, or no_NAME.cpp where it cannot be built; the reason ends up in the program's own messages.

set(LOCKSTEP_ENGINE_SRCS "")
set_property(GLOBAL PROPERTY LOCKSTEP_ENGINE_TABLE "")

# lockstep_engine(gloo "" DETAIL) builds it; lockstep_engine(mpi "reason" "") builds its stub.
function(lockstep_engine name reason detail)
  string(TOUPPER ${name} upper)
  set(wish ${LOCKSTEP_WITH_${upper}})
  if(wish STREQUAL "AUTO")
  elseif(NOT wish)
    set(reason "switched off (LOCKSTEP_WITH_${upper}=${wish})")
  elseif(reason)
    message(FATAL_ERROR "LOCKSTEP_WITH_${upper} is ${wish}, but ${reason}.")
  endif()
  if(reason)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ENGINE_TABLE "  ${name}\tno \t${reason}")
  else()
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ENGINE_TABLE "  ${name}\tyes\t${detail}")
  endif()
  set(LOCKSTEP_NO_${upper} "${reason}" PARENT_SCOPE)
  if(reason)
    set(LOCKSTEP_ENGINE_SRCS ${LOCKSTEP_ENGINE_SRCS} ${name}/no_${name} PARENT_SCOPE)
    set_property(SOURCE src/engine/${name}/no_${name}.cpp APPEND PROPERTY COMPILE_DEFINITIONS
                 LOCKSTEP_NO_${upper}="${reason}")
  endif()
endfunction()

function(lockstep_print_engines)
  get_property(table GLOBAL PROPERTY LOCKSTEP_ENGINE_TABLE)
  list(JOIN table "\n" lines)
  message(STATUS "lockstep ${PROJECT_VERSION} engines:\n${lines}")
endfunction()

if(LOCKSTEP_TORCH_FREE)
  return()
endif()

# LibTorch contains Gloo but not its headers.
set(reason "")
find_path(LOCKSTEP_GLOO_INCLUDE_DIR gloo/context.h)
if(NOT LOCKSTEP_GLOO_INCLUDE_DIR)
  set(reason "Gloo's headers were not found: install libgloo-dev")
elseif(NOT EXISTS ${LOCKSTEP_TORCH_ROOT}/include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp)
  set(reason "this LibTorch has no ProcessGroupGloo.hpp: it was built without distributed")
endif()
lockstep_engine(gloo "${reason}" "LibTorch's, with headers from ${LOCKSTEP_GLOO_INCLUDE_DIR}")
if(NOT LOCKSTEP_NO_GLOO)
  list(APPEND LOCKSTEP_ENGINE_SRCS gloo/gloo gloo/own_address)
  # The header declares nothing without this; LibTorch's own configuration usually sets it too.
  set_property(SOURCE src/engine/gloo/gloo.cpp APPEND PROPERTY COMPILE_DEFINITIONS USE_C10D_GLOO)
  if(NOT LOCKSTEP_GLOO_INCLUDE_DIR IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
    set_property(SOURCE src/engine/gloo/gloo.cpp APPEND PROPERTY INCLUDE_DIRECTORIES
                 ${LOCKSTEP_GLOO_INCLUDE_DIR})
  endif()
endif()

# Any MPI with the calls of MPI-3: OpenMPI, MPICH, Intel MPI. Of C++ only the language is needed.
set(reason "")
set(MPI_CXX_SKIP_MPICXX ON)
if(LOCKSTEP_WITH_MPI)
  find_package(MPI 3 QUIET COMPONENTS CXX)
endif()
if(NOT MPI_CXX_FOUND)
  set(reason "no MPI was found: install libopenmpi-dev or libmpich-dev")
endif()
lockstep_engine(mpi "${reason}" "MPI ${MPI_CXX_VERSION}, with headers from ${MPI_CXX_HEADER_DIR}")
if(NOT LOCKSTEP_NO_MPI)
  list(APPEND LOCKSTEP_ENGINE_SRCS mpi/mpi mpi/calls mpi/notices mpi/pieces mpi/plan mpi/runner mpi/traffic)
  set(LOCKSTEP_MPI_TARGET MPI::MPI_CXX)
  set(LOCKSTEP_MPI_WORLD_SRCS join_mpi)
endif()

# LibTorch built for CUDA has ProcessGroupNCCL; the headers of CUDA and NCCL are elsewhere: with the
# toolkit, or in the packages that PyTorch's wheel depends on.
set(reason "")
if(LOCKSTEP_WITH_NCCL AND EXISTS ${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cuda.so)
  file(GLOB wheels ${LOCKSTEP_TORCH_ROOT}/../nvidia/*/include)
  find_path(LOCKSTEP_NCCL_INCLUDE_DIR nccl.h HINTS ${wheels} ${CUDAToolkit_INCLUDE_DIRS})
  find_path(LOCKSTEP_CUDA_INCLUDE_DIR cuda_runtime.h HINTS ${wheels} ${CUDAToolkit_INCLUDE_DIRS})
  if(NOT LOCKSTEP_NCCL_INCLUDE_DIR OR NOT LOCKSTEP_CUDA_INCLUDE_DIR)
    set(reason "nccl.h or cuda_runtime.h was not found: install them, or set LOCKSTEP_NCCL_INCLUDE_DIR and LOCKSTEP_CUDA_INCLUDE_DIR")
  endif()
else()
  set(reason "this LibTorch is built for CPUs")
endif()
lockstep_engine(nccl "${reason}" "LibTorch's, with headers from ${LOCKSTEP_NCCL_INCLUDE_DIR} (compiled, never run by our tests)")
if(NOT LOCKSTEP_NO_NCCL)
  list(APPEND LOCKSTEP_ENGINE_SRCS nccl/nccl)
  set_property(SOURCE src/engine/nccl/nccl.cpp APPEND PROPERTY COMPILE_DEFINITIONS USE_C10D_NCCL)
  set_property(SOURCE src/engine/nccl/nccl.cpp APPEND PROPERTY INCLUDE_DIRECTORIES
               ${LOCKSTEP_NCCL_INCLUDE_DIR} ${LOCKSTEP_CUDA_INCLUDE_DIR})
endif()
