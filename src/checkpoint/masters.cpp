#include "checkpoint/masters.h"

#include <ATen/ATen.h>

#include "base/text.h"
#include "checkpoint/sharing.h"
#include "ddp/shards.h"

namespace lockstep {
namespace {

bool has_master(const optim::MasterWeights* masters, const at::Tensor& parameter) {
  return masters && masters->uses_master_weights() &&
         (parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16);
}

std::string name_of(const std::string& optimizer, std::size_t place) {
  return text::format("{}.{}.master", optimizer, place);
}

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

}  // namespace

at::ScalarType state_type(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  return has_master(dynamic_cast<optim::MasterWeights*>(&optimizer), parameter)
             ? at::kFloat
             : parameter.scalar_type();
}

void save_masters(torch::optim::Optimizer& optimizer, const std::string& name, Snapshot& snapshot) {
  const auto* const masters = dynamic_cast<optim::MasterWeights*>(&optimizer);
  if (!masters || !masters->uses_master_weights()) return;
  Json places = Json::array();
  const std::vector<at::Tensor> parameters = parameters_of(optimizer);
  for (std::size_t place = 0; place < parameters.size(); ++place) {
    const at::Tensor master = masters->master_of(parameters[place]);
    if (!master.defined()) continue;
    places.push_back(place);
    snapshot.tensors.push_back({name_of(name, place), master});
  }
  snapshot.values[name]["masters"] = places;
}

void load_masters(torch::optim::Optimizer& optimizer, const std::string& name, const Json& values,
                  Wish& wish) {
  auto* const masters = dynamic_cast<optim::MasterWeights*>(&optimizer);
  const bool is_used = masters && masters->uses_master_weights();
  if (is_used != values.contains("masters")) {
    wish.differences.push_back(text::format(
        "{}: {}", name,
        is_used ? "the file has no master weights, and use_master_weights() was called"
                : "the file has master weights, and use_master_weights() was not called"));
  }
  if (!is_used || !values.contains("masters")) return;
  const std::vector<at::Tensor> parameters = parameters_of(optimizer);
  struct LoadedMaster {
    at::Tensor parameter;
    at::Tensor master;
    std::shared_ptr<bool> fits;  // of slices: what all ranks have found out
  };
  std::vector<LoadedMaster> loaded;
  for (const auto place : values.at("masters").get<std::vector<std::size_t>>()) {
    if (place >= parameters.size() || !has_master(masters, parameters[place])) {
      wish.differences.push_back(
          text::format("{}: the file has master weights, and it is no parameter of 16 bits here",
                       name_of(name, place)));
      continue;
    }
    const at::Tensor& parameter = parameters[place];
    const std::size_t num_sliced = wish.sliced.size();
    const at::Tensor master = make_state(parameter, Shards::kMaster, at::kFloat, wish);
    std::shared_ptr<bool> fits;
    if (wish.sliced.size() > num_sliced) {
      fits = wish.sliced.back().fits_parameter = std::make_shared<bool>(false);
    }
    loaded.push_back({parameter, master, fits});
    wish.tensors.push_back({name_of(name, place), master});
  }
  wish.finish = [masters, loaded, finish_rest = std::move(wish.finish)] {
    finish_rest();
    for (const auto& [parameter, master, fits] : loaded) {
      // What does not fit the weights was not loaded, or these were not: the next step makes it.
      if (fits ? *fits : master.to(parameter.scalar_type()).equal(parameter)) {
        masters->set_master(parameter, master);
      }
    }
  };
}

}  // namespace lockstep
