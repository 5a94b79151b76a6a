// What a World holds; shared by its copies. Constant after joining; in an elastic job it becomes
// that of the next generation, in place, while no call of the world is under way.
#pragma once

#include <lockstep/world.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/engines.h"
#include "world/unfinished.h"

namespace lockstep {

class Membership;

struct World::State {
  int rank = 0;
  int local_rank = 0;
  int local_size = 1;
  std::vector<Member> members;  // by rank
  std::string engine;           // as asked for: what a part of this world is made with
  int num_logical = 0;          // logical ranks; 0: each rank plays itself
  c10::intrusive_ptr<c10d::Store> store;
  EngineContext context;  // of the engine, for those like it
  mutable std::atomic<int> num_derived{0};
  // Of the run; shared with the worlds that are made of this one.
  std::shared_ptr<std::atomic<std::uint64_t>> seed =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  int generation = 0;                      // of an elastic job
  bool is_waiting = false;                 // a newcomer that the others have not taken in yet
  std::shared_ptr<Membership> membership;  // null: the job is not elastic
  // On devices, of calls that nobody waits for any more.
  std::shared_ptr<UnfinishedWorks> unfinished = std::make_shared<UnfinishedWorks>();
  Traits traits;                              // of the backend
  c10::intrusive_ptr<c10d::Backend> backend;  // last: it goes before the store that it uses

  // The engine of before ends when its last user does.
  void replace_by(State& next) {
    rank = next.rank;
    local_rank = next.local_rank;
    local_size = next.local_size;
    members = std::move(next.members);
    engine = std::move(next.engine);
    num_logical = next.num_logical;
    backend = std::move(next.backend);
    store = std::move(next.store);
    context = std::move(next.context);
    num_derived = next.num_derived.load();
    seed = std::move(next.seed);
    generation = next.generation;
    is_waiting = next.is_waiting;
    membership = std::move(next.membership);
    unfinished = std::move(next.unfinished);
    traits = next.traits;
  }

  const Member& self() const { return members[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(members.size()); }
};

}  // namespace lockstep
