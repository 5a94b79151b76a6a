// averaging: weights that are means, over the steps of a run or over ranks.
//
//   lockstep::WeightAverage average(model, {.decay = 0.999});
//   ...
//     optimizer.step();
//     average.update();
//   ...
//   {
//     const auto guard = average.apply();     // the model has the averaged weights
//     evaluate(model);
//   }                                         // and goes on with its own
//
// Replicas that are equal have equal averages: no communication is needed, and all ranks have the
// same bits. Where ranks train apart (post_local_sgd_hook), call update() only after an averager's
// step() that has made all ranks equal. A Checkpointer saves all classes.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ddp.h>
#include <lockstep/export.h>
#include <lockstep/world.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

namespace optim {
class MasterWeights;
}

enum class AverageRule {
  kExponential,  // average = decay * average + (1 - decay) * weights
  kEqual,        // all that were given count the same: stochastic weight averaging
};

struct AveragingOptions {
  AverageRule rule = AverageRule::kExponential;
  double decay = 0.999;  // kExponential's
  // Buffers of floating point are averaged as well; others are the latest. If false, the model's
  // own stay: recompute_batch_norm() is for running statistics that fit the averaged weights.
  bool averages_buffers = false;
};

// The average of a model's weights over steps, as torch.optim.swa_utils.AveragedModel. 16-bit
// weights are averaged in f32.
class LOCKSTEP_API WeightAverage {
 public:
  // While it lives, the model has the averaged weights.
  class LOCKSTEP_API Applied {
   public:
    explicit Applied(WeightAverage& average) : average_(average) { average_.swap(); }
    ~Applied() { average_.restore(); }
    Applied(const Applied&) = delete;
    Applied& operator=(const Applied&) = delete;

   private:
    WeightAverage& average_;
  };

  // Throws: UsageError if there is no model, or the decay is not between 0 and 1.
  explicit WeightAverage(std::shared_ptr<torch::nn::Module> model,
                         const AveragingOptions& options = {});
  template <typename Contained>
  explicit WeightAverage(const torch::nn::ModuleHolder<Contained>& model,
                         const AveragingOptions& options = {})
      : WeightAverage(std::shared_ptr<torch::nn::Module>(model.ptr()), options) {}
  // For programs without a torch::nn::Module.
  explicit WeightAverage(std::vector<NamedTensor> parameters, const AveragingOptions& options = {},
                         std::vector<NamedTensor> buffers = {});

  // From now on 16-bit weights that have an f32 copy in this optimizer (use_master_weights()) are
  // averaged from it: steps too small for 16 bits count. It must outlive the average.
  void use_masters_of(const optim::MasterWeights& optimizer) { masters_ = &optimizer; }

  // After optimizer.step(). The first call takes the weights as they are. Where the ranks of a host
  // share the model (DdpOptions::shard), they share its averages, too, and the call is collective,
  // also when it throws.
  // Throws: UsageError if the averaged weights are in the model.
  void update();
  std::int64_t num_updates() const { return num_updates_; }

  // The model has the averaged weights as long as the result lives; then its parameters and all its
  // buffers are again what they were. Needs memory for the model once more.
  // Throws: UsageError if nothing was averaged yet, or they are there already.
  [[nodiscard]] Applied apply() { return Applied(*this); }
  bool is_applied() const { return !kept_.empty(); }

  // The averages, by the names of what they are averages of: save_tensors() takes them.
  const std::vector<NamedTensor>& tensors() const { return averages_; }
  // How many of them are of buffers: the last ones.
  std::size_t num_buffers() const { return options_.averages_buffers ? buffers_.size() : 0; }

  // For checkpoints: with tensors(), all there is.
  // Throws: UsageError if the averaged weights are in the model, or the number cannot be.
  void check_state(std::int64_t num_updates) const;
  void load_state(std::int64_t num_updates);  // throws as check_state()

 private:
  void swap();
  void restore();
  void refuse_if_applied(const char* operation) const;
  void refuse_together() const;
  at::Tensor weights_of(const at::Tensor& source) const;
  void update_shared(const std::vector<std::size_t>& places, double share);

  AveragingOptions options_;
  std::shared_ptr<torch::nn::Module> model_;
  const optim::MasterWeights* masters_ = nullptr;
  std::vector<at::Tensor> sources_;    // what is averaged
  std::vector<NamedTensor> averages_;  // of each
  std::vector<at::Tensor> buffers_;    // all, also those that are not averaged
  std::vector<at::Tensor> kept_;       // the model's own sources and buffers, while applied
  std::int64_t num_updates_ = 0;
  int number_;  // in the order of construction, which is the same on all ranks
};

// Computes the running statistics of a model's BatchNorm layers anew, as Python's update_bn: `feed`
// runs the model on this rank's batches, in training mode and without gradients. Each batch of each
// rank counts the same, and all ranks have the same result. Does nothing if there is no such layer.
// While a SyncBatchNorm of the model lives, give all ranks equally many batches.
// Collective. Throws on all ranks: what `feed` throws on one; UsageError if a layer saw no batch.
// The statistics are then what they were.
LOCKSTEP_API void recompute_batch_norm(torch::nn::Module& model, const World& world,
                                       const std::function<void()>& feed);

struct PeriodicOptions {
  std::int64_t start_step = 0;  // as PostLocalSgdOptions'
  std::int64_t period = 4;      // steps from one average to the next
  // Also the optimizer's states (momenta). Then ranks are equal after an average, and a checkpoint
  // can be saved there.
  bool averages_state = false;
};

// Brings the weights of ranks that train apart (post_local_sgd_hook) together again, every few
// steps: as Python's PeriodicModelAverager.
class LOCKSTEP_API PeriodicAverager {
 public:
  // The optimizer must outlive it. Collective. Throws on all ranks: MismatchError if their options
  // differ; UsageError if one makes no sense, or states are to be averaged of an optimizer other
  // than Adam, AdamW, SGD, lockstep's or LibTorch's.
  PeriodicAverager(torch::optim::Optimizer& optimizer, World world,
                   const PeriodicOptions& options = {});

  // After each optimizer.step(), on all ranks: collective where it is due. Returns whether it was:
  // then all parameters that require a gradient are the mean over ranks.
  bool step();
  std::int64_t steps() const { return steps_; }
  // Throws: UsageError if it is negative.
  void load_steps(std::int64_t steps);

 private:
  torch::optim::Optimizer& optimizer_;
  World world_;
  PeriodicOptions options_;
  std::int64_t steps_ = 0;
};

struct AveragingLevel {
  std::int64_t period = 1;  // steps from one average to the next
  int group_size = 1;       // ranks that it is taken over: 0 to n - 1, n to 2 n - 1, ...
};

struct HierarchicalOptions {
  std::int64_t start_step = 0;  // as PostLocalSgdOptions'
  // From the smallest group and the shortest period to all ranks: {{4, 8}, {16, 32}}.
  std::vector<AveragingLevel> levels = {};
  bool averages_state = false;  // as PeriodicOptions'
};

// The same in several levels, such as often within some ranks and seldom over all: as Python's
// HierarchicalModelAverager. In a step where several are due, the largest group is averaged.
class LOCKSTEP_API HierarchicalAverager {
 public:
  // The optimizer must outlive it. Collective. Throws on all ranks: as PeriodicAverager; UsageError
  // if a period is not longer than the one before, a group not a multiple of it, or the last one
  // not the world.
  HierarchicalAverager(torch::optim::Optimizer& optimizer, const World& world,
                       const HierarchicalOptions& options);

  // After each optimizer.step(), on all ranks. Returns over how many ranks parameters are the mean
  // now; 0: none was due. If it is the size of the world, all ranks have the same.
  int step();
  std::int64_t steps() const { return steps_; }
  // Throws: UsageError if it is negative.
  void load_steps(std::int64_t steps);

 private:
  torch::optim::Optimizer& optimizer_;
  HierarchicalOptions options_;
  std::vector<World> groups_;  // this rank's, by level
  std::int64_t steps_ = 0;
};

}  // namespace lockstep
