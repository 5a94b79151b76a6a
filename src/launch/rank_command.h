// The variables by which a launcher tells a rank its place; World::join() reads them.
#pragma once

#include <string>
#include <vector>

#include "base/process.h"

namespace lockstep {

// The command for one of `size` ranks, all on this host. `store_fd` is an empty memory file, the
// same for all ranks of a job, in which they meet: no port is opened.
Command rank_command(std::vector<std::string> arguments, int rank, int size, int store_fd);

}  // namespace lockstep
