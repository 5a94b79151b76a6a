// Hosts: who shares memory with whom is decided by identity, not by names or by counting ranks.
#pragma once

#include <string>

namespace lockstep {

// Equal for two processes if and only if they run under one kernel and in the same process, user
// and network namespaces: they see each other's pids, can share memory, and have one loopback.
// LOCKSTEP_HOST_ID parts them further, for tests of several hosts on one.
std::string this_host_id();

// Equal for two processes if and only if they have one loopback interface.
std::string this_network_id();

}  // namespace lockstep
