// The state of LibTorch's optimizers: options of each group as JSON, and for each parameter, by its
// place, its numbers as JSON and its tensors by name.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <map>
#include <optional>
#include <utility>

#include "base/text.h"
#include "checkpoint/masters.h"
#include "checkpoint/parts.h"
#include "checkpoint/sharing.h"
#include "optim/kinds.h"

namespace lockstep {
namespace {

namespace to = torch::optim;

template <typename Kind>
void save(to::Optimizer& optimizer, const std::string& name, Snapshot& snapshot) {
  Json groups = Json::array();
  Json states = Json::array();
  for (auto& group : optimizer.param_groups()) {
    Json options = Json::object();
    Kind::options(static_cast<typename Kind::Options&>(group.options()),
                  [&](const char* key, const auto& value) { options[key] = value; });
    groups.push_back({{"options", options}, {"parameters", group.params().size()}});
    for (const at::Tensor& parameter : group.params()) {
      const std::size_t place = states.size();
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) {
        states.push_back(nullptr);
        continue;
      }
      auto& state = static_cast<typename Kind::State&>(*found->second);
      Json kept = {{"tensors", Json::object()}};
      Kind::numbers(state, [&](const char* key, const auto& value) { kept[key] = value; });
      Kind::tensors(state, [&](const char* key, const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        kept["tensors"][key] = parameter.sizes().vec();
        snapshot.tensors.push_back({text::format("{}.{}.{}", name, place, key), tensor});
      });
      states.push_back(std::move(kept));
    }
  }
  snapshot.values[name] = {{"kind", Kind::kName}, {"groups", groups}, {"states", states}};
  save_masters(optimizer, name, snapshot);
}

// States that were made before anybody waits for them: of parameters, by their names.
using Prepared = std::map<std::pair<const c10::TensorImpl*, std::string>, at::Tensor>;

template <typename Kind>
void prepare(to::Optimizer& optimizer, Prepared& prepared) {
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const typename Kind::Options&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (!is_plain(parameter)) continue;
      for (const std::string& key : Kind::used(options)) {
        prepared[{parameter.unsafeGetTensorImpl(), key}] =
            at::zeros_like(parameter.detach(), state_type(optimizer, parameter));
      }
    }
  }
}

// Each is used once.
at::Tensor take(Prepared& prepared, const at::Tensor& parameter, const std::string& key,
                at::ScalarType type) {
  const auto found = prepared.find({parameter.unsafeGetTensorImpl(), key});
  if (found == prepared.end() || !is_plain(parameter)) return {};
  const at::Tensor state = std::move(found->second);
  prepared.erase(found);
  return state.scalar_type() == type ? state : at::Tensor();
}

template <typename Kind>
Wish load(to::Optimizer& optimizer, const std::string& name, const Json& values,
          Prepared& prepared) {
  using State = typename Kind::State;
  if (values.at("kind") != Kind::kName) {
    return {.differences = {text::format("{}: {} in the file, {} here", name,
                                         values.at("kind").get<std::string>(), Kind::kName)}};
  }
  const Json& groups = values.at("groups");
  auto& mine = optimizer.param_groups();
  bool is_same = groups.size() == mine.size();
  std::size_t total = 0;
  for (std::size_t i = 0; is_same && i < mine.size(); ++i) {
    is_same = groups[i].at("parameters") == mine[i].params().size();
    total += mine[i].params().size();
  }
  if (!is_same || values.at("states").size() != total) {
    return {.differences = {
                text::format("{}: other groups, or other numbers of parameters, here", name)}};
  }
  Wish wish;
  auto options = std::make_shared<std::vector<typename Kind::Options>>();
  auto states = std::make_shared<std::vector<std::unique_ptr<State>>>();
  for (auto& group : mine) {
    const Json& kept_options = groups[options->size()].at("options");
    options->push_back(static_cast<const typename Kind::Options&>(group.options()));
    // An option that a later version has added keeps the value that it has here.
    Kind::options(options->back(), [&](const char* key, auto& value) {
      if (kept_options.contains(key)) kept_options.at(key).get_to(value);
    });
    for (const at::Tensor& parameter : group.params()) {
      const Json& kept = values["states"][states->size()];
      const std::size_t place = states->size();
      states->push_back(kept.is_null() ? nullptr : std::make_unique<State>());
      if (kept.is_null()) continue;
      bool is_alike = true;
      for (const auto& [key, sizes] : kept.at("tensors").items()) {
        is_alike &= parameter.sizes() == sizes.template get<std::vector<std::int64_t>>();
      }
      if (!is_alike) {
        wish.differences.push_back(
            text::format("{}.{}: a state of another shape than its parameter's", name, place));
        states->back().reset();
        continue;
      }
      State& state = *states->back();
      Kind::numbers(state, [&](const char* key, auto& value) { kept.at(key).get_to(value); });
      Kind::tensors(state, [&](const char* key, at::Tensor& tensor) {
        const auto found = kept.at("tensors").find(key);
        if (found == kept.at("tensors").end()) return;
        const at::ScalarType type = state_type(optimizer, parameter);
        tensor = take(prepared, parameter, key, type);
        if (!tensor.defined()) tensor = make_state(parameter, key, type, wish);
        wish.tensors.push_back({text::format("{}.{}.{}", name, place, key), tensor});
      });
    }
  }
  wish.finish = [&optimizer, options, states] {
    std::size_t place = 0;
    std::size_t index = 0;
    for (auto& group : optimizer.param_groups()) {
      static_cast<typename Kind::Options&>(group.options()) = (*options)[index++];
      for (const at::Tensor& parameter : group.params()) {
        auto& state = (*states)[place++];
        if (state) {
          optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
        } else {
          optimizer.state().erase(parameter.unsafeGetTensorImpl());
        }
      }
    }
  };
  prepared.clear();
  load_masters(optimizer, name, values, wish);
  return wish;
}

template <typename Kind>
Part make_part(to::Optimizer& optimizer, const std::string& name) {
  const auto prepared = std::make_shared<Prepared>();
  return {
      .name = name,
      .has_values = true,
      .save = [&optimizer, name](Snapshot& all) { save<Kind>(optimizer, name, all); },
      .load = [&optimizer, name, prepared](
                  const Json& values) { return load<Kind>(optimizer, name, values, *prepared); },
      .prepare = [&optimizer, prepared] { prepare<Kind>(optimizer, *prepared); }};
}

}  // namespace

Part part_of(torch::optim::Optimizer& optimizer, const std::string& name) {
  std::optional<Part> part;
  optim::with_kind(optimizer,
                   [&](auto kind) { part = make_part<decltype(kind)>(optimizer, name); });
  if (part) return *part;
  throw UsageError({.operation = "checkpoint"},
                   text::format("The optimizer '{}' is of a kind that checkpoints do not know.\n"
                                "AdamW, Adam, SGD, RMSprop and Adagrad can be saved; anything else "
                                "with add(name, save, load).",
                                name));
}

}  // namespace lockstep
