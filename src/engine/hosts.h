// Hosts: which ranks are on which host. The one place where members are grouped.
//
// Hosts are numbered by their lowest rank, the ranks of a host by an index in the order of ranks.
// Ranks are places in the list of members: in a part of a world not those of the world itself.
#pragma once

#include <lockstep/backend.h>

#include <cstddef>
#include <vector>

namespace lockstep {

struct Hosts {
  explicit Hosts(const std::vector<Member>& members);

  int size() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& with(int rank) const {  // the ranks of its host
    return ranks[static_cast<std::size_t>(host_of[static_cast<std::size_t>(rank)])];
  }

  std::vector<std::vector<int>> ranks;  // by host
  std::vector<int> host_of;             // by rank
  std::vector<int> index_of;            // by rank
};

// Whether two members can share memory and see each other's processes.
inline bool are_on_one_host(const Member& a, const Member& b) { return a.host_id == b.host_id; }

// False if the member's process has ended, as far as a process on the host of `here` can tell.
bool seems_alive(const Member& member, const Member& here);

// "rank 2 (host b7, pid 4121)"
std::string describe(const Member& member);
// The same for the member that errors call `global_rank`.
std::string describe(const std::vector<Member>& members, int global_rank);

}  // namespace lockstep
