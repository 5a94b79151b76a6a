// HostLayout: who works with whom across hosts.
//
// The ranks of one index (engine/hosts.h), one on each host, are a team; there are as many teams as
// the smallest host has ranks. The rank with index 0 leads its host.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "engine/hosts.h"

namespace lockstep {

struct HostLayout {
  HostLayout(int its_rank, const std::vector<Member>& members)
      : rank(its_rank),
        hosts(members),
        host(hosts.host_of[static_cast<std::size_t>(rank)]),
        my_index(index(rank)),
        num_teams(static_cast<int>(std::ranges::min(hosts.ranks, {}, [](const auto& ranks) {
                                     return ranks.size();
                                   }).size())) {
    for (const Member& member : members) global_ranks.push_back(member.rank);
  }

  int num_ranks() const { return static_cast<int>(hosts.host_of.size()); }
  int num_hosts() const { return hosts.size(); }
  int global_rank(int peer) const {  // what errors call it
    return peer < 0 ? peer : global_ranks[static_cast<std::size_t>(peer)];
  }
  const std::vector<int>& here() const { return hosts.with(rank); }
  int num_here() const { return static_cast<int>(here().size()); }
  int host_of(int peer) const { return hosts.host_of[static_cast<std::size_t>(peer)]; }
  bool is_here(int peer) const { return host_of(peer) == host; }
  int index(int peer) const { return hosts.index_of[static_cast<std::size_t>(peer)]; }
  std::size_t largest_host() const {
    return std::ranges::max(hosts.ranks, {}, [](const auto& ranks) { return ranks.size(); }).size();
  }
  // The rank of a host that works for those of the others with this index.
  int helper(int on_host, int of_index) const {
    const auto& ranks = hosts.ranks[static_cast<std::size_t>(on_host)];
    return ranks[static_cast<std::size_t>(of_index) % ranks.size()];
  }
  // Whether the tree over the ranks of each host, and then over hosts, is the tree over all ranks:
  // hosts of equal size, a power of two, with ranks one behind the other.
  bool sums_in_tree() const {
    const std::size_t size = hosts.ranks.front().size();
    int next = 0;
    for (const auto& ranks : hosts.ranks) {
      if (ranks.size() != size) return false;
      for (const int one : ranks) {
        if (one != next++) return false;
      }
    }
    return std::has_single_bit(size);
  }
  bool is_leader() const { return my_index == 0; }
  bool is_in_team() const { return my_index < num_teams; }

  const int rank;
  const Hosts hosts;
  const int host;  // this rank's
  const int my_index;
  const int num_teams;
  std::vector<int> global_ranks;  // by rank
};

}  // namespace lockstep
