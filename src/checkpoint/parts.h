// Parts of a run: how each is taken apart into tensors and JSON, and put together again.
//
// Putting together has two steps, so that nothing is changed if something does not fit: a part says
// which tensors it wants filled, and does the rest when they are.
#pragma once

#include <lockstep/amp.h>
#include <lockstep/averaging.h>
#include <lockstep/checkpoint.h>
#include <lockstep/data.h>
#include <lockstep/optim.h>

#include <functional>
#include <map>
#include <memory>
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
  std::map<std::string, at::Tensor> slices = {};  // what this rank has of some (ddp/slices.h)
  std::set<std::string> buffers = {};  // which of them are a module's: rank 0's are saved
  Json values = Json::object();        // by part
};

class Shards;
class Slices;

// A state that the ranks of a host have once (ddp/shards.h).
struct SharedState {
  at::Tensor tensor;
  std::shared_ptr<Shards> shards;
  std::string name;
  std::size_t slot = 0;
};

// A state of which each rank keeps a slice (ddp/slices.h). `tensor` has the sizes of the whole, and
// no memory, until it is loaded; then it is the slice.
struct SlicedState {
  at::Tensor tensor;
  std::shared_ptr<Slices> slices;
  std::size_t slot = 0;
  // Of master weights: whether the parameter, as it was loaded, is their rounding.
  std::shared_ptr<bool> fits_parameter = {};
};

struct Wish {
  std::vector<NamedTensor> tensors = {};
  std::vector<SharedState> shared = {};       // of these: without memory until all ranks agree
  std::vector<SlicedState> sliced = {};       // the same
  std::function<void()> finish = [] {};       // not collective
  std::function<void()> finish_own = [] {};   // of this rank alone, once all ranks have finished
  std::vector<std::string> differences = {};  // a line each; what differs is not wished for
};

// What changes in the middle of a step: Elastic goes back to it if the step is done again. Cheap:
// mark() is called after every step.
struct Marks {
  std::function<void()> mark = {};  // null: the part has none
  std::function<Json()> get = {};   // the mark, for a rank that is behind
  std::function<void(const Json&)> set = {};
  std::function<void(const World&)> rewind = {};  // to the mark; the world may have other ranks now
};

// Marks of a state that can be asked for and loaded.
template <typename State>
Marks marks_of(std::function<State()> now, std::function<Json(const State&)> to_json,
               std::function<State(const Json&)> from_json,
               std::function<void(const State&, const World&)> load) {
  const auto kept = std::make_shared<State>();
  return {.mark = [kept, now] { *kept = now(); },
          .get = [kept, to_json] { return to_json(*kept); },
          .set = [kept, from_json](const Json& values) { *kept = from_json(values); },
          .rewind = [kept, load](const World& world) { load(*kept, world); }};
}

struct Part {
  std::string name;
  bool has_values = false;
  bool is_collective = false;  // save() is, and throws on all ranks or on none
  std::function<void(Snapshot& snapshot)> save;
  std::function<Wish(const Json& values)> load;  // throws Json::exception, UsageError
  Marks marks = {};
  // Elastic gives it to ranks that are behind. Not what each rank has of its own.
  bool travels = true;
  // Asks the system for the memory that load() will fill, before others wait for it.
  std::function<void()> prepare = [] {};
};

Part part_of(std::function<std::vector<NamedTensor>()> tensors, const std::string& name);
Part part_of(const std::shared_ptr<torch::nn::Module>& model, const std::string& name);
Part part_of(torch::optim::Optimizer& optimizer, const std::string& name);
Part part_of(optim::Schedule& schedule, const std::string& name);
Part part_of(GradScaler& scaler, const std::string& name);
// Of a model that is trained with logical ranks.
Part part_of(DistributedDataParallel& ddp, const std::string& name);
Part part_of(WeightAverage& average, const std::string& name);
Part part_of(PeriodicAverager& averager, const std::string& name);
Part part_of(HierarchicalAverager& averager, const std::string& name);
// `move`: to a world whose ranks have changed.
Part part_of(std::function<SamplerState()> state,
             std::function<void(const SamplerState&)> load_state,
             std::function<void(const SamplerState&, const World&)> move, const std::string& name);
// Ranks whose shards differ are at different places.
Part part_of(LoaderBase& loader, const World& world, const std::string& name);
Part part_of(const std::string& name, std::function<std::string()> save,
             std::function<void(const std::string&)> load);
// A text of each rank. `load_others` gets all of them where there are not as many ranks any more.
using LoadText = std::function<void(const std::string& text)>;
using LoadTexts = std::function<void(const std::vector<std::string>& texts)>;
Part per_rank_part(const World& world, const std::string& name, std::function<std::string()> save,
                   LoadText load, LoadTexts load_others);
// What `save` gives on each rank, by rank. Collective; throws on all ranks what it throws on one.
std::vector<std::string> gather_texts(const World& world, const std::function<std::string()>& save);
// What is not a tensor is read whole: it must fit.
void refuse_large(std::size_t bytes);
// The random generators of all ranks. Collective when it is saved.
Part random_part(const World& world);

}  // namespace lockstep
