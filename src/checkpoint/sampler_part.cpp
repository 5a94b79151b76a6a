// Where a run is in its data: of a sampler, or of a loader.
//
// Ranks are at the same place, and rank 0's is saved. Only where each rank reads shards of its own,
// they may be at different ones: then the places of all are saved.

#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/parts.h"

namespace lockstep {
namespace {

// As files name them. Those of version 0.1, which had no records, do not.
constexpr std::array<std::pair<const char*, SamplerKind>, 3> kKinds = {
    {{"samples", SamplerKind::kSamples},
     {"records", SamplerKind::kRecords},
     {"evaluation", SamplerKind::kEvaluation}}};

Json to_json(const SamplerState& state) {
  const auto* const kind =
      std::ranges::find(kKinds, state.kind, &decltype(kKinds)::value_type::second);
  Json values = {{"kind", kind->first},
                 {"seed", state.seed},
                 {"epoch", state.epoch},
                 {"consumed", state.consumed}};
  if (state.num_ranks != 0) values["num_ranks"] = state.num_ranks;
  if (state.num_shards != 0) values["num_shards"] = state.num_shards;
  return values;
}

SamplerState state_from(const Json& values) {
  const std::string text = values.value("kind", "samples");
  const auto* const kind = std::ranges::find(kKinds, text, &decltype(kKinds)::value_type::first);
  if (kind == kKinds.end()) {
    throw UsageError({.operation = "load"},
                     "Its kind of data is not known here.\nUse a newer lockstep.");
  }
  return {.seed = values.at("seed"),
          .epoch = values.at("epoch"),
          .consumed = values.at("consumed"),
          .num_ranks = values.value("num_ranks", std::int64_t{0}),
          .kind = kind->second,
          .num_shards = values.value("num_shards", std::int64_t{0})};
}

// What a sampler or loader refuses is a difference.
Wish or_difference(const std::string& name, const std::function<Wish()>& make) {
  try {
    return make();
  } catch (const UsageError& error) {
    std::string message = error.message();
    std::ranges::replace(message, '\n', ' ');
    return {.differences = {text::format("{}: {}", name, message)}};
  }
}

// Epoch and what was consumed of it.
using Place = std::pair<std::int64_t, std::int64_t>;

// While others are still in an epoch, a rank that has come to its end is there, too: after a resume
// it has no more of this epoch, and waits for them as it does now.
std::vector<Place> places_of(const std::vector<std::string>& texts) {
  std::vector<Place> places;
  std::vector<std::int64_t> ends;  // of the epochs before
  for (const std::string& text : texts) {
    const Json state = Json::parse(text);
    places.emplace_back(state.at("epoch").get<std::int64_t>(),
                        state.at("consumed").get<std::int64_t>());
    ends.push_back(state.at("last_consumed").get<std::int64_t>());
  }
  const std::int64_t first_epoch = std::ranges::min_element(places)->first;
  for (std::size_t i = 0; i < places.size(); ++i) {
    auto& [epoch, consumed] = places[i];
    if (epoch > first_epoch && consumed == 0) places[i] = {epoch - 1, ends[i]};
  }
  return places;
}

// Only it knows what fits: tried, and taken back.
void try_states(const std::function<SamplerState()>& state,
                const std::function<void(const SamplerState&)>& load_state,
                const std::vector<SamplerState>& states) {
  const SamplerState before = state();
  const auto take_back = c10::make_scope_exit([&] { load_state(before); });
  for (const SamplerState& one : states) load_state(one);
}

}  // namespace

Part part_of(std::function<SamplerState()> state,
             std::function<void(const SamplerState&)> load_state,
             std::function<void(const SamplerState&, const World&)> move, const std::string& name) {
  return {.name = name,
          .has_values = true,
          .save = [state, name](Snapshot& snapshot) { snapshot.values[name] = to_json(state()); },
          .load =
              [state, load_state = std::move(load_state), name](const Json& values) {
                return or_difference(name, [&]() -> Wish {
                  const SamplerState then = state_from(values);
                  try_states(state, load_state, {then});
                  return {.finish = [load_state, then] { load_state(then); }};
                });
              },
          .marks = marks_of<SamplerState>(state, to_json, state_from, std::move(move))};
}

Part part_of(LoaderBase& loader, const World& world, const std::string& name) {
  const auto state = [&loader] { return loader.state(); };
  const auto load_state = [&loader](const SamplerState& its) { loader.load_state(its); };
  const auto save_all = [state, world, name](Snapshot& snapshot) {
    const auto texts = gather_texts(world, [&] {
      const SamplerState mine = state();
      Json values = to_json(mine);
      values["last_consumed"] = mine.last_consumed;
      return to_text(values);
    });
    SamplerState first = state_from(Json::parse(texts.front()));
    if (first.num_ranks == 0) {
      snapshot.values[name] = to_json(first);
      return;
    }
    const std::vector<Place> places = places_of(texts);
    std::tie(first.epoch, first.consumed) = places.front();
    snapshot.values[name] = to_json(first);
    const auto is_first = [&](const Place& one) { return one == places.front(); };
    if (!std::ranges::all_of(places, is_first)) snapshot.values[name]["ranks"] = places;
  };
  const auto try_all = [=](const Json& values) -> Wish {
    SamplerState mine = state_from(values);
    std::vector<SamplerState> states = {mine};
    if (values.contains("ranks")) {
      states.clear();
      for (const auto& [epoch, consumed] : values.at("ranks").get<std::vector<Place>>()) {
        states.push_back(mine);
        states.back().epoch = epoch;
        states.back().consumed = consumed;
      }
      if (states.size() != static_cast<std::size_t>(world.size())) {
        return {.differences = {text::format(
                    "{}: saved by {} ranks, which were at different places of shards of their own, "
                    "here are {}: use as many, or a checkpoint from between two epochs",
                    name, states.size(), world.size())}};
      }
      mine = states[static_cast<std::size_t>(world.rank())];
    }
    try_states(state, load_state, states);
    return {.finish = [load_state, mine] { load_state(mine); }};
  };
  const auto load_all = [try_all, name](const Json& values) {
    return or_difference(name, [&] { return try_all(values); });
  };
  return {.name = name,
          .has_values = true,
          .is_collective = true,
          .save = save_all,
          .load = load_all,
          .marks = marks_of<SamplerState>(
              state, to_json, state_from,
              [&loader](const SamplerState& its, const World& now) { loader.move_to(now, its); })};
}

}  // namespace lockstep
