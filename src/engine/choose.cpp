// The table of engines and the choice from it.

#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <array>
#include <map>

#include "base/text.h"
#include "collective/reduce.h"
#include "engine/engines.h"
#include "engine/hosts.h"

namespace lockstep {
namespace {

struct Row {
  const char* name;
  std::string (*why_not)();
  bool (*fits)(const EngineContext&);
  const char* reason;  // for `auto` to take it; none: only by name
  Backend (*make)(const EngineContext&);
};

// What can connect hosts: sends and receives of the hierarchical engine go through it.
struct WireRow {
  const char* name;
  std::string (*why_not)();
  bool (*is_preferred)(const EngineContext&);
  const char* reason;
  Backend (*make)(const EngineContext&);
};

bool is_alone(const EngineContext& context) { return context.size() == 1; }
bool can_be_reduced(const EngineContext& context) {
  return context.size() <= collective::kMaxRanks;
}
bool is_on_one_host(const EngineContext& context) {
  return context.is_one_host() && can_be_reduced(context);
}
// Neither more hosts, nor more ranks on one, than the shared-memory engine can add up.
bool has_few_hosts(const EngineContext& context) {
  constexpr auto kMost = static_cast<std::size_t>(collective::kMaxRanks);
  const Hosts hosts(context.members);
  return hosts.ranks.size() <= kMost &&
         std::ranges::all_of(hosts.ranks, [](const auto& host) { return host.size() <= kMost; });
}
bool is_always(const EngineContext&) { return true; }
std::string always_built() { return {}; }

// More ranks than GPUs are no harm: NCCL connects them only when tensors on GPUs are exchanged.
bool has_gpus(const EngineContext& context) {
  return std::ranges::all_of(context.members,
                             [](const Member& member) { return member.num_gpus > 0; });
}

// In the order of preference: `hierarchical` takes the first that is built and preferred.
constexpr std::array kWires = {
    WireRow{"mpi", why_no_mpi, has_started_ranks_by_mpi,
            "with the MPI between them that started them", make_mpi},
    WireRow{"gloo", why_no_gloo, is_always, "with Gloo between them", make_gloo},
};

const WireRow* preferred_wire(const EngineContext& context) {
  const auto found = std::ranges::find_if(kWires, [&](const WireRow& row) {
    return row.why_not().empty() && row.is_preferred(context);
  });
  return found == kWires.end() ? nullptr : &*found;
}
std::string why_no_wire() {
  for (const WireRow& row : kWires) {
    if (row.why_not().empty()) return {};
  }
  return kWires.back().why_not();
}
Backend make_preferred_hierarchical(const EngineContext& context) {
  const WireRow* wire = preferred_wire(context);
  if (wire == nullptr) throw_not_built(context.global_rank(), "hierarchical", why_no_wire());
  return make_hierarchical(context, wire->name);
}

Backend make_nccl_and(const EngineContext& context);

// In the order of preference: `auto` takes the first that is built and fits.
constexpr std::array kTable = {
    Row{"solo", always_built, is_alone, "a world of one", make_solo},
    Row{"nccl", why_no_nccl, has_gpus, "every rank sees a GPU", make_nccl_and},
    Row{"shm", always_built, is_on_one_host, "all ranks are on one host", make_shm},
    Row{"hierarchical", why_no_wire, has_few_hosts, "several hosts", make_preferred_hierarchical},
    Row{"gloo", why_no_gloo, is_always, "more than 64 hosts, or 64 ranks on one", make_gloo},
    Row{"mpi", why_no_mpi, can_be_reduced, nullptr, make_mpi},
};

constexpr std::string_view kHierarchicalOver = "hierarchical:";

std::map<std::string, Backend (*)(const EngineContext&)>& engines_for_tests() {
  static std::map<std::string, Backend (*)(const EngineContext&)> engines;
  return engines;
}

// With what `auto` would be without GPUs.
Backend make_nccl_and(const EngineContext& context) {
  EngineContext without = context;
  without.store = c10::make_intrusive<c10d::PrefixStore>("cpu", context.store);
  for (Member& member : without.members) member.num_gpus = 0;
  return make_nccl(context, make_engine("auto", without));
}

}  // namespace

bool EngineContext::is_one_host() const { return Hosts(members).size() <= 1; }

bool EngineContext::is_one_network() const {
  return std::ranges::all_of(members, [&](const Member& member) {
    return member.network_id == members.front().network_id;
  });
}

std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> result;
  for (const Row& row : kTable) result.push_back({row.name, row.why_not()});
  return result;
}

void throw_not_built(int rank, const std::string& name, const std::string& reason) {
  throw UsageError({.rank = rank, .operation = "join"},
                   text::format("The engine '{}' is not in this build: {}.\n"
                                "Build lockstep with it, or choose another engine.",
                                name, reason));
}

Choice choose_engine(const std::string& name, const EngineContext& context) {
  if (name != "auto") return {name, "as asked for"};
  for (const Row& row : kTable) {
    if (row.reason == nullptr || !row.why_not().empty() || !row.fits(context)) continue;
    if (row.make != make_preferred_hierarchical) return {row.name, row.reason};
    if (const WireRow* wire = preferred_wire(context)) {
      return {text::format("{}{}", kHierarchicalOver, wire->name),
              text::format("{}, {}", row.reason, wire->reason)};
    }
  }
  throw_not_built(context.global_rank(), "gloo",
                  why_no_gloo());  // the only one that fits more than one
}

Backend make_wire_engine(const std::string& name, const EngineContext& context) {
  for (const WireRow& row : kWires) {
    if (name == row.name) return row.make(context);
  }
  throw UsageError(
      {.rank = context.global_rank(), .operation = "join"},
      text::format("The engine '{}' cannot connect hosts.\nChoose 'hierarchical'.", name));
}

void add_engine_for_tests(const std::string& name, Backend (*make)(const EngineContext&)) {
  engines_for_tests()[name] = make;
}

Backend make_engine(const std::string& asked_for, const EngineContext& context) {
  const std::string name = choose_engine(asked_for, context).name;
  if (const auto found = engines_for_tests().find(name); found != engines_for_tests().end()) {
    return found->second(context);
  }
  const bool is_over = name.starts_with(kHierarchicalOver);
  std::string known;
  for (const Row& row : kTable) {
    if (name == row.name || (is_over && row.make == make_preferred_hierarchical)) {
      if (!row.why_not().empty()) throw_not_built(context.global_rank(), name, row.why_not());
      if (!row.fits(context)) {
        throw UsageError({.rank = context.global_rank(), .operation = "join"},
                         text::format("The engine '{}' cannot connect these {} ranks.\n"
                                      "Choose another, or \"auto\".",
                                      name, context.size()));
      }
      return is_over ? make_hierarchical(context, name.substr(kHierarchicalOver.size()))
                     : row.make(context);
    }
    known += text::format("{}{}", known.empty() ? "" : ", ", row.name);
  }
  throw UsageError({.rank = context.global_rank(), .operation = "join"},
                   text::format("There is no engine '{}'.\nChoose one of: auto, {}.", name, known));
}

}  // namespace lockstep
