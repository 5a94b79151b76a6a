// A fuzz target for what a checkpoint's state.json says of optimizers, schedules, scalers, samplers
// and random generators (libFuzzer): it is taken, or refused with an error that a user can read.

#include <lockstep/amp.h>
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

// A training of one process, whose parts are loaded.
struct Training {
  lockstep::World world = lockstep::World::join({.engine = "solo"});
  torch::optim::AdamW adamw{std::vector<at::Tensor>{at::ones({2, 3}), at::ones({4})}};
  torch::optim::SGD sgd{std::vector<at::Tensor>{at::ones({2})}, torch::optim::SGDOptions(0.1)};
  lockstep::optim::Schedule schedule{adamw, lockstep::optim::cosine(10, 100)};
  lockstep::GradScaler scaler{world};
  lockstep::DistributedSampler sampler{10, world};
  std::vector<lockstep::Part> parts = {
      lockstep::part_of(adamw, "adamw"),
      lockstep::part_of(sgd, "sgd"),
      lockstep::part_of(schedule, "schedule"),
      lockstep::part_of(scaler, "scaler"),
      lockstep::part_of([this] { return sampler.state(); },
                        [this](const lockstep::SamplerState& state) { sampler.load_state(state); },
                        "sampler"),
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
      if (wish.differences.empty()) wish.finish();
    } catch (const lockstep::Error&) {            // NOLINT: refused
    } catch (const lockstep::Json::exception&) {  // NOLINT: refused
    }
  }
  return 0;
}
