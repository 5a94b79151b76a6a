#include <lockstep/world.h>

#include "collective/leaves.h"
#include "world/state.h"

namespace lockstep {

int World::rank() const { return state_->rank; }
int World::size() const { return state_->size(); }
int World::global_rank(int rank) const {
  return rank < 0 ? rank : state_->members.at(static_cast<std::size_t>(rank)).rank;
}
int World::local_rank() const { return state_->local_rank; }
int World::local_size() const { return state_->local_size; }
bool World::has_logical_ranks() const { return state_->num_logical > 0; }
int World::logical_size() const { return has_logical_ranks() ? state_->num_logical : size(); }
LogicalRanks World::logical_ranks() const {
  const collective::Leaves mine = collective::leaves_of(rank(), size(), logical_size());
  return {.first = mine.first, .count = mine.count};
}
std::uint64_t World::seed() const { return *state_->seed; }
void World::set_seed(std::uint64_t seed) const { *state_->seed = seed; }
const std::string& World::host() const { return state_->self().host; }
const std::vector<Member>& World::members() const { return state_->members; }
bool World::is_elastic() const { return state_->membership != nullptr; }
int World::generation() const { return state_->generation; }
bool World::is_waiting() const { return state_->is_waiting; }
const std::shared_ptr<Membership>& World::membership() const { return state_->membership; }
const c10::intrusive_ptr<c10d::Backend>& World::backend() const { return state_->backend; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return state_->store; }

}  // namespace lockstep
