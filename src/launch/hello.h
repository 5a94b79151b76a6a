// Hello: what a host's launcher says of itself when it comes to the coordinator, and whether the
// two fit.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "launch/run_options.h"

namespace lockstep {

struct Hello {
  int host_rank = 0;
  int num_hosts = 1;
  int num_ranks = 1;
  std::string host = {};
  std::string job_id = {};
  std::string program = {};       // as it was typed
  std::string program_hash = {};  // of its file; empty: it may be run, but not read
  std::vector<std::string> arguments = {};
  bool is_elastic = false;
};
LOCKSTEP_JSON_FIELDS(Hello, host_rank, num_hosts, num_ranks, host, job_id, program, program_hash,
                     arguments, is_elastic)

// Reads the program's file.
Hello hello_of(const RunOptions& options);

// What the scheduler that started this process calls the job; empty if there is none.
std::string scheduler_job_id(const Environment& environment);

// Why `host` cannot be a host of `first`'s job; empty if it can.
std::string find_conflict(const Hello& first, const Hello& host, bool may_programs_differ);

// How the arguments of `host`'s program differ from those of `first`'s; empty if they do not.
std::string compare_arguments(const Hello& first, const Hello& host);

}  // namespace lockstep
