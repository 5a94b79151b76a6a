// Cgroups: the limits that a container or a batch system has put on this process.
//
// `system_root` stands before /proc and /sys: tests have their own.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// How many bytes this process's memory cgroup, and those above it, still allow; the largest number
// if there is no limit.
std::uint64_t memory_left_in_cgroup(const std::string& system_root);

// How many cores' worth of time this process's cgroup, and those above it, allow; infinite if there
// is no limit.
double cores_in_cgroup(const std::string& system_root);

}  // namespace lockstep
