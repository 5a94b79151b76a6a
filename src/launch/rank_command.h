// The variables by which a launcher tells a rank its place: torchrun's names, and ours.
// World::join() reads them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/process.h"

namespace lockstep {

struct RankPlace {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  int host_rank = 0;
  int num_hosts = 1;
  std::string master_host = "127.0.0.1";
  int master_port = 0;  // 0: there is none
  int restart = 0;
  int max_restarts = 0;
};

std::map<std::string, std::string> variables_of(const RankPlace& place);

// The command for one of `size` ranks, all on this host. `store_fd` is an empty memory file, the
// same for all ranks of a job, for their rendezvous: no port is opened.
Command rank_command(std::vector<std::string> arguments, int rank, int size, int store_fd);
// How `command` says where that store is.
void pass_store(Command& command, int store_fd);

}  // namespace lockstep
