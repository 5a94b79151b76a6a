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
  std::int64_t steps = 0;  // complete ones; -1: a newcomer
  bool is_whole = true;    // nothing of a step that is not complete is in its state
};

struct StateShared {
  std::int64_t steps = 0;                 // of all ranks, from now on
  std::vector<std::int64_t> counts = {};  // the source's
  bool was_behind = false;                // this rank
  std::int64_t bytes = 0;                 // of tensors that were sent
  int num_newcomers = 0;
};

// Brings all ranks of `world` to the state of those that have completed most steps. `counts`: more
// numbers of a rank that go with its state. Parts with marks are set, not rewound. `is_filled` is
// true while this rank's state is a mixture: also afterwards if that ends by an exception.
// Collective. Throws, on all ranks: UsageError if no rank has a whole state.
StateShared share_state(const World& world, const std::vector<Part>& parts, const StateReport& mine,
                        const std::vector<std::int64_t>& counts, bool& is_filled);

}  // namespace lockstep
