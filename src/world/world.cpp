#include <lockstep/world.h>

#include "world/state.h"

namespace lockstep {

int World::rank() const { return state_->rank; }
int World::size() const { return state_->size(); }
int World::global_rank(int rank) const {
  return rank < 0 ? rank : state_->members.at(static_cast<std::size_t>(rank)).rank;
}
int World::local_rank() const { return state_->local_rank; }
int World::local_size() const { return state_->local_size; }
const std::string& World::host() const { return state_->self().host; }
const std::vector<Member>& World::members() const { return state_->members; }
const c10::intrusive_ptr<c10d::Backend>& World::backend() const { return state_->backend; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return state_->store; }

}  // namespace lockstep
