// What a step of optim::Sharded is about: the parameters that are updated, the pieces that they are
// cut into, and the optimizers that the pieces are given to.
#pragma once

#include <ATen/ATen.h>
#include <lockstep/sharded.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ddp/shards.h"
#include "ddp/slices.h"

namespace lockstep::optim::detail {

// A parameter that is updated in this step.
struct Use {
  at::Tensor parameter;
  at::Tensor gradient = {};
  std::size_t group = 0;
  std::size_t slot = 0;
  bool is_sparse = false;
  bool has_master = false;                        // an f32 copy is what is updated
  bool is_sliced = false;                         // the states are this rank's slices
  bool is_slice_alone = false;                    // the gradient is one, too
  std::map<std::string, at::Tensor> states = {};  // if not sliced: whole, in shared memory
};

// Those of one model that is shared: by the ranks of a host, or in slices.
struct Model {
  std::shared_ptr<Sharing> sharing;
  std::shared_ptr<Shards> shards = std::dynamic_pointer_cast<Shards>(sharing);
  std::shared_ptr<Slices> slices = std::dynamic_pointer_cast<Slices>(sharing);
  std::vector<Use> uses = {};
  std::vector<std::size_t> seen = {};  // slots, with or without a gradient
  std::exception_ptr failure = {};     // why this rank cannot step
};

struct Part {
  const Use* use = nullptr;
  TensorPiece tensor;   // of the parameter; all of it if the gradient is sparse
  std::int64_t at = 0;  // in slices

  at::Tensor of(const at::Tensor& whole) const {
    return use->is_sparse ? whole.detach() : tensor.of(whole);
  }
  at::Tensor of_state(const at::Tensor& state) const {
    return use->is_sliced ? state.narrow(0, at, tensor.count) : of(state);
  }
  at::Tensor of_gradient() const {
    if (use->is_sparse) return use->gradient;
    return use->is_slice_alone ? use->gradient.narrow(0, at, tensor.count) : of(use->gradient);
  }
};
// What one rank updates at once: a part of a large tensor, or small ones of a group together.
using Piece = std::vector<Part>;

// What one optimizer can be given: group, whether there are master weights, device.
using Alike = std::tuple<std::size_t, bool, int, int>;
inline Alike key_of(const Use& use) {
  const at::Device device = use.parameter.device();
  return {use.group, use.has_master, static_cast<int>(device.type()), device.index()};
}

// A thread's own optimizer for each group, with as many parameters as a piece has needed.
class Lane {
 public:
  // An optimizer keeps the master weights of a parameter: those without have one of their own.
  void make_inner(ShardedStep::Make make, const Use& use,
                  const torch::optim::OptimizerOptions& options) {
    auto& found = inner_[key_of(use)];
    if (!found) found = make(make_proxy(use.parameter.device()), options);
  }
  torch::optim::Optimizer& inner(const Use& use) const { return *inner_.at(key_of(use)); }
  static at::Tensor& proxy(torch::optim::Optimizer& inner, std::size_t index) {
    auto& all = inner.param_groups()[0].params();
    while (all.size() <= index) all.push_back(make_proxy(all.front().device()));
    return all[index];
  }

 private:
  static at::Tensor make_proxy(const at::Device& device) {
    return at::empty({0}, at::TensorOptions(device)).set_requires_grad(true);
  }

  std::map<Alike, std::unique_ptr<torch::optim::Optimizer>> inner_;
};

// By model, in the order of parameters, which is the same on all ranks. `token` tells this
// optimizer from others. `has_others`: there are parameters that nobody shares.
std::vector<Model> find_models(torch::optim::Optimizer& optimizer,
                               const std::shared_ptr<int>& token, bool* has_others);

// For the memory of a host: the same on all ranks, and one or more for each. Large tensors are cut,
// small ones are put together.
std::vector<Piece> cut_pieces(const Model& model);
// On devices: all that this rank has of a group, to be updated at once.
std::vector<Piece> slices_of(const Model& model);

std::vector<std::size_t> slots_of(const Model& model);

}  // namespace lockstep::optim::detail
