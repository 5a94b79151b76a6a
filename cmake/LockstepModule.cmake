# How lockstep's parts become one library.
#
# A module is a folder of src/. It may include its own headers, those of its DEPS and the public
# ones; tests/e2e/check_includes.sh holds every #include against the list this file writes.

file(WRITE ${PROJECT_BINARY_DIR}/modules.txt "")

# fmt's headers, which base/text.cpp instantiates for all. LibTorch may bring its own ones, of another
# version, in a folder that its users see first: then all of lockstep uses those.
function(lockstep_find_fmt target)
  set(of_torch ${LOCKSTEP_TORCH_ROOT}/include/fmt)
  if(NOT LOCKSTEP_TORCH_FREE AND EXISTS ${of_torch}/format.h)
    file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/fmt_of_torch)
    file(CREATE_LINK ${of_torch} ${PROJECT_BINARY_DIR}/fmt_of_torch/fmt SYMBOLIC)
    target_include_directories(${target} SYSTEM INTERFACE ${PROJECT_BINARY_DIR}/fmt_of_torch)
  else()
    get_target_property(folders fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
    target_include_directories(${target} SYSTEM INTERFACE ${folders})
  endif()
endfunction()

# Flags of lockstep's own code; nothing here reaches users of the library.
add_library(lockstep_flags INTERFACE)
target_compile_features(lockstep_flags INTERFACE cxx_std_20)
target_include_directories(lockstep_flags INTERFACE ${PROJECT_SOURCE_DIR}/src)
target_compile_definitions(lockstep_flags INTERFACE LOCKSTEP_VERSION="${PROJECT_VERSION}")
target_compile_options(lockstep_flags INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor
                       $<$<BOOL:${LOCKSTEP_WERROR}>:-Werror>)
# g++ 12 warns of overlapping copies in "text" + std::string, where there are none (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(lockstep_flags INTERFACE -Wno-restrict)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(lockstep_flags INTERFACE -Werror=thread-safety)
endif()
if(LOCKSTEP_SANITIZE)
  target_compile_options(lockstep_flags INTERFACE -fsanitize=${LOCKSTEP_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(lockstep_flags INTERFACE -fsanitize=${LOCKSTEP_SANITIZE})
  target_compile_definitions(lockstep_flags INTERFACE LOCKSTEP_SANITIZED)  # tests of sizes ask
endif()
target_link_libraries(lockstep_flags INTERFACE Threads::Threads)
lockstep_find_fmt(lockstep_flags)

# One way to compile for every target, so that all of them can share the precompiled headers. TEST:
# as fast as possible, with all of LibTorch's headers.
function(lockstep_compile_as_ours target)
  cmake_parse_arguments(arg "TORCH;TEST" "" "" ${ARGN})
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden
                        VISIBILITY_INLINES_HIDDEN ON CXX_EXTENSIONS OFF
                        UNITY_BUILD ${LOCKSTEP_UNITY})
  target_compile_options(${target} PRIVATE -fPIC)  # programs too: -fPIE has other precompiled headers
  target_include_directories(${target} PUBLIC
                             $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_link_libraries(${target} PRIVATE lockstep_flags)
  if(NOT arg_TORCH)
    return()
  endif()
  target_link_libraries(${target} PUBLIC torch PRIVATE nlohmann_json::nlohmann_json)
  set(header lockstep_torch_header)
  set(options TORCH)
  if(arg_TEST)
    target_compile_options(${target} PRIVATE -O0)
    set(header lockstep_test_header)
    list(APPEND options TEST)
  endif()
  if(NOT LOCKSTEP_PRECOMPILE)
    return()
  endif()
  if(NOT TARGET ${header})
    file(WRITE ${PROJECT_BINARY_DIR}/${header}.cpp "")
    add_library(${header} OBJECT ${PROJECT_BINARY_DIR}/${header}.cpp)
    set(LOCKSTEP_PRECOMPILE OFF)
    lockstep_compile_as_ours(${header} ${options})
    # In the library not torch/torch.h: its precompiled form takes 7 s to load, this one 3 s.
    target_precompile_headers(${header} PRIVATE <torch/csrc/distributed/c10d/Backend.hpp>
                              $<$<BOOL:${arg_TEST}>:<torch/torch.h$<ANGLE-R>>)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${header})
endfunction()

# lockstep_module(NAME world [TORCH] SRCS join store ... DEPS base ...)
function(lockstep_module)
  cmake_parse_arguments(arg "TORCH" "NAME" "SRCS;DEPS" ${ARGN})
  list(TRANSFORM arg_SRCS PREPEND ${PROJECT_SOURCE_DIR}/src/${arg_NAME}/)
  list(TRANSFORM arg_SRCS APPEND .cpp)
  set(target lockstep_${arg_NAME})
  add_library(${target} STATIC ${arg_SRCS})
  if(arg_TORCH)
    lockstep_compile_as_ours(${target} TORCH)
  else()
    lockstep_compile_as_ours(${target})
  endif()
  set(dep_targets ${arg_DEPS})
  list(TRANSFORM dep_targets PREPEND lockstep_)
  target_link_libraries(${target} PUBLIC ${dep_targets})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_MODULES ${target})
  string(REPLACE ";" " " deps "${arg_DEPS}")
  file(APPEND ${PROJECT_BINARY_DIR}/modules.txt "${arg_NAME}: ${deps}\n")
endfunction()

# Compiles one source into `target` once per instruction set; LOCKSTEP_KERNEL is the function's name.
# Contraction to fused multiply-add would make the bits depend on the instruction set.
function(lockstep_kernels target source)
  set(plain "")
  set(sets plain)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(avx2 -mavx2 -mf16c)
    set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mprefer-vector-width=512)
    list(APPEND sets avx2 avx512)
  endif()
  set(options -O3 -ffp-contract=off)
  if(LOCKSTEP_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    list(APPEND options -Wno-pass-failed)  # checks of addresses stand in the way of vectors
  endif()
  foreach(name ${sets})
    set(copy ${PROJECT_BINARY_DIR}/kernels_${name}.cpp)
    file(CONFIGURE OUTPUT ${copy} CONTENT "#include \"${PROJECT_SOURCE_DIR}/${source}\"\n")
    set_source_files_properties(${copy} PROPERTIES COMPILE_DEFINITIONS LOCKSTEP_KERNEL=reduce_${name}
      COMPILE_OPTIONS "${options};${${name}}")
    target_sources(${target} PRIVATE ${copy})
  endforeach()
endfunction()

# The library that users link, made of all modules, and its installation.
function(lockstep_library)
  get_property(modules GLOBAL PROPERTY LOCKSTEP_MODULES)
  list(TRANSFORM modules REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_library(lockstep ${objects})
  add_library(lockstep::lockstep ALIAS lockstep)
  set_target_properties(lockstep PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  target_compile_features(lockstep PUBLIC cxx_std_20)
  include(GNUInstallDirs)
  target_include_directories(lockstep PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  # By name, not by path: the exported target asks find_package(Torch) where LibTorch is.
  target_link_libraries(lockstep PUBLIC torch Threads::Threads ZLIB::ZLIB ${LOCKSTEP_MPI_TARGET})

  if(NOT LOCKSTEP_INSTALL)
    return()
  endif()
  include(CMakePackageConfigHelpers)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
  install(TARGETS lockstep EXPORT lockstep)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
          FILES_MATCHING PATTERN "*.h" PATTERN mpi.h EXCLUDE)
  if(LOCKSTEP_MPI_TARGET)
    install(FILES ${PROJECT_SOURCE_DIR}/include/lockstep/mpi.h
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
  endif()
  install(EXPORT lockstep NAMESPACE lockstep:: FILE lockstepTargets.cmake DESTINATION ${package_dir})
  configure_package_config_file(cmake/lockstepConfig.cmake.in
                                ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
                                INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
                ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
                ${PROJECT_SOURCE_DIR}/cmake/LockstepTorch.cmake DESTINATION ${package_dir})
endfunction()
