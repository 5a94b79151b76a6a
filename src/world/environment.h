// Placement: which rank this process is, read from the variables of whoever started it.
//
// A pure function of the variables, so that every launcher's set is a test. Order of precedence:
// RANK and WORLD_SIZE (lockstep, torchrun), then OpenMPI, PMI (MPICH, Intel MPI), Slurm.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "base/env.h"

namespace lockstep {

// Where the ranks' common store is.
struct InProcess {};  // a world of one needs none
struct InheritedFd {  // a memory file that the launcher made; LOCKSTEP_STORE=fd:N
  int fd = -1;
};
struct LauncherSocket {  // of several hosts: the launcher passes questions on;
                         // LOCKSTEP_STORE=launcher:N
  int fd = -1;
  std::string master_address = {};  // of the first host
};
struct TcpAddress {
  std::string host = {};
  int port = 0;
  bool is_served_by_launcher = false;  // else rank 0 serves it
};
struct LauncherFile {         // a file on the one host, named after the launcher's process
  std::string rank_variable;  // the launcher is the nearest ancestor without this variable
};
using StorePlace = std::variant<InProcess, InheritedFd, LauncherSocket, TcpAddress, LauncherFile>;

struct Placement {
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;  // if the launcher says so
  int generation = 0;             // counts restarts of the whole job by its launcher
  int num_logical = 0;            // logical ranks; 0: none are asked for
  int num_threads = 0;            // of each rank; 0: none are asked for
  std::optional<int> notice_fd;   // in an elastic job (base/notice.h)
  bool is_newcomer = false;       // to an elastic job that runs
  std::string launcher = "none";  // for messages
  StorePlace store;
};

// Throws UsageError: half a set of variables, or a value that cannot be; names what was found.
Placement read_placement(const Environment& environment);

}  // namespace lockstep
