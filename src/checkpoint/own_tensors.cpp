#include "checkpoint/own_tensors.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <functional>

#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/tensors.h"
#include "world/exchange.h"
#include "world/packed.h"

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

// Of all ranks. A step is a mean over them: so is what is left over for the next one.
std::vector<HookState> read_mean(const std::string& checkpoint, int size, std::size_t num_models) {
  std::vector<HookState> mean = read_file(checkpoint, 0, size, num_models);
  for (int rank = 1; rank < size; ++rank) {
    const auto more = read_file(checkpoint, rank, size, num_models);
    for (std::size_t model = 0; model < num_models; ++model) {
      std::erase_if(mean[model], [&](const auto& one) {  // what not all have: begin anew
        const auto its = more[model].find(one.first);
        return its == more[model].end() || its->second.sizes() != one.second.sizes();
      });
      for (auto& [name, tensor] : mean[model]) {
        if (tensor.is_floating_point()) tensor.add_(more[model].at(name));
      }
    }
  }
  for (HookState& state : mean) {
    for (auto& [name, tensor] : state) {
      if (tensor.is_floating_point()) tensor.div_(size);
    }
  }
  return mean;
}

// What `read` gives on rank `reader`, on all ranks.
std::vector<HookState> share(const World& world, int reader, std::size_t num_models,
                             const std::function<std::vector<HookState>()>& read) {
  std::vector<HookState> states(num_models);
  Json description = {{"failure", ""}, {"tensors", Json::array()}};
  if (world.rank() == reader) {
    try {
      states = read();
    } catch (const std::exception&) {
      description["failure"] = failure_text(std::current_exception(), reader);
    }
    for (std::size_t model = 0; model < num_models; ++model) {
      for (const auto& [name, tensor] : states[model]) {
        const TensorEntry entry = entry_of({name, tensor});
        description["tensors"].push_back({model, name, entry.dtype, entry.shape});
      }
    }
  }
  description = Json::parse(share_text(world, to_text(description), reader));
  std::vector<std::string> failures(static_cast<std::size_t>(world.size()));
  failures[static_cast<std::size_t>(reader)] = description.at("failure");
  throw_first_cause(world, failures, {.rank = world.global_rank(), .operation = "load"});
  std::vector<at::Tensor> tensors;
  for (const Json& one : description.at("tensors")) {
    HookState& state = states[one[0].get<std::size_t>()];
    const std::string name = one[1];
    if (world.rank() != reader) {
      state[name] =
          make_tensor({.dtype = one[2], .shape = one[3].get<std::vector<std::int64_t>>()});
    }
    tensors.push_back(state.at(name));
  }
  move_packed(tensors, [&](const at::Tensor& packed) { world.broadcast(packed, reader); });
  return states;
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

std::vector<HookState> read_own_tensors(const World& world, const std::string& checkpoint,
                                        int saved_size, int reader,
                                        const std::vector<DistributedDataParallel*>& ddps) {
  const auto fail_together = [&](const std::exception_ptr& failure) {
    throw_first_cause(world, exchange_texts(world, failure_text(failure, world.global_rank())),
                      {.rank = world.global_rank(), .operation = "load"});
  };
  std::vector<HookState> mine;
  if (saved_size != world.size()) {
    mine = share(world, reader, ddps.size(),
                 [&] { return read_mean(checkpoint, saved_size, ddps.size()); });
  } else {
    std::exception_ptr failure;
    std::error_code ignored;  // then it is not there
    const bool is_there =
        std::filesystem::exists(checkpoint + "/" + own_file(world.rank(), saved_size), ignored);
    try {
      if (is_there) mine = read_file(checkpoint, world.rank(), saved_size, ddps.size());
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    fail_together(failure);
    const auto all = exchange_texts(world, is_there ? "1" : "0");
    for (int rank = 0; rank < world.size(); ++rank) {
      if (all[static_cast<std::size_t>(rank)] == "1") continue;
      auto its = share(world, reader, ddps.size(),
                       [&] { return read_file(checkpoint, rank, saved_size, ddps.size()); });
      if (rank == world.rank()) mine = std::move(its);
    }
  }
  std::exception_ptr failure;
  try {
    for (std::size_t model = 0; model < ddps.size(); ++model) {
      if (!mine[model].empty()) ddps[model]->check_hook_state(mine[model]);
    }
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  fail_together(failure);
  return mine;
}

}  // namespace lockstep
