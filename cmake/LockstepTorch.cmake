# Finds LibTorch as the target `torch`: the one that the user's project has found already, or the
# one in LOCKSTEP_TORCH (a CMake or environment variable) or CMAKE_PREFIX_PATH. Each may be the
# unpacked official archive, a `torch` folder of a Python installation, or that installation.

macro(lockstep_find_torch)
  if(NOT TARGET torch)
    if(NOT LOCKSTEP_TORCH AND DEFINED ENV{LOCKSTEP_TORCH})
      set(LOCKSTEP_TORCH $ENV{LOCKSTEP_TORCH})
    endif()
    set(_lockstep_roots "")
    foreach(_lockstep_root ${LOCKSTEP_TORCH} ${CMAKE_PREFIX_PATH})
      file(GLOB _lockstep_found ${_lockstep_root}/share/cmake/Torch/TorchConfig.cmake
           ${_lockstep_root}/lib/python3*/site-packages/torch/share/cmake/Torch/TorchConfig.cmake)
      foreach(_lockstep_config ${_lockstep_found})
        get_filename_component(_lockstep_config ${_lockstep_config}/../../../.. ABSOLUTE)
        list(APPEND _lockstep_roots ${_lockstep_config})
      endforeach()
      if(LOCKSTEP_TORCH AND NOT _lockstep_roots)
        message(FATAL_ERROR "LOCKSTEP_TORCH is '${LOCKSTEP_TORCH}', and there is no LibTorch there. "
                            "Set it to an unpacked LibTorch or a Python installation with PyTorch.")
      endif()
    endforeach()
    list(GET _lockstep_roots 0 _lockstep_root)
    find_package(CUDAToolkit QUIET)
    if(EXISTS "${_lockstep_root}/lib/libtorch_cuda.so" AND NOT CUDAToolkit_FOUND)
      _lockstep_import_torch(${_lockstep_root})
    else()
      # TorchConfig.cmake warns about libraries that nobody needs.
      set(_lockstep_log_level "${CMAKE_MESSAGE_LOG_LEVEL}")
      set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
      find_package(Torch QUIET HINTS ${_lockstep_roots})
      set(CMAKE_MESSAGE_LOG_LEVEL "${_lockstep_log_level}")
    endif()
    if(NOT TARGET torch)
      message(FATAL_ERROR "LibTorch was not found. Set LOCKSTEP_TORCH to an unpacked LibTorch or to "
                          "a Python installation with PyTorch (./dev setup makes one in .venv).")
    endif()
  endif()
endmacro()

# A LibTorch built for CUDA, on a machine without the CUDA toolkit: its own configuration stops
# there, but lockstep needs only the part for CPUs, and programs still find the other at run time.
function(_lockstep_import_torch root)
  message(STATUS "lockstep: ${root} is built for CUDA and there is no CUDA toolkit: building for CPUs")
  set(libraries "")
  foreach(name torch_cpu c10 torch)
    list(APPEND libraries ${root}/lib/lib${name}.so)
  endforeach()
  add_library(torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${libraries}" INTERFACE_COMPILE_FEATURES cxx_std_20)
  set(TORCH_LIBRARIES torch PARENT_SCOPE)
  set(TORCH_INSTALL_PREFIX ${root} PARENT_SCOPE)
endfunction()
