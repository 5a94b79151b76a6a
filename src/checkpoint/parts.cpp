#include "checkpoint/parts.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <lockstep/error.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "checkpoint/tensors.h"

namespace lockstep {
namespace {

// More in a file is nonsense.
constexpr std::int64_t kMaxRanks = 1 << 20;
constexpr std::int64_t kMaxStateBytes = 1 << 16;
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 53;

at::Tensor get_state(const at::Generator& generator) {
  at::Generator copy = generator;
  const std::lock_guard lock(copy.mutex());
  return at::Tensor(copy.get_state());
}

// A rank that was not there when the checkpoint was made gets numbers of its own.
void set_state(at::Generator generator, const at::Tensor& states, int rank, int global_rank) {
  const std::lock_guard lock(generator.mutex());
  if (rank < states.size(0)) {
    try {
      generator.set_state(states[rank].clone());
    } catch (const c10::Error&) {
      throw UsageError({.rank = global_rank, .operation = "load"},
                       "The state of a random generator is not one of this LibTorch.\n"
                       "Load with the LibTorch that the checkpoint was made with.");
    }
  } else {
    generator.set_current_seed(
        hash_bytes(states.const_data_ptr(), states.nbytes(), static_cast<std::uint64_t>(rank)));
  }
}

// The CPU's generator, and that of the device that this rank uses (World::device), where all ranks
// have one of the same type.
using Generators = std::vector<std::pair<std::string, at::Generator>>;
Generators generators_of(const World& world) {
  Generators all = {{"random.cpu", at::globalContext().defaultGenerator(at::kCPU)}};
  const Member& self = world.members()[static_cast<std::size_t>(world.rank())];
  const auto has_device = [&](const Member& one) {
    return one.num_devices > 0 && one.device_type == self.device_type;
  };
  if (!std::ranges::all_of(world.members(), has_device)) return all;
  // More ranks than devices share them.
  const auto index = static_cast<c10::DeviceIndex>(self.device_index % self.num_devices);
  const at::Device device(at::Device(self.device_type).type(), index);
  try {
    all.emplace_back("random." + self.device_type, at::globalContext().defaultGenerator(device));
  } catch (const c10::Error&) {  // NOLINT: a device without random numbers
  }
  return all;
}

// Of one row for each rank. A generator that is not here (of a GPU) is read and not used.
bool is_plausible(const std::vector<std::int64_t>& sizes, const std::string& name,
                  const Generators& generators) {
  if (sizes.size() != 2 || sizes[0] < 1 || sizes[0] > kMaxRanks || sizes[1] < 1) return false;
  for (const auto& [its_name, generator] : generators) {
    if (its_name == name) return sizes[1] == get_state(generator).numel();
  }
  return sizes[1] <= kMaxStateBytes;
}

}  // namespace

Part part_of(std::function<std::vector<NamedTensor>()> tensors, const std::string& name) {
  const auto named = [name, tensors = std::move(tensors)] {
    std::vector<NamedTensor> all = tensors();
    for (NamedTensor& one : all) one.name = name + "." + one.name;
    return all;
  };
  return {.name = name,
          .save =
              [named](Snapshot& snapshot) {
                for (NamedTensor& one : named()) snapshot.tensors.push_back(std::move(one));
              },
          .load = [named](const Json&) { return Wish{.tensors = named()}; }};
}

Part part_of(const std::shared_ptr<torch::nn::Module>& model, const std::string& name) {
  Part part = part_of([model] { return tensors_of(*model); }, name);
  part.save = [model, name, save = std::move(part.save)](Snapshot& snapshot) {
    save(snapshot);
    for (const auto& one : model->named_buffers()) snapshot.buffers.insert(name + "." + one.key());
  };
  return part;
}

Part part_of(optim::Schedule& schedule, const std::string& name) {
  using State = optim::Schedule::State;
  const auto now = [&schedule] { return schedule.state(); };
  const auto to_json = [](const State& state) {
    return Json{{"steps", state.steps}, {"base_lrs", state.base_lrs}};
  };
  const auto from_json = [](const Json& values) -> State {
    return {.steps = values.at("steps"),
            .base_lrs = values.at("base_lrs").get<std::vector<double>>()};
  };
  return {
      .name = name,
      .has_values = true,
      .save = [now, to_json, name](Snapshot& snapshot) { snapshot.values[name] = to_json(now()); },
      .load =
          [&schedule, from_json](const Json& values) {
            const State state = from_json(values);
            schedule.check_state(state);
            return Wish{.finish = [&schedule, state] { schedule.load_state(state); }};
          },
      .marks = marks_of<State>(
          now, to_json, from_json,
          [&schedule](const State& state, const World&) { schedule.load_state(state); })};
}

Part part_of(GradScaler& scaler, const std::string& name) {
  using State = GradScaler::State;
  const auto now = [&scaler] { return scaler.state(); };
  const auto to_json = [](const State& state) {
    return Json{
        {"scale", state.scale}, {"good_steps", state.good_steps}, {"skipped", state.skipped}};
  };
  const auto from_json = [](const Json& values) -> State {
    return {.scale = values.at("scale"),
            .good_steps = values.at("good_steps"),
            .skipped = values.at("skipped")};
  };
  return {
      .name = name,
      .has_values = true,
      .save = [now, to_json, name](Snapshot& snapshot) { snapshot.values[name] = to_json(now()); },
      .load =
          [&scaler, from_json](const Json& values) {
            const State state = from_json(values);
            scaler.check_state(state);
            return Wish{.finish = [&scaler, state] { scaler.load_state(state); }};
          },
      .marks = marks_of<State>(
          now, to_json, from_json,
          [&scaler](const State& state, const World&) { scaler.load_state(state); })};
}

Part part_of(DistributedDataParallel& ddp, const std::string& name) {
  return {.name = name,
          .has_values = true,
          .save =
              [&ddp, name](Snapshot& snapshot) {
                const auto state = ddp.logical_state();
                snapshot.values[name] = {{"ranks", state.num_ranks},
                                         {"seed", state.seed},
                                         {"threads", state.num_threads},
                                         {"platform", state.platform},
                                         {"steps", state.steps}};
              },
          .load =
              [&ddp](const Json& values) {
                const DistributedDataParallel::LogicalState state{
                    .num_ranks = values.at("ranks"),
                    .seed = values.at("seed"),
                    .num_threads = values.at("threads"),
                    .platform = values.at("platform"),
                    .steps = values.at("steps")};
                ddp.check_logical_state(state);
                return Wish{.finish = [&ddp, state] { ddp.load_logical_state(state); }};
              },
          .travels = false};  // Elastic counts steps itself
}

Part part_of(WeightAverage& average, const std::string& name) {
  const Part tensors = part_of([&average] { return average.tensors(); }, name);
  return {.name = name,
          .has_values = true,
          .save =
              [&average, name, tensors](Snapshot& snapshot) {
                if (average.is_applied()) {
                  throw UsageError({.operation = "save"},
                                   "The averaged weights are in the model, whose own would be "
                                   "lost.\nSave when the result of apply() is gone.");
                }
                tensors.save(snapshot);
                const auto& all = average.tensors();
                for (std::size_t i = all.size() - average.num_buffers(); i < all.size(); ++i) {
                  snapshot.buffers.insert(name + "." + all[i].name);
                }
                snapshot.values[name] = {{"num_updates", average.num_updates()}};
              },
          .load =
              [&average, tensors](const Json& values) {
                const std::int64_t num_updates = values.at("num_updates");
                average.check_state(num_updates);
                Wish wish = tensors.load({});
                wish.finish = [&average, num_updates] { average.load_state(num_updates); };
                return wish;
              }};
}

namespace {

template <typename Averager>
Part part_of_averager(Averager& averager, const std::string& name) {
  return {.name = name,
          .has_values = true,
          .save =
              [&averager, name](Snapshot& snapshot) {
                snapshot.values[name] = {{"steps", averager.steps()}};
              },
          .load =
              [&averager](const Json& values) {
                const std::int64_t steps = values.at("steps");
                if (steps < 0 || steps > kMaxSteps) {
                  return Wish{.differences = {"an averager's number of steps cannot be"}};
                }
                return Wish{.finish = [&averager, steps] { averager.load_steps(steps); }};
              }};
}

}  // namespace

Part part_of(PeriodicAverager& averager, const std::string& name) {
  return part_of_averager(averager, name);
}

Part part_of(HierarchicalAverager& averager, const std::string& name) {
  return part_of_averager(averager, name);
}

void refuse_large(std::size_t bytes) {
  if (bytes <= kMaxSmallBytes) return;
  throw UsageError({.operation = "save"},
                   text::format("What is not a tensor makes {} bytes, more than {}.\nSave large "
                                "things as tensors.",
                                bytes, kMaxSmallBytes));
}

Part part_of(const std::string& name, std::function<std::string()> save,
             std::function<void(const std::string&)> load) {
  Marks marks = marks_of<std::string>(
      save, [](const std::string& text) { return Json(text); },
      [](const Json& values) { return values.get<std::string>(); },
      [load](const std::string& text, const World&) { load(text); });
  return {.name = name,
          .has_values = true,
          .save =
              [save = std::move(save), name](Snapshot& snapshot) {
                const Json text = save();
                refuse_large(text.get_ref<const std::string&>().size());
                try {
                  text.dump();
                } catch (const Json::exception&) {
                  throw UsageError({.operation = "save"},
                                   text::format("The text of '{}' is not UTF-8.\nEncode bytes, "
                                                "or save them as a tensor.",
                                                name));
                }
                snapshot.values[name] = text;
              },
          .load =
              [load = std::move(load)](const Json& values) {
                return Wish{.finish = [load, text = values.get<std::string>()] { load(text); }};
              },
          .marks = std::move(marks)};
}

Part random_part(const World& world) {
  const Generators generators = generators_of(world);
  return {.name = "random",
          .has_values = true,
          .is_collective = true,
          .save =
              [world, generators](Snapshot& snapshot) {
                Json& sizes = snapshot.values["random"] = Json::object();
                for (const auto& [name, generator] : generators) {
                  const at::Tensor all = world.all_gather(get_state(generator));
                  snapshot.tensors.push_back({name, all});
                  sizes[name] = all.sizes().vec();
                }
              },
          .load =
              [generators, world](const Json& values) {
                Wish wish;
                for (const auto& [name, value] : values.items()) {
                  const auto sizes = value.get<std::vector<std::int64_t>>();
                  if (is_plausible(sizes, name, generators)) {
                    wish.tensors.push_back({name, at::empty(sizes, at::kByte)});
                  } else {
                    wish.differences.push_back(
                        text::format("{}: its shape, [{}], is not that of random states here", name,
                                     text::join(sizes, ", ")));
                  }
                }
                wish.finish = [tensors = wish.tensors, generators, rank = world.rank(),
                               global_rank = world.global_rank()] {
                  for (const auto& [name, generator] : generators) {
                    for (const NamedTensor& one : tensors) {
                      if (one.name == name) set_state(generator, one.tensor, rank, global_rank);
                    }
                  }
                };
                return wish;
              },
          .travels = false};
}

}  // namespace lockstep
