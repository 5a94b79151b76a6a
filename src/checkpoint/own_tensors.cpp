#include "checkpoint/own_tensors.h"

#include <ATen/ATen.h>

#include "base/text.h"
#include "checkpoint/tensors.h"

namespace lockstep {
namespace {

constexpr std::string_view kPrefix = "rank-";

// In a file: rank.0.hook.1.NAME is of rank 0 and of the second wrapped model.
std::string prefix_of(int rank, std::size_t model) {
  return text::format("rank.{}.hook.{}.", rank, model);
}

std::vector<HookState> read_file(const std::string& checkpoint, int rank, int size,
                                 std::size_t num_models) {
  const FileReader file(checkpoint + "/" + own_file(rank, size));
  std::vector<HookState> states(num_models);
  for (const auto& [name, entry] : file.tensors().tensors) {
    for (std::size_t model = 0; model < num_models; ++model) {
      const std::string prefix = prefix_of(rank, model);
      if (!name.starts_with(prefix)) continue;
      const at::Tensor tensor = make_tensor(entry);
      read_tensor(file, entry, tensor);
      states[model][name.substr(prefix.size())] = tensor;
    }
  }
  return states;
}

// A step is a mean over ranks: so is what is left over for the next one.
void add(HookState& sum, const HookState& more) {
  for (auto& [name, tensor] : sum) {
    const auto its = more.find(name);
    if (!tensor.is_floating_point() || its == more.end()) continue;
    if (its->second.sizes() == tensor.sizes()) tensor.add_(its->second);
  }
}

}  // namespace

std::string own_file(int rank, int size) {
  return text::format("{}{}-of-{}.safetensors", kPrefix, rank, size);
}

bool is_own_file(const std::string& name) { return name.starts_with(kPrefix); }

std::vector<NamedTensor> own_tensors(const std::vector<DistributedDataParallel*>& ddps, int rank) {
  std::vector<NamedTensor> own;
  for (std::size_t model = 0; model < ddps.size(); ++model) {
    for (const auto& [name, tensor] : ddps[model]->hook_state()) {
      own.push_back({prefix_of(rank, model) + name, tensor});
    }
  }
  return own;
}

std::vector<HookState> read_own_tensors(const std::string& checkpoint, int saved_size, int rank,
                                        int size,
                                        const std::vector<DistributedDataParallel*>& ddps) {
  const bool is_alike = saved_size == size;
  auto states = read_file(checkpoint, is_alike ? rank : 0, saved_size, ddps.size());
  for (int other = 1; !is_alike && other < saved_size; ++other) {
    const auto more = read_file(checkpoint, other, saved_size, ddps.size());
    for (std::size_t model = 0; model < ddps.size(); ++model) add(states[model], more[model]);
  }
  for (std::size_t model = 0; model < ddps.size(); ++model) {
    if (states[model].empty()) continue;
    ddps[model]->check_hook_state(states[model]);
    if (is_alike) continue;
    for (auto& [name, tensor] : states[model]) {
      if (tensor.is_floating_point()) tensor.div_(saved_size);
    }
  }
  return states;
}

}  // namespace lockstep
