// World::join: from the variables of a launcher to an engine that connects all ranks.

#include <ATen/Parallel.h>
#include <lockstep/error.h>
#include <lockstep/world.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>

#include "base/env.h"
#include "base/gauges.h"
#include "base/log.h"
#include "base/text.h"
#include "collective/leaves.h"
#include "engine/engines.h"
#include "engine/hosts.h"
#include "shm/board.h"
#include "world/environment.h"
#include "world/membership.h"
#include "world/rendezvous.h"
#include "world/state.h"
#include "world/store.h"
#include "world/translate.h"

namespace lockstep {
namespace {

void check(const JoinOptions& options) {
  const auto refuse = [](const std::string& message) {
    throw UsageError({.operation = "join"}, message);
  };
  if (options.timeout.count() <= 0 || options.join_timeout.count() <= 0) {
    refuse(
        text::format("JoinOptions has timeout {} ms and join_timeout {} ms.\nMake both positive.",
                     options.timeout.count(), options.join_timeout.count()));
  }
  if (options.rank.has_value() != options.size.has_value() ||
      options.rank.has_value() != static_cast<bool>(options.store)) {
    refuse(
        "JoinOptions has some of rank, size and store, but not all three.\n"
        "Give all of them, or none and start the program with a launcher.");
  }
  if (options.rank && (*options.size < 1 || *options.rank < 0 || *options.rank >= *options.size)) {
    refuse(text::format("JoinOptions has rank {} of size {}.\nRanks are 0 to size - 1.",
                        *options.rank, *options.size));
  }
}

// Where a launcher has put this process. A program that knows its place itself may have none.
Placement launched_as(const JoinOptions& options, const Environment& environment) {
  try {
    return read_placement(environment);
  } catch (const UsageError&) {
    if (!options.rank) throw;
    return {};
  }
}

Placement placement_from(const JoinOptions& options, const Placement& launched) {
  if (!options.rank) return launched;
  const bool has_launcher = launched.launcher != Placement().launcher;
  Placement placement;
  placement.rank = *options.rank;
  placement.size = *options.size;
  placement.launcher = has_launcher ? launched.launcher : "the program itself";
  return placement;
}

// The same on all ranks, or the rendezvous says so.
int num_logical_from(const JoinOptions& options, const Environment& environment, int size) {
  const int asked = options.logical_ranks != 0
                        ? options.logical_ranks
                        : environment.get_int("LOCKSTEP_LOGICAL_RANKS").value_or(0);
  if (asked == 0 || (asked >= size && asked <= collective::kMaxLeaves)) return asked;
  throw UsageError(
      {.operation = "join"},
      text::format("{} logical ranks were asked for, with {} rank{}.\nAsk for as many as there are "
                   "ranks at least, and {} at most (JoinOptions::logical_ranks, or the variable "
                   "LOCKSTEP_LOGICAL_RANKS).",
                   asked, size, size == 1 ? "" : "s", collective::kMaxLeaves));
}

// 0 where they are the program's own affair.
int num_threads_from(const JoinOptions& options, const Environment& environment, int num_logical) {
  const int asked = options.threads != 0 ? options.threads
                                         : environment.get_int("LOCKSTEP_THREADS", 1).value_or(0);
  if (asked < 0 || (options.threads != 0 && num_logical == 0)) {
    throw UsageError(
        {.operation = "join"},
        text::format("{} threads were asked for{}.\nJoinOptions::threads is 1 or more, for logical "
                     "ranks; without these, use at::set_num_threads().",
                     asked, num_logical == 0 ? " without logical ranks" : ""));
  }
  return num_logical == 0 ? 0 : std::max(asked, 1);
}

// A host that all hosts reach, also those of a world that is a part of the launcher's.
std::string master_address(const Placement& launched) {
  if (const auto* tcp = std::get_if<TcpAddress>(&launched.store)) return tcp->host;
  const auto* launcher = std::get_if<LauncherSocket>(&launched.store);
  return launcher == nullptr ? std::string() : launcher->master_address;
}

std::chrono::milliseconds remaining(std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max(std::chrono::duration_cast<milliseconds>(left), milliseconds(1));
}

// A rank that joins again can reach rank 0's store of the world before, in the moment when that
// ends; then it tries once more, as long as there is time.
Rendezvous open_and_rendezvous(const JoinOptions& options, const Placement& placement,
                               const std::string& engine, const shm::SegmentName& page,
                               std::chrono::steady_clock::time_point deadline,
                               const Membership* before, OpenStore& open) {
  while (true) {
    if (before != nullptr) {  // there is one socket, which all stores of this process share
      open = OpenStore{before->store()->clone(), "this host's launcher", [] {}};
      open.store->setTimeout(remaining(deadline));
    } else {
      open = options.store ? OpenStore{options.store, "the program's own store", [] {}}
                           : open_store(placement, remaining(deadline));
    }
    try {
      return hold_rendezvous(open, placement, engine, page, remaining(deadline));
    } catch (const StoreLost&) {
      const bool may_retry = std::holds_alternative<TcpAddress>(placement.store) &&
                             placement.rank != 0 && std::chrono::steady_clock::now() < deadline;
      if (!may_retry) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
}

// On a connection of its own, made when it is first used: nobody else's question is in the way.
shm::CourierStore courier_store(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto own = std::make_shared<c10::intrusive_ptr<c10d::Store>>();
  const auto open = [store, own]() -> c10d::Store& {
    if (!*own) *own = store->clone();
    return **own;
  };
  return {
      .set = [open](const std::string& key, const std::string& value) { open().set(key, value); },
      .get =
          [open](const std::string& key) {
            return open().check({key}) ? open().get_to_str(key) : std::string();
          },
      .add = [open](const std::string& key, std::int64_t value) { return open().add(key, value); }};
}

// Of the board that all engines of this world share.
std::shared_ptr<shm::BoardChannel> make_channel(shm::Segment page, const EngineContext& context,
                                                const c10::intrusive_ptr<c10d::Store>& store) {
  shm::BoardOptions options{.rank = context.rank, .store = courier_store(store)};
  const Member& self = context.members[static_cast<std::size_t>(context.rank)];
  for (const Member& member : context.members) {
    auto& its_page = options.pages.emplace_back();
    if (!are_on_one_host(member, self)) continue;
    its_page = shm::SegmentName{.owner = {.pid = member.pid, .start_time = member.start_time},
                                .fd = member.page_fd,
                                .inode = member.page_inode,
                                .bytes = page.size(),
                                .address = member.page_address};
  }
  return std::make_shared<shm::BoardChannel>(
      std::make_shared<shm::Board>(std::move(page), std::move(options)), "world", "the world");
}

void announce(const Log& log, const EngineContext& context, const Choice& choice) {
  if (context.rank != 0 || context.size() == 1) return;
  const Hosts hosts(context.members);
  log.info("{} ranks on {} host{}, started by {}; engine: {} ({})", context.size(), hosts.size(),
           hosts.size() == 1 ? "" : "s", context.launcher, choice.name, choice.reason);
}

}  // namespace

World World::join(const JoinOptions& options) {
  check(options);
  const Environment environment = Environment::of_process();
  const Placement launched = launched_as(options, environment);
  Placement placement = placement_from(options, launched);
  placement.num_logical = num_logical_from(options, environment, placement.size);
  placement.num_threads = num_threads_from(options, environment, placement.num_logical);
  auto state =
      placement.is_newcomer ? wait_as_newcomer(options, placement) : join_as(options, placement);
  if (placement.num_threads > 0) at::set_num_threads(placement.num_threads);
  return World(std::move(state));
}

// A world of one, whose engine moves nothing, until Elastic::run().
std::shared_ptr<World::State> World::wait_as_newcomer(const JoinOptions& options,
                                                      const Placement& placement) {
  JoinOptions alone = options;
  alone.engine = "solo";
  Placement nowhere = placement;
  nowhere.store = InProcess{};
  nowhere.notice_fd.reset();
  auto state = join_as(alone, nowhere);
  state->engine = options.engine;
  state->generation = -1;
  state->is_waiting = true;
  const auto gauges = Gauges::of_process();
  gauges->set_place(-1, 0, -1);
  gauges->set(Doing::kStarting);
  state->membership = std::make_shared<Membership>(
      open_store(placement, options.join_timeout).store, *placement.notice_fd, options, placement);
  return state;
}

void World::move_to(const NextGeneration& next) const {
  const std::shared_ptr<Membership> membership = state_->membership;
  Placement placement = membership->placement();
  placement.rank = next.rank;
  placement.size = next.size;
  placement.generation = next.number;
  placement.notice_fd.reset();  // it is known
  const auto fresh = join_as(membership->options(), placement, membership);
  fresh->seed = state_->seed;  // of the run
  fresh->generation = next.number;
  state_->replace_by(*fresh);
}

// `before`: of an elastic job that is in its next generation; else null.
std::shared_ptr<World::State> World::join_as(const JoinOptions& options, const Placement& placement,
                                             const std::shared_ptr<Membership>& before) {
  const auto deadline = std::chrono::steady_clock::now() + options.join_timeout;
  const Environment environment = Environment::of_process();
  const Log log(placement.rank);  // before anybody is told of this rank: it may throw
  const std::string engine = options.engine == "auto"
                                 ? environment.get("LOCKSTEP_ENGINE").value_or("auto")
                                 : options.engine;
  OpenStore open;
  std::optional<shm::Segment> page;
  if (placement.size > 1) page.emplace(shm::Board::make_page());
  const Rendezvous rendezvous =
      open_and_rendezvous(options, placement, engine, page ? page->name() : shm::SegmentName(),
                          deadline, before.get(), open);

  auto state = std::make_shared<State>();
  state->rank = placement.rank;
  state->members = rendezvous.members;
  state->local_rank = state->self().local_rank;
  state->engine = engine;
  state->num_logical = placement.num_logical;
  state->generation = placement.generation;
  state->local_size = static_cast<int>(Hosts(rendezvous.members).with(placement.rank).size());
  state->store =
      c10::make_intrusive<c10d::PrefixStore>(rendezvous.key_prefix + "/user", open.store);

  state->membership = before;
  if (placement.notice_fd) {
    state->membership =
        std::make_shared<Membership>(open.store, *placement.notice_fd, options, placement);
  }

  EngineContext context;
  if (const auto& membership = state->membership) {
    context.has_ended = [membership, generation = placement.generation] {
      return membership->has_ended(generation);
    };
  }
  context.rank = placement.rank;
  context.members = rendezvous.members;
  context.store =
      c10::make_intrusive<c10d::PrefixStore>(rendezvous.key_prefix + "/engine", open.store);
  context.connect_timeout = remaining(deadline);
  context.timeout = options.timeout;
  context.master_address =
      master_address(options.rank ? launched_as(options, environment) : placement);
  context.communicator = options.communicator;
  context.launcher = rendezvous.launcher;
  if (page) {
    context.channel = make_channel(
        std::move(*page), context,
        c10::make_intrusive<c10d::PrefixStore>(rendezvous.key_prefix + "/board", open.store));
  }
  Choice choice;
  try {
    choice = choose_engine(engine, context);
    state->backend = make_engine(choice.name, context);
    state->traits = traits_of(*state->backend);
  } catch (...) {
    rethrow_translated(std::current_exception(), state->members, placement.rank, "join",
                       text::format("the engine '{}'", engine));
  }
  open.store->setTimeout(options.timeout);
  state->context = context;
  state->context.connect_timeout = options.join_timeout;
  const auto gauges = Gauges::of_process();
  gauges->set_place(placement.rank, placement.size, placement.generation);
  if (!before) gauges->set(Doing::kComputing);  // else Elastic knows when it is
  if (!before) announce(log, context, choice);
  return state;
}

}  // namespace lockstep
