// How the ranks of a group find each other's memory.
#pragma once

#include "shm/group.h"

namespace lockstep::shm {

// Collective. Throws UsageError, SystemError (no room), MismatchError (another build of lockstep).
Peers connect(const GroupOptions& options, const Exchange& exchange);

// What `step` gives on all ranks. If it throws on one, whatever it is, all ranks throw that.
std::vector<std::string> do_together(const Peers& peers, const Exchange& exchange,
                                     const std::function<std::string()>& step);

}  // namespace lockstep::shm
