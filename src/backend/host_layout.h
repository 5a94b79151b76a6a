// HostLayout: which ranks are on which host, and who works with whom across hosts.
//
// Hosts are numbered by their lowest rank, the ranks of a host by an index in the order of ranks.
// The ranks of one index, one on each host, are a team; there are as many teams as the smallest
// host has ranks. The rank with index 0 leads its host.
#pragma once

#include <lockstep/backend.h>

#include <vector>

namespace lockstep {

struct HostLayout {
  HostLayout(int rank, const std::vector<Member>& members);

  int num_ranks() const { return static_cast<int>(host_of.size()); }
  int num_hosts() const { return static_cast<int>(hosts.size()); }
  const std::vector<int>& here() const { return hosts[static_cast<std::size_t>(host)]; }
  int num_here() const { return static_cast<int>(here().size()); }
  bool is_here(int peer) const { return host_of[static_cast<std::size_t>(peer)] == host; }
  int index(int peer) const { return index_of[static_cast<std::size_t>(peer)]; }
  // The rank of a host that works for those of the others with this index.
  int helper(int on_host, int of_index) const {
    const auto& ranks = hosts[static_cast<std::size_t>(on_host)];
    return ranks[static_cast<std::size_t>(of_index) % ranks.size()];
  }
  bool is_leader() const { return my_index == 0; }
  bool is_in_team() const { return my_index < num_teams; }

  int rank = 0;
  std::vector<std::vector<int>> hosts;  // ranks of each
  std::vector<int> host_of;             // by rank
  std::vector<int> index_of;            // by rank
  int host = 0;                         // this rank's
  int my_index = 0;
  int num_teams = 0;
};

}  // namespace lockstep
