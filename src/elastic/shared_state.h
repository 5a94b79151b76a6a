// The state of a training in the memory of its ranks: what those that are behind, or new, are given
// by those that have it.
//
// Numbers are sent by one rank, tensors by all that have them in turns; every rank then compares
// hashes. No file and no serialised code is involved.
#pragma once

#include <lockstep/world.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/parts.h"

namespace lockstep {

// What a rank says of itself when the ranks have changed.
struct StateReport {
  std::int64_t steps = 0;    // complete ones; -1: a newcomer
  bool is_whole = true;      // nothing of a step that is not complete is in its state
  std::uint64_t layout = 0;  // what it has added to its Checkpointer, and on which platform
};

struct StateShared {
  std::int64_t steps = 0;                 // of all ranks, from now on
  std::vector<std::int64_t> counts = {};  // the source's
  bool was_behind = false;                // this rank
  std::int64_t bytes = 0;                 // of tensors that were sent
  int num_newcomers = 0;
};

// Brings all ranks of `world` to the state of those that have completed most steps. `counts`: more
// numbers of a rank that go with its state. Parts with marks are set, not rewound. Collective.
// Throws, on all ranks: UsageError if no rank has a whole state; MismatchError on a rank whose
// layout differs from the others', which are told by PeerLostError.
StateShared share_state(const World& world, const std::vector<Part>& parts, const StateReport& mine,
                        const std::vector<std::int64_t>& counts);

}  // namespace lockstep
