#include "checkpoint/sharing.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <optional>

#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/shards.h"
#include "ddp/slices.h"

namespace lockstep {
namespace {

bool has_rank(const World& world, int global_rank) {
  for (int rank = 0; rank < world.size(); ++rank) {
    if (world.global_rank(rank) == global_rank) return true;
  }
  return false;
}

void check_sharers(const World& world, const std::string& name, const World& sharers) {
  for (int rank = 0; rank < sharers.size(); ++rank) {
    const int sharer = sharers.global_rank(rank);
    if (has_rank(world, sharer)) continue;
    throw UsageError(
        {.rank = world.global_rank(), .peer = sharer, .operation = "checkpoint"},
        text::format("'{}' is something that rank {} shares (DdpOptions::shard), which "
                     "is not in the Checkpointer's world.\nGive the Checkpointer the "
                     "world of the DistributedDataParallel.",
                     name, sharer));
  }
}

// A tensor of these sizes that has hardly any memory.
at::Tensor make_stand_in(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const std::vector<std::int64_t> strides(sizes.size(), 0);
  return at::empty_strided(sizes, strides, options);
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
                   const std::vector<SharedState>& states, const std::vector<SlicedState>& sliced) {
  for (const NamedTensor& one : tensors) {
    if (const auto shards = Shards::holder_of(one.tensor)) {
      check_sharers(world, one.name, shards->host());
    }
    if (Slices::is_slice(one.tensor)) {
      check_sharers(world, one.name, Slices::ranks_of(one.tensor));
    }
  }
  for (const SharedState& one : states) check_sharers(world, one.name, one.shards->host());
  for (const SlicedState& one : sliced) {
    check_sharers(world, one.slices->name_of(one.slot), one.slices->ranks());
  }
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

bool is_plain(const at::Tensor& parameter) {
  const auto slices = Slices::holder_of(parameter);
  const auto shards = Shards::holder_of(parameter);
  return !(slices && slices->find(parameter)) && !(shards && shards->find(parameter));
}

at::Tensor make_state(const at::Tensor& parameter, const std::string& name, at::ScalarType type,
                      Wish& wish) {
  const auto slices = Slices::holder_of(parameter);
  if (const auto slot = slices ? slices->find(parameter) : std::nullopt) {
    const at::Tensor state = make_stand_in(parameter.sizes(), parameter.options().dtype(type));
    wish.sliced.push_back({.tensor = state, .slices = slices, .slot = *slot});
    return state;
  }
  const auto shards = Shards::holder_of(parameter);
  const auto slot = shards ? shards->find(parameter) : std::nullopt;
  if (!slot) return at::zeros_like(parameter.detach(), type);
  const at::Tensor state = make_stand_in(parameter.sizes(), parameter.options().dtype(type));
  wish.shared.push_back({.tensor = state, .shards = shards, .name = name, .slot = *slot});
  return state;
}

void make_memory(const std::vector<SharedState>& states) {
  for (const SharedState& one : states) {
    at::Tensor tensor = one.tensor;  // the same one: all who have it see the memory
    tensor.set_data(one.shards->state(one.name, one.slot, tensor.scalar_type()));
  }
}

void set_slices_aside(Snapshot& snapshot) {
  for (NamedTensor& one : snapshot.tensors) {
    if (!Slices::is_slice(one.tensor)) continue;
    snapshot.slices[one.name] = one.tensor;
    one.tensor =
        make_stand_in(Slices::sizes_of(one.tensor), at::TensorOptions(one.tensor.scalar_type()));
  }
}

at::Tensor gather_slice(const World& world, const at::Tensor& slice, int writer) {
  const World& ranks = Slices::ranks_of(slice);
  int root = -1;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (writer >= 0 && ranks.global_rank(rank) == world.global_rank(writer)) root = rank;
  }
  return Slices::gather(slice, root);
}

void take_slice(const SlicedState& state, const at::Tensor& whole) {
  at::Tensor tensor = state.tensor;  // the same one: all who have it see the memory
  const at::Tensor slice = state.slices->state(state.slot, tensor.scalar_type());
  if (whole.defined()) state.slices->fill(slice, state.slot, whole);
  if (state.fits_parameter) {
    const at::Tensor parameter = state.slices->parameter(state.slot).detach().cpu();
    *state.fits_parameter = whole.defined() && whole.to(parameter.scalar_type()).equal(parameter);
  }
  tensor.set_data(slice);
}

}  // namespace lockstep
