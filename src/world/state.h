// What a World holds; shared by its copies, constant after joining.
#pragma once

#include <lockstep/world.h>

#include <atomic>
#include <vector>

namespace lockstep {

struct World::State {
  int rank = 0;
  int local_size = 1;
  std::vector<Member> members;  // by rank
  c10::intrusive_ptr<c10d::Store> store;
  EngineContext context;  // of the engine, for those like it
  mutable std::atomic<int> num_duplicates{0};
  c10::intrusive_ptr<c10d::Backend> backend;  // last: it goes before the store that it uses

  const Member& self() const { return members[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(members.size()); }
};

}  // namespace lockstep
