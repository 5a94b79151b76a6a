// Parts of a run: how each is taken apart into tensors and JSON, and put together again.
//
// Putting together has two steps, so that nothing is changed if something does not fit: a part says
// which tensors it wants filled, and does the rest when they are.
#pragma once

#include <lockstep/amp.h>
#include <lockstep/checkpoint.h>
#include <lockstep/data.h>
#include <lockstep/optim.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/json.h"

namespace lockstep {

// Of state.json. A version that adds keys gives them defaults, so that older files load; one that
// older programs would misread gets the next number.
inline constexpr int kStateVersion = 1;

struct Snapshot {
  std::vector<NamedTensor> tensors = {};
  std::set<std::string> buffers = {};  // which of them are a module's: rank 0's are saved
  Json values = Json::object();        // by part
};

struct Wish {
  std::vector<NamedTensor> tensors = {};
  std::function<void()> finish = [] {};
  std::vector<std::string> differences = {};  // a line each; what differs is not wished for
};

struct Part {
  std::string name;
  bool has_values = false;
  std::function<void(Snapshot& snapshot)> save;
  std::function<Wish(const Json& values)> load;  // throws Json::exception, UsageError
};

Part part_of(std::function<std::vector<NamedTensor>()> tensors, const std::string& name);
Part part_of(const std::shared_ptr<torch::nn::Module>& model, const std::string& name);
Part part_of(torch::optim::Optimizer& optimizer, const std::string& name);
Part part_of(optim::Schedule& schedule, const std::string& name);
Part part_of(GradScaler& scaler, const std::string& name);
Part part_of(std::function<SamplerState()> state,
             std::function<void(const SamplerState&)> load_state, const std::string& name);
Part part_of(const std::string& name, std::function<std::string()> save,
             std::function<void(const std::string&)> load);
// What is not a tensor is read whole: it must fit.
void refuse_large(std::size_t bytes);
// The random generators of all ranks. Collective when it is saved.
Part random_part(const World& world);

}  // namespace lockstep
