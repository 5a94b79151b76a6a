#include "checkpoint/sharing.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <optional>

#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/shards.h"

namespace lockstep {
namespace {

bool has_rank(const World& world, int global_rank) {
  for (int rank = 0; rank < world.size(); ++rank) {
    if (world.global_rank(rank) == global_rank) return true;
  }
  return false;
}

void check_sharers(const World& world, const std::string& name, const Shards& shards) {
  for (int rank = 0; rank < shards.host().size(); ++rank) {
    const int sharer = shards.host().global_rank(rank);
    if (has_rank(world, sharer)) continue;
    throw UsageError(
        {.rank = world.global_rank(), .peer = sharer, .operation = "checkpoint"},
        text::format("'{}' is in memory that rank {} shares (DdpOptions::shard), which "
                     "is not in the Checkpointer's world.\nGive the Checkpointer the "
                     "world of the DistributedDataParallel.",
                     name, sharer));
  }
}

// Between ranks that share it, there is nothing to compare.
bool is_compared(const World& world, const Shards& shards) {
  return shards.host().size() < world.size();
}

}  // namespace

std::vector<std::shared_ptr<Shards>> holders_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::shared_ptr<Shards>> all;
  for (const NamedTensor& one : tensors) {
    auto holder = Shards::holder_of(one.tensor);
    if (holder && std::ranges::find(all, holder) == all.end()) all.push_back(std::move(holder));
  }
  return all;
}

void check_sharers(const World& world, const std::vector<NamedTensor>& tensors,
                   const std::vector<SharedState>& states) {
  for (const NamedTensor& one : tensors) {
    if (const auto shards = Shards::holder_of(one.tensor)) check_sharers(world, one.name, *shards);
  }
  for (const SharedState& one : states) check_sharers(world, one.name, *one.shards);
}

std::vector<std::int64_t> hashes_of_mine(const World& world, std::vector<NamedTensor> tensors) {
  for (NamedTensor& one : tensors) {
    const auto shards = Shards::holder_of(one.tensor);
    if (!shards || (is_compared(world, *shards) && shards->is_mine(one.tensor))) continue;
    one.tensor = at::Tensor();
  }
  return hashes_of(tensors);
}

void take_hashes_of_host(const World& world, const std::vector<NamedTensor>& tensors,
                         std::vector<std::int64_t>& hashes) {
  for (const auto& shards : holders_of(tensors)) {
    if (!is_compared(world, *shards)) continue;
    const at::Tensor all = at::zeros({static_cast<std::int64_t>(hashes.size())}, at::kLong);
    auto* const values = all.mutable_data_ptr<std::int64_t>();
    const auto is_its = [&](std::size_t i) {
      return Shards::holder_of(tensors[i].tensor) == shards;
    };
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (is_its(i)) values[i] = hashes[i];
    }
    shards->host().all_reduce(all);  // one rank has each, the others have 0
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (is_its(i)) hashes[i] = values[i];
    }
  }
}

bool is_written_here(const at::Tensor& tensor, int reader) {
  const auto shards = Shards::holder_of(tensor);
  if (!shards) return true;
  if (has_rank(shards->host(), reader)) return shards->host().global_rank() == reader;
  return shards->is_mine(tensor);
}

at::Tensor make_state(const at::Tensor& parameter, const std::string& name, at::ScalarType type,
                      Wish& wish) {
  const auto shards = Shards::holder_of(parameter);
  const auto slot = shards ? shards->find(parameter) : std::nullopt;
  if (!slot) return at::zeros_like(parameter.detach(), type);
  const std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()), 0);
  const at::Tensor state =
      at::empty_strided(parameter.sizes(), strides, parameter.options().dtype(type));
  wish.shared.push_back({.tensor = state, .shards = shards, .name = name, .slot = *slot});
  return state;
}

void make_memory(const std::vector<SharedState>& states) {
  for (const SharedState& one : states) {
    at::Tensor tensor = one.tensor;  // the same one: all who have it see the memory
    tensor.set_data(one.shards->state(one.name, one.slot, tensor.scalar_type()));
  }
}

}  // namespace lockstep
