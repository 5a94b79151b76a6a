// Peers: the ranks of a group as this one sees them: their memory and their processes.
//
// Threading: constant after construction.
#pragma once

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
  bool has_core_for_each = false;  // together the ranks may use as many cores

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
  Channel& channel(int from, int to) const {
    std::byte* first = segments[static_cast<std::size_t>(from)].data() + kChannelsOffset;
    return *reinterpret_cast<Channel*>(first + static_cast<std::size_t>(to) * sizeof(Channel));
  }
  const ProcessId& process(int peer) const { return processes[static_cast<std::size_t>(peer)]; }

  // Wakes all others that sleep.
  void ring_all() const {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) ring(control(peer));
    }
  }
};

}  // namespace lockstep::shm
