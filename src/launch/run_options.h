// RunOptions: what a person asks of `lockstep run`.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/cores.h"
#include "launch/output.h"

namespace lockstep {

struct RunOptions {
  std::vector<std::string> command = {};  // the program and its arguments
  std::string program_path = {};          // where it was found
  int num_ranks = 1;                      // on this host
  Bind bind = Bind::kCore;
  OutputOptions output = {};
  int max_restarts = 0;
  std::chrono::milliseconds stop_grace = std::chrono::seconds(10);
  int hash_every = 0;         // steps; 0: the ranks' variables say
  std::string hash_log = {};  // where rank 0 writes hashes of the parameters
  // Elastic: ranks that are lost do not end the job.
  bool is_elastic = false;
  int min_ranks = 1;                             // with fewer the job ends
  int max_replacements = 10;                     // of one rank, each soon after the other
  std::vector<int> fatal_codes = {2, 126, 127};  // exit codes after which a rank is not replaced
  int num_logical = 0;  // logical ranks; 0: the program or its variables say, or the first ranks
  bool is_dry = false;
  bool is_verbose = false;

  // Several hosts.
  int num_hosts = 1;  // at most
  int min_hosts = 1;  // an elastic job begins, and goes on, with so many
  int host_rank = 0;
  std::string coordinator = {};  // etcd, where launchers elect who coordinates; empty: host 0 does
  std::string master_host = {};
  int master_port = 0;
  std::string secret_file = {};
  std::string job_id = {};  // the same for all hosts of a job
  bool may_programs_differ = false;
  std::chrono::milliseconds join_timeout = std::chrono::minutes(5);
  std::chrono::seconds lost_after = std::chrono::seconds(8);  // of silence
};

}  // namespace lockstep
