// Rendezvous: how ranks find each other in a store and agree that they are one world.
//
// Every rank puts down a record of itself. Rank 0 collects them, looks for contradictions and puts
// down one verdict, which all ranks read: the members, or the first thing that went wrong. A rank
// that sees a contradiction itself puts down a complaint, which all read likewise. So all ranks
// fail with the same cause, and none waits longer than its own deadline.
#pragma once

#include <lockstep/backend.h>
#include <lockstep/error.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "shm/segment.h"
#include "world/environment.h"
#include "world/store.h"

namespace lockstep {

// The store's server went away. It may have been that of an earlier world, just ending.
struct StoreLost : PeerLostError {
  using PeerLostError::PeerLostError;
};

struct Rendezvous {
  std::vector<Member> members;  // by rank
  std::string launcher;         // what started all of them, or "several launchers"
  std::string key_prefix;       // of all keys of this world in the store
};

// `engine`: what this rank wants; ranks must want the same and have it. `page`: its page of the
// board (shm/board.h).
// Throws: MismatchError (two processes with one rank, sizes, engines, numbers of logical
// ranks or versions that differ),
// TimeoutError (names the ranks that did not come), PeerLostError (a rank died while joining).
// Throws StoreLost if the store itself failed.
Rendezvous hold_rendezvous(const OpenStore& open, const Placement& placement,
                           const std::string& engine, const shm::SegmentName& page,
                           std::chrono::milliseconds timeout);

}  // namespace lockstep
