// Worlds made of a world: its duplicates, and the parts that split() cuts it into. Each has an
// engine of its own, which finds its ranks in its own part of the store.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "base/purpose.h"
#include "base/text.h"
#include "engine/engines.h"
#include "engine/hosts.h"
#include "shm/board.h"
#include "world/state.h"
#include "world/translate.h"

namespace lockstep {

struct World::Derived {
  const char* operation;  // that makes it
  std::vector<Member> members;
  int rank = 0;  // this one's place there
  int local_rank = 0;
  int local_size = 1;
  std::string engine;  // to be made
  std::string key;     // that no other world made of this one has
  std::string label;
  int num_logical = 0;  // a part of a world has none
};

World World::derive(Derived part) const {
  auto state = std::make_shared<State>();
  state->rank = part.rank;
  state->members = std::move(part.members);
  state->engine = state_->engine;
  state->num_logical = part.num_logical;
  state->seed = state_->seed;
  state->generation = state_->generation;
  state->membership = state_->membership;
  state->local_rank = part.local_rank;
  state->local_size = part.local_size;
  state->store = c10::make_intrusive<c10d::PrefixStore>(part.key, state_->store);
  state->context = state_->context;
  state->context.rank = state->rank;
  state->context.members = state->members;
  state->context.store = c10::make_intrusive<c10d::PrefixStore>(part.key, state_->context.store);
  if (const auto& channel = state_->context.channel) {
    state->context.channel = std::make_shared<shm::BoardChannel>(
        channel->board(), text::format("{}/{}", channel->name(), part.key), part.label);
  }
  try {
    state->backend = make_engine(part.engine, state->context);
    state->traits = traits_of(*state->backend);
    // A rank alone takes any device, also where its world does not: a part computes where that
    // does.
    if (state->size() == 1) state->traits.takes_devices = state_->traits.takes_devices;
  } catch (...) {
    rethrow_translated(std::current_exception(), state->members, state->rank, part.operation,
                       text::format("the engine '{}'", part.engine));
  }
  return World(std::move(state));
}

World World::duplicate(const std::string& label) const {
  // A rank that makes another call meets this one here, not in the store.
  const PurposeScope purpose(Purpose::kDuplicate);
  barrier();
  // All ranks derive worlds in the same order, so the number is the same on all.
  const int number = state_->num_derived++;
  return derive(
      {.operation = "duplicate",
       .members = state_->members,
       .rank = rank(),
       .local_rank = local_rank(),
       .local_size = local_size(),
       .engine = backend()->getBackendName(),
       .key = text::format("duplicate{}", number),
       .label = label.empty() ? text::format("duplicate {} of {}", number, label_of()) : label,
       .num_logical = state_->num_logical});
}

std::optional<World> World::split(std::optional<int> color, int key,
                                  const std::string& label) const {
  const PurposeScope purpose(Purpose::kSplit);
  // All ranks learn what all have asked for, so that a bad one is an error of all of them.
  at::Tensor mine = at::empty({3}, at::kInt);
  mine[0] = color ? 1 : 0;
  mine[1] = color.value_or(0);
  mine[2] = key;
  const at::Tensor all = all_gather(mine);
  const auto numbers = all.accessor<int, 2>();
  std::vector<std::pair<int, int>> chosen;  // key and rank
  for (int peer = 0; peer < size(); ++peer) {
    const auto& of_peer = numbers[peer];
    if (of_peer[1] < 0 || of_peer[2] < 0) throw_bad_split(peer, of_peer[1], of_peer[2]);
    if (color && of_peer[0] == 1 && of_peer[1] == *color) chosen.emplace_back(of_peer[2], peer);
  }
  const int number = state_->num_derived++;
  if (!color) return std::nullopt;
  std::ranges::sort(chosen);
  Derived part{.operation = "split",
               .members = {},
               .engine = {},
               .key = text::format("split{}.{}", number, *color),
               .label = label.empty() ? text::format("part {} of {}", *color, label_of()) : label};
  for (const auto& [_, peer] : chosen) {
    if (peer == rank()) part.rank = static_cast<int>(part.members.size());
    part.members.push_back(state_->members[static_cast<std::size_t>(peer)]);
  }
  // Also a part of all ranks may have them in another order.
  const Hosts hosts(part.members);
  part.local_rank = hosts.index_of[static_cast<std::size_t>(part.rank)];
  part.local_size = static_cast<int>(hosts.with(part.rank).size());
  // Inside a host, the hierarchical engine is shared memory with more to do.
  const bool is_simpler = state_->engine.starts_with("hierarchical") && hosts.size() == 1;
  part.engine = is_simpler ? "shm" : state_->engine;
  return derive(std::move(part));
}

std::string World::label_of() const {
  return state_->context.channel ? state_->context.channel->label() : "the world";
}

void World::throw_bad_split(int peer, int color, int key) const {
  const int culprit = global_rank(peer);
  throw UsageError(
      {.rank = global_rank(), .peer = peer == rank() ? -1 : culprit, .operation = "split"},
      text::format("split was given {} {} on rank {}.\nGive a color of 0 or more, or "
                   "std::nullopt for a rank that belongs to no part, and a key of 0 or more.",
                   color < 0 ? "color" : "key", color < 0 ? color : key, culprit));
}

}  // namespace lockstep
