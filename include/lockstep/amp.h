// amp: computing in bf16 or fp16 where it is safe, and a loss scale that all ranks agree on.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>
#include <lockstep/world.h>
#include <torch/optim/optimizer.h>

#include <cstdint>

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
};

// For fp16, whose small gradients would vanish: the loss is scaled up, gradients are scaled back,
// and a step whose gradients overflowed is left out. Ranks decide that together: none skips alone.
//
//   scaler.scale(loss).backward();
//   scaler.unscale(optimizer);          // only if gradients are looked at, say to clip them
//   scaler.step(optimizer);
//   scaler.update();
class LOCKSTEP_API GradScaler {
 public:
  // Throws: UsageError if an option makes no sense.
  explicit GradScaler(World world, const ScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;
  // Collective, once for each step. Throws: UsageError if it is called twice.
  void unscale(torch::optim::Optimizer& optimizer);
  // Unscales if that was not done. Returns whether the optimizer took its step.
  bool step(torch::optim::Optimizer& optimizer);
  void update();

  double current_scale() const { return scale_; }
  std::int64_t skipped() const { return skipped_; }  // steps, so far

  struct State {
    double scale = 0;
    std::int64_t good_steps = 0;  // since the last overflow or growth
    std::int64_t skipped = 0;
  };
  State state() const { return {scale_, good_steps_, skipped_}; }
  void load_state(const State& state);

 private:
  World world_;
  ScalerOptions options_;
  double scale_;
  std::int64_t good_steps_ = 0;
  std::int64_t skipped_ = 0;
  const torch::optim::Optimizer* unscaled_ = nullptr;
  bool has_overflow_ = false;
};

}  // namespace lockstep
