// A fuzz target for what a checkpoint's state.json says of optimizers, master weights, schedules,
// scalers, averages, samplers, loaders, ranks and random generators (libFuzzer): it is taken, or
// refused with an error that a user can read.

#include <lockstep/amp.h>
#include <lockstep/averaging.h>
#include <lockstep/data.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "archive/file.h"
#include "checkpoint/parts.h"

namespace {

struct Counting : lockstep::IterableDataset<int> {
  std::size_t num_shards() const override { return 3; }
  std::string shard_name(std::size_t shard) const override { return std::to_string(shard); }
  Reader open(std::size_t) const override {
    return [i = 0]() mutable { return i < 4 ? std::optional(i++) : std::nullopt; };
  }
};

using Loader = lockstep::BasicLoader<std::vector<int>>;

// A training of one process, whose parts are loaded.
struct Training {
  Training() { master.use_master_weights(); }

  Loader make_loader(lockstep::ShardBy by) const {
    return {std::make_shared<Counting>(),
            lockstep::StreamSampler(world, {.by = by, .shuffle = 3}),
            [](std::vector<int> records) { return records; },
            {.batch_size = 5, .threads = 0}};
  }

  lockstep::World world = lockstep::World::join({.engine = "solo"});
  torch::optim::AdamW adamw{std::vector<at::Tensor>{at::ones({2, 3}), at::ones({4})}};
  torch::optim::SGD sgd{std::vector<at::Tensor>{at::ones({2})}, torch::optim::SGDOptions(0.1)};
  lockstep::optim::Schedule schedule{adamw, lockstep::optim::cosine(10, 100)};
  lockstep::GradScaler scaler{world};
  lockstep::DistributedSampler sampler{10, world};
  lockstep::optim::AdamW master{std::vector<at::Tensor>{at::zeros({2, 3}, at::kBFloat16)}};
  lockstep::WeightAverage average{{{"weight", at::ones({2, 3})}}};
  lockstep::PeriodicAverager averager{sgd, world};
  lockstep::HierarchicalAverager levels{sgd, world, {.levels = {{2, 1}}}};
  Loader loader = make_loader(lockstep::ShardBy::kRecord);
  Loader shards = make_loader(lockstep::ShardBy::kShard);
  std::vector<lockstep::Part> parts = {
      lockstep::part_of(adamw, "adamw"),
      lockstep::part_of(sgd, "sgd"),
      lockstep::part_of(schedule, "schedule"),
      lockstep::part_of(scaler, "scaler"),
      lockstep::part_of([this] { return sampler.state(); },
                        [this](const lockstep::SamplerState& state) { sampler.load_state(state); },
                        {}, "sampler"),
      lockstep::part_of(master, "master"),
      lockstep::part_of(average, "average"),
      lockstep::part_of(averager, "averager"),
      lockstep::part_of(levels, "levels"),
      lockstep::part_of(loader, world, "loader"),
      lockstep::part_of(shards, world, "shards"),
      lockstep::per_rank_part(
          world, "own", [] { return std::string(); }, [](const std::string&) {}, {}),
      lockstep::per_rank_part(
          world, "others", [] { return std::string(); }, [](const std::string&) {},
          [](const std::vector<std::string>&) {}),
      lockstep::random_part(world)};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Training training;
  lockstep::Json state;
  try {
    state =
        lockstep::parse_json(std::string(reinterpret_cast<const char*>(data), size), "state.json");
  } catch (const lockstep::Error&) {
    return 0;
  }
  for (const lockstep::Part& part : training.parts) {
    if (!state.contains(part.name)) continue;
    try {
      const lockstep::Wish wish = part.load(state.at(part.name));
      for (const lockstep::NamedTensor& one : wish.tensors) one.tensor.zero_();
      if (!wish.differences.empty()) continue;
      wish.finish();
      wish.finish_own();
      // A place that was taken can be read from.
      if (part.name == "loader") training.loader.next();
      if (part.name == "shards") training.shards.next();
    } catch (const lockstep::Error&) {            // NOLINT: refused
    } catch (const lockstep::Json::exception&) {  // NOLINT: refused
    }
  }
  return 0;
}
