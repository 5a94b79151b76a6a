// SyncBatchNorm: batch normalisation over the batches of all ranks together.
#pragma once

#include <lockstep/export.h>
#include <lockstep/world.h>

#include <concepts>
#include <memory>

namespace torch::nn {
class Module;
}

namespace lockstep {

struct SyncBatchNormState;

// While it lives, every BatchNorm1d, 2d and 3d of the model computes mean and variance over all
// ranks, forward and backward, as on one batch made of all of theirs. The model stays as it is: its
// layers, names and checkpoints are those of BatchNorm. In eval() nothing is different.
//
//   lockstep::SyncBatchNorm sync(model, world);
//
// Gradients mix within the layers, so with different numbers of rows give each rank its part of the
// whole loss, sum * ranks / all rows, instead of DistributedDataParallel's set_weight().
// Ranks must call the layers in the same order: else UsageError, on all. So it is if one rank has a
// single row, which LibTorch refuses where it is. A layer without weights and without running
// statistics cannot be told from others: UsageError names it.
class LOCKSTEP_API SyncBatchNorm {
 public:
  // Collective.
  SyncBatchNorm(std::shared_ptr<torch::nn::Module> model, const World& world);
  template <typename Holder>
  requires requires(const Holder& holder) {
    { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
  }
  SyncBatchNorm(const Holder& model, const World& world) : SyncBatchNorm(model.ptr(), world) {}

  int num_layers() const;

 private:
  std::shared_ptr<SyncBatchNormState> state_;
};

}  // namespace lockstep
