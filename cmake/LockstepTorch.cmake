# Finds LibTorch as the target `torch`: the one that the user's project has found already, else the
# one in LOCKSTEP_TORCH (a CMake or environment variable), else wherever find_package(Torch) looks,
# which is Torch_DIR, CMAKE_PREFIX_PATH and the system. LOCKSTEP_TORCH may be the unpacked official
# archive, a `torch` folder of a Python installation, or that installation.
# Sets LOCKSTEP_TORCH_ROOT, the folder with LibTorch's lib/ and include/, or LOCKSTEP_TORCH_PROBLEM.

macro(lockstep_find_torch)
  set(LOCKSTEP_TORCH_PROBLEM "")
  if(NOT TARGET torch)
    if(NOT LOCKSTEP_TORCH AND DEFINED ENV{LOCKSTEP_TORCH})
      set(LOCKSTEP_TORCH $ENV{LOCKSTEP_TORCH})
    endif()
    set(_lockstep_configs "")
    foreach(_lockstep_root ${LOCKSTEP_TORCH} ${CMAKE_PREFIX_PATH})
      file(GLOB _lockstep_found ${_lockstep_root}/share/cmake/Torch/TorchConfig.cmake
           ${_lockstep_root}/lib/python3*/*-packages/torch/share/cmake/Torch/TorchConfig.cmake)
      list(APPEND _lockstep_configs ${_lockstep_found})
    endforeach()
    set(_lockstep_where "")
    if(_lockstep_configs)
      list(GET _lockstep_configs 0 _lockstep_config)
      get_filename_component(_lockstep_where ${_lockstep_config} DIRECTORY)
      set(Torch_DIR ${_lockstep_where} CACHE PATH "Where LibTorch's configuration is" FORCE)
    endif()
    if(LOCKSTEP_TORCH AND NOT _lockstep_configs)
      set(LOCKSTEP_TORCH_PROBLEM "LOCKSTEP_TORCH is '${LOCKSTEP_TORCH}', and there is no LibTorch \
there. Set it to an unpacked LibTorch or to a Python installation with PyTorch.")
    else()
      find_package(CUDAToolkit QUIET)
      get_filename_component(_lockstep_root "${_lockstep_where}/../../.." ABSOLUTE)
      # A toolkit may be there in part, as from Python's packages.
      if(_lockstep_where AND EXISTS "${_lockstep_root}/lib/libtorch_cuda.so" AND
         NOT (TARGET CUDA::cudart AND TARGET CUDA::cublas AND TARGET CUDA::cufft))
        _lockstep_import_torch(${_lockstep_root})
      else()
        # TorchConfig.cmake warns about libraries that nobody needs.
        set(_lockstep_log_level "${CMAKE_MESSAGE_LOG_LEVEL}")
        set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
        find_package(Torch QUIET)
        set(CMAKE_MESSAGE_LOG_LEVEL "${_lockstep_log_level}")
      endif()
      if(NOT TARGET torch)
        set(LOCKSTEP_TORCH_PROBLEM "LibTorch was not found. Set LOCKSTEP_TORCH to an unpacked \
LibTorch or to a Python installation with PyTorch (./dev setup makes one).")
      endif()
    endif()
  endif()
  if(TARGET torch)
    get_target_property(_lockstep_includes torch INTERFACE_INCLUDE_DIRECTORIES)
    list(GET _lockstep_includes 0 _lockstep_root)
    get_filename_component(LOCKSTEP_TORCH_ROOT ${_lockstep_root}/.. ABSOLUTE)
    set(LOCKSTEP_TORCH_ROOT ${LOCKSTEP_TORCH_ROOT} CACHE INTERNAL "The LibTorch in use")
  endif()
endmacro()

# A LibTorch built for CUDA, on a machine without the whole CUDA toolkit: its own configuration stops
# there, but lockstep needs only its libraries.
function(_lockstep_import_torch root)
  add_library(torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${root}/lib/libtorch_cpu.so;${root}/lib/libtorch_cuda.so;${root}/lib/libc10.so"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endfunction()
