// Cgroups: the limits that a container or a batch system has put on this process.
//
// `system_root` stands before /proc and /sys: tests have their own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// What a cgroup allows to all processes in it and below it together.
struct Limit {
  std::uint64_t group = 0;  // which one: its inode
  double amount = 0;        // bytes that are left, or cores
};

// Of this process's cgroup, and of those above it, as far as they have one.
std::vector<Limit> memory_limits(const std::string& system_root);
std::vector<Limit> core_limits(const std::string& system_root);

// How many bytes this process's memory cgroup, and those above it, still allow; the largest number
// if there is no limit.
std::uint64_t memory_left_in_cgroup(const std::string& system_root);

// How many cores' worth of time this process's cgroup, and those above it, allow; infinite if there
// is no limit.
double cores_in_cgroup(const std::string& system_root);

}  // namespace lockstep
