// amp: computing in bf16 or fp16 where it is safe, and a loss scale that all ranks agree on.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>
#include <lockstep/world.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>

namespace lockstep {

// While it lives, operations of this thread that gain by it compute in `type`, others in their own,
// as with Python's torch.autocast. Put the forward and the loss inside, not backward().
class LOCKSTEP_API Autocast {
 public:
  explicit Autocast(at::ScalarType type = at::kBFloat16,
                    at::DeviceType device = at::DeviceType::CPU);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType type_before_;
};

struct ScalerOptions {
  double scale = 65536;
  double growth = 2;
  double backoff = 0.5;
  std::int64_t growth_interval = 2000;  // steps without an overflow
  bool enabled = true;                  // false: all calls do what they would without a scaler
};

// For fp16, whose small gradients would vanish: the loss is scaled up, gradients are scaled back,
// and a step whose gradients overflowed is left out. No rank skips alone: gradients that
// DistributedDataParallel has averaged are the same everywhere, and for others ranks agree.
//
//   scaler.scale(loss).backward();
//   scaler.unscale(optimizer);          // only if gradients are looked at, say to clip them
//   scaler.step(optimizer);             // for each optimizer
//   scaler.update();                    // once, after all of them
class LOCKSTEP_API GradScaler {
 public:
  // Throws: UsageError if an option makes no sense.
  explicit GradScaler(World world, const ScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;
  // Collective if the optimizer has parameters that no DistributedDataParallel averages.
  // Throws: UsageError if it is called twice for one step.
  void unscale(torch::optim::Optimizer& optimizer);
  // Unscales if that was not done. Returns whether the optimizer took its step: it does not if its
  // own gradients overflowed.
  // Throws: UsageError if it is called twice without update().
  bool step(torch::optim::Optimizer& optimizer);
  // The scale shrinks if any optimizer's gradients overflowed.
  void update();

  double current_scale() const { return options_.enabled ? scale_ : 1; }
  std::int64_t skipped() const { return skipped_; }  // steps, so far

  struct State {
    double scale = 0;
    std::int64_t good_steps = 0;  // since the last overflow or growth
    std::int64_t skipped = 0;
  };
  State state() const { return {scale_, good_steps_, skipped_}; }
  // Throws: UsageError if the scale is not a positive number.
  void check_state(const State& state) const;
  void load_state(const State& state);  // throws as check_state()

 private:
  // What happened to an optimizer's gradients since the last update().
  struct Progress {
    bool has_overflow = false;
    bool has_stepped = false;
  };

  World world_;
  ScalerOptions options_;
  double scale_;
  std::int64_t good_steps_ = 0;
  std::int64_t skipped_ = 0;
  std::map<const torch::optim::Optimizer*, Progress> unscaled_;
};

}  // namespace lockstep
