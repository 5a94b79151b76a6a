// Layer: one that is synchronised, and what ranks tell each other in a call of it.
//
// LibTorch refuses a batch with a single value for each channel before lockstep is asked, on the
// rank that has it. Here the others hear of it: when that rank unwinds (give_up), or when it goes
// on with another call (check). Threading: one call at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/world.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep {

class Layer {
 public:
  using Names = std::shared_ptr<std::vector<std::string>>;

  // `names` are those of the model's layers, this one the last so far. `num_batches` counts calls
  // in training; undefined if the layer tracks no statistics.
  Layer(std::shared_ptr<World> world, const std::shared_ptr<torch::nn::Module>& module, Names names,
        std::int64_t num_channels, at::Tensor num_batches);

  const std::shared_ptr<World>& world() const { return world_; }
  bool is_training() const;

  // What a rank tells the others: these numbers, the means of its channels, and the sums of their
  // squared deviations, which add up without cancelling. In double, and summed in the order of
  // ranks: the same bits on all.
  // kBatches is 0 on a device, where the counter is not read.
  enum Told : std::int64_t { kCount, kIndex, kCalls, kBatches, kNumTold };

  // The numbers for a call with `count` values for each channel, in main memory.
  at::Tensor tell(double count);
  // Throws UsageError, on all ranks, if these do not make the same calls. `all` has a row per rank.
  // Collective on a device if it seems that they do not.
  void check(const at::Tensor& all) const;
  // For a rank that unwinds: if LibTorch has refused its last call, the others wait for it.
  void give_up() noexcept;

 private:
  // The counter of batches, which LibTorch raises with each call, and how often it was written.
  struct Counter {
    std::int64_t batches = 0;
    std::int64_t version = 0;
  };
  Counter look() const;
  std::int64_t num_calls(const Counter& now) const;
  bool is_on_device() const { return num_batches_.defined() && !num_batches_.is_cpu(); }

  // Constant after construction.
  const std::shared_ptr<World> world_;
  const std::weak_ptr<torch::nn::Module> module_;
  const Names names_;
  const std::size_t index_;  // in names_
  const std::int64_t num_channels_;
  const at::Tensor num_batches_;

  Counter then_;  // at the last call that came here
  bool has_called_ = false;
};

}  // namespace lockstep
