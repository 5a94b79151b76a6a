# The program `lockstep`: torch-free, so that it starts in milliseconds and stays small.

# Tests and benches start ranks as the launcher does, with or without it.
lockstep_module(NAME launch SRCS rank_command DEPS archive base collective)
if(NOT LOCKSTEP_BUILD_LAUNCHER)
  return()
endif()

find_package(OpenSSL 3 QUIET)
find_package(CLI11 QUIET)
if(NOT OpenSSL_FOUND OR NOT CLI11_FOUND)
  message(FATAL_ERROR "The launcher needs OpenSSL 3 and CLI11: install libssl-dev and libcli11-dev, "
                      "or switch it off with -DLOCKSTEP_BUILD_LAUNCHER=OFF.")
endif()
# The HTTP client for etcd. Debian compiles it into a library, and its classes have other sizes with
# other features: these are the library's. Elsewhere it is a header alone.
find_path(LOCKSTEP_HTTPLIB_INCLUDE_DIR httplib.h)
find_library(LOCKSTEP_HTTPLIB_LIBRARY cpp-httplib)
if(NOT LOCKSTEP_HTTPLIB_INCLUDE_DIR)
  message(FATAL_ERROR "httplib.h was not found: install libcpp-httplib-dev, set LOCKSTEP_HTTPLIB_INCLUDE_DIR, "
                      "or switch the launcher off with -DLOCKSTEP_BUILD_LAUNCHER=OFF.")
endif()
set(httplib_features CPPHTTPLIB_OPENSSL_SUPPORT)
if(LOCKSTEP_HTTPLIB_LIBRARY)
  list(APPEND httplib_features CPPHTTPLIB_ZLIB_SUPPORT CPPHTTPLIB_BROTLI_SUPPORT)
else()
  set(LOCKSTEP_HTTPLIB_LIBRARY "")
endif()

# lockstep top draws with it.
set(CURSES_NEED_NCURSES TRUE)
set(CURSES_NEED_WIDE TRUE)
find_package(Curses QUIET)
if(NOT CURSES_FOUND)
  message(FATAL_ERROR "ncurses was not found: install libncurses-dev, or switch the launcher off with "
                      "-DLOCKSTEP_BUILD_LAUNCHER=OFF.")
endif()

add_library(lockstep_launcher STATIC)
foreach(source args candidate cbor connection control coordinator coordinator_takeover cores doctor door elastic elastic_scale
        election etcd event_loop gpus guard hello
        host inspect key_value output remote_leader roster run run_log status tls top top_screen verify writer)
  target_sources(lockstep_launcher PRIVATE src/launch/${source}.cpp)
endforeach()
lockstep_compile_as_ours(lockstep_launcher)
target_compile_options(lockstep_launcher PRIVATE $<$<CONFIG:Release>:-O1>)  # it waits; JSON compiles for long
target_link_libraries(lockstep_launcher PUBLIC lockstep_launch lockstep_archive lockstep_base OpenSSL::SSL
                      nlohmann_json::nlohmann_json lockstep_collective PRIVATE CLI11::CLI11 ${LOCKSTEP_HTTPLIB_LIBRARY}
                      OpenSSL::Crypto ${CURSES_LIBRARIES} ${CMAKE_DL_LIBS})
# Its header makes macros of common words.
set_source_files_properties(src/launch/top_screen.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
if(NOT CURSES_INCLUDE_DIRS IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
  set_property(SOURCE src/launch/top_screen.cpp PROPERTY INCLUDE_DIRECTORIES ${CURSES_INCLUDE_DIRS})
endif()
# Alone: only this file sees httplib and its definitions.
set_source_files_properties(src/launch/etcd.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
                            COMPILE_DEFINITIONS "${httplib_features}")
if(NOT LOCKSTEP_HTTPLIB_INCLUDE_DIR IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
  set_property(SOURCE src/launch/etcd.cpp PROPERTY INCLUDE_DIRECTORIES ${LOCKSTEP_HTTPLIB_INCLUDE_DIR})
endif()
# What `lockstep doctor` says of this build.
get_property(table GLOBAL PROPERTY LOCKSTEP_ENGINE_TABLE)
set(engines shm solo)
foreach(line ${table})
  string(REGEX MATCH "^ *([a-z]+)\tyes" found "${line}")
  if(found)
    list(APPEND engines ${CMAKE_MATCH_1})
  endif()
endforeach()
list(JOIN engines ", " engines)
set_property(SOURCE src/launch/doctor.cpp src/launch/gpus.cpp APPEND PROPERTY COMPILE_DEFINITIONS
             LOCKSTEP_ENGINES="${engines}" LOCKSTEP_TORCH_ROOT="${LOCKSTEP_TORCH_ROOT}"
             LOCKSTEP_TORCH_VERSION="${Torch_VERSION}")

add_executable(lockstep_program src/launch/main.cpp)
lockstep_compile_as_ours(lockstep_program)
set_target_properties(lockstep_program PROPERTIES OUTPUT_NAME lockstep
                      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_link_libraries(lockstep_program PRIVATE lockstep_launcher)
if(LOCKSTEP_INSTALL)
  include(GNUInstallDirs)
  install(TARGETS lockstep_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
