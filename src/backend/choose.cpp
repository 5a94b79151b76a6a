// The table of engines and the choice from it.

#include <fmt/format.h>
#include <lockstep/backend.h>
#include <lockstep/error.h>

#include <algorithm>
#include <array>

#include "backend/engines.h"
#include "shm/reduce.h"

namespace lockstep {
namespace {

struct Row {
  const char* name;
  std::string (*why_not)();
  bool (*fits)(const EngineContext&);
  Backend (*make)(const EngineContext&);
  bool is_for_auto = true;  // else only by name
};

bool is_alone(const EngineContext& context) { return context.size() == 1; }
bool can_be_reduced(const EngineContext& context) { return context.size() <= shm::kMaxRanks; }
bool is_on_one_host(const EngineContext& context) {
  return context.is_one_host() && can_be_reduced(context);
}
bool is_always(const EngineContext&) { return true; }
std::string always_built() { return {}; }

// In the order of preference: `auto` takes the first that is built and fits.
constexpr std::array kTable = {
    Row{"solo", always_built, is_alone, make_solo},
    Row{"shm", always_built, is_on_one_host, make_shm},
    Row{"gloo", why_no_gloo, is_always, make_gloo},
    Row{"mpi", why_no_mpi, can_be_reduced, make_mpi, false},
};

}  // namespace

bool EngineContext::is_one_host() const {
  return std::ranges::all_of(
      members, [&](const Member& member) { return member.host_id == members.front().host_id; });
}

std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> result;
  for (const Row& row : kTable) result.push_back({row.name, row.why_not()});
  return result;
}

void throw_not_built(int rank, const std::string& name, const std::string& reason) {
  throw UsageError({.rank = rank, .operation = "join"},
                   fmt::format("The engine '{}' is not in this build: {}.\n"
                               "Build lockstep with it, or choose another engine.",
                               name, reason));
}

Backend make_engine(const std::string& name, const EngineContext& context) {
  std::string known;
  for (const Row& row : kTable) {
    const bool is_chosen = name == "auto"
                               ? row.is_for_auto && row.why_not().empty() && row.fits(context)
                               : name == row.name;
    if (is_chosen) {
      if (!row.fits(context)) {
        throw UsageError({.rank = context.rank, .operation = "join"},
                         fmt::format("The engine '{}' cannot connect {} ranks.\n"
                                     "Choose another, or \"auto\".",
                                     name, context.size()));
      }
      return row.make(context);
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", row.name);
  }
  if (name == "auto") {
    throw_not_built(context.rank, "gloo", why_no_gloo());  // the only one that fits more than one
  }
  throw UsageError({.rank = context.rank, .operation = "join"},
                   fmt::format("There is no engine '{}'.\nChoose one of: auto, {}.", name, known));
}

}  // namespace lockstep
