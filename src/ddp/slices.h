// Slices: DdpOptions::shard on devices, which share no memory. Each rank keeps a slice of every
// bucket: the states of optimizers for it, and with Shard::kGradients its gradients. It updates
// these elements, and then all ranks gather the parameters, which are whole on every device.
//
// Invariant: on each device parameters lie as their gradients do in buckets, so that a bucket of
// them is gathered in place, and this rank's slice of it are the elements whose mean it has. The
// plan of buckets stays as long as the model is wrapped. Threading: the thread that trains.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/bucket_plan.h"
#include "ddp/sharing.h"

namespace lockstep {

// Which elements each of `size` ranks has, of tensors that are like the parameters.
struct SliceLayout {
  std::vector<BucketPlan> plans;
  std::vector<std::vector<std::vector<SliceRun>>> runs = {};  // by rank, by slot

  std::int64_t count(int rank, std::size_t slot) const;  // elements
};

class Slices final : public Sharing {
 public:
  // Moves the parameters to where buckets of them can be gathered. `plans` are those of gradients,
  // in which each bucket has parameters of one type. Collective.
  static std::shared_ptr<Slices> place(const World& world, const std::vector<NamedTensor>& trained,
                                       std::vector<BucketPlan> plans);
  // Whether a tensor is a parameter that was placed, or a slice.
  static bool is_placed(const at::Tensor& tensor);
  // The one that has it; null if it is nobody's any more.
  static std::shared_ptr<Slices> holder_of(const at::Tensor& tensor);
  // Throws: UsageError of parameters that cannot be cut. `taken` has the memory of those before.
  static void check(const World& world, const NamedTensor& parameter, TakenMemory& taken);
  // A parameter that was placed, in memory of its own; undefined: it was not.
  static at::Tensor take_out(const at::Tensor& parameter);

  const std::vector<SliceRun>& runs(std::size_t slot) const;  // of this rank
  const at::Tensor& parameter(std::size_t slot) const { return parameters_[slot]; }

  // What this rank keeps for a slot: zeros, in one dimension, run behind run.
  at::Tensor state(std::size_t slot, at::ScalarType type) const;
  bool is_state(const at::Tensor& tensor, std::size_t slot, at::ScalarType type) const;
  // Whether a tensor is what state() returns, of these or of others.
  static bool is_slice(const at::Tensor& tensor);
  // Makes `state` what this rank has of `from`: a tensor like the parameter, or a slice of what was
  // cut in another way, by other Slices. Of a slice: collective. Throws: UsageError if the slices
  // are other ranks'.
  void fill(const at::Tensor& state, std::size_t slot, const at::Tensor& from) const;
  // The tensor whose slices all ranks have, like the parameter, in main memory: on rank `root` of
  // ranks_of(), -1: on all; elsewhere undefined. Collective there.
  static at::Tensor gather(const at::Tensor& slice, int root);
  static World ranks_of(const at::Tensor& slice);
  static std::vector<std::int64_t> sizes_of(const at::Tensor& slice);  // of that tensor

  // All ranks come to a step, and agree on what is to be done. Throws as Shards::begin_update().
  void begin_update(std::uint64_t hash, const std::function<std::vector<std::string>()>& lines,
                    const std::exception_ptr& failure);
  // The elements of `written` slots that other ranks have come to this one, in the order of the
  // current stream. Autograd refuses graphs from before. `failure` is this rank's: then all ranks
  // throw. Collective.
  void end_update(const std::exception_ptr& failure, const std::vector<std::size_t>& written);

  using Work = c10::intrusive_ptr<c10d::Work>;
  // Operations of end_update() whose end nobody has seen: a later step looks.
  std::vector<Work> take_works() { return std::exchange(works_, {}); }

  // With Shard::kGradients, whole, on all ranks. Collective.
  std::vector<NamedTensor> full_gradients() const;

  // A parameter is not where it was placed, or they are torn.
  std::string find_foreign_change() const override;

  // These were loaded, on all ranks, and states of these slots. If all parameters and states of
  // living optimizers are among them, parameters are torn no more, and gradients of a step that was
  // not done are dropped.
  void note_loaded(const std::vector<at::Tensor>& parameters,
                   const std::vector<std::size_t>& with_states);
  // Whether a tensor is in memory of parameters that are torn: a step has ended in the middle, and
  // ranks have different ones.
  static bool is_torn(const at::Tensor& tensor);
  [[noreturn]] static void throw_torn(int rank);

 private:
  struct Owned;

  Slices(const World& world, std::vector<BucketPlan> plans) : Sharing(world) {
    layout_ = std::make_shared<SliceLayout>(SliceLayout{.plans = std::move(plans)});
  }
  static at::Tensor owned(const at::Tensor& memory, Owned owner);
  static const Owned* owner_of(const at::Tensor& tensor);
  static void keep_memory(const at::Tensor& parameter);
  static at::Tensor padded(const SliceLayout& layout, std::size_t slot, const at::Tensor& part);
  // Of what all ranks have, padded, by rank.
  static at::Tensor put_together(const SliceLayout& layout, std::size_t slot,
                                 const at::Tensor& parts, at::IntArrayRef sizes,
                                 at::IntArrayRef strides);
  [[noreturn]] void explain(std::exception_ptr error) override;
  bool is_same(const std::vector<NamedTensor>& trained, const World& world,
               const std::vector<BucketPlan>& plans) const;
  void move_in(const std::vector<NamedTensor>& trained);

  std::shared_ptr<SliceLayout> layout_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::pair<at::Tensor, std::int64_t>> places_;  // by slot: memory, element
  std::vector<at::Tensor> buckets_;                          // of parameters
  bool is_writing_ = false;  // between begin_update() and the end of end_update()
  std::shared_ptr<bool> is_torn_ = std::make_shared<bool>(false);  // the memory has it, too
  std::vector<Work> works_;
};

}  // namespace lockstep
