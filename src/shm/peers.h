// Peers: the ranks of a group as this one sees them: their memory and their processes.
//
// Threading: constant after construction.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/process.h"
#include "shm/doorbell.h"
#include "shm/layout.h"
#include "shm/segment.h"

namespace lockstep::shm {

struct Peers {
  int rank = 0;  // this one
  int size = 1;
  std::vector<int> global_ranks = {};  // what errors call the ranks; empty: 0 to size - 1
  std::vector<Segment> segments = {};  // by rank, as the two below
  std::vector<Control*> controls = {};
  std::vector<ProcessId> processes = {};
  // By rank: the groups whose limits on memory it is under (segment.h).
  std::vector<std::vector<std::uint64_t>> memory_groups = {};
  bool has_core_for_each = false;  // together the ranks may use as many cores
  std::string system_root = {};    // as in SegmentOptions

  int global_rank(int peer) const {
    return global_ranks.empty() || peer < 0 ? peer : global_ranks[static_cast<std::size_t>(peer)];
  }
  int my_global_rank() const { return global_rank(rank); }

  Control& control(int peer) const { return *controls[static_cast<std::size_t>(peer)]; }
  Control& self() const { return control(rank); }
  Slot& slot(int peer, std::uint64_t number) const { return control(peer).slots[number % kSlots]; }
  std::byte* staging(int peer) const {
    return segments[static_cast<std::size_t>(peer)].data() + kStagingOffset;
  }
  const ProcessId& process(int peer) const { return processes[static_cast<std::size_t>(peer)]; }

  Channel& channel(int sender, int receiver) const {
    std::byte* segment = segments[static_cast<std::size_t>(sender)].data();
    return *reinterpret_cast<Channel*>(segment + channel_offset(receiver));
  }

  // By group: bytes that the other ranks under its limit are about to take.
  std::map<std::uint64_t, double> claimed_by_others() const {
    std::map<std::uint64_t, double> claims;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto bytes = static_cast<double>(control(peer).claimed_bytes.load());
      for (const std::uint64_t group : memory_groups[static_cast<std::size_t>(peer)]) {
        claims[group] += bytes;
      }
    }
    return claims;
  }

  // Wakes all others that sleep.
  void ring_all() const {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) ring(control(peer));
    }
  }
};

}  // namespace lockstep::shm
