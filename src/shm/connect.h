// How the ranks of a group find each other's memory.
#pragma once

#include "shm/group.h"

namespace lockstep::shm {

// Collective. Throws UsageError, SystemError (no room), MismatchError (another build of lockstep).
Peers connect(const GroupOptions& options, const Exchange& exchange);

}  // namespace lockstep::shm
