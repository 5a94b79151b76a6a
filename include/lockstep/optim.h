// optim: AdamW, Adam and SGD over LibTorch's fused kernels; clipping; schedules of learning rates.
//
// The optimizers are torch::optim's own, with their options, groups, state and archives, and
// another step(): one pass over each parameter instead of one for every operation.
#pragma once

#include <lockstep/export.h>
#include <lockstep/world.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

namespace lockstep::optim {

// Of each of the optimizers below: f32 copies of parameters in bf16 or f16. Steps that are too
// small for 16 bits add up there; after each step the parameter is its copy, rounded. States
// (momenta) are in f32 as well. With DdpOptions::reduce_type the gradients are f32, too. A
// Checkpointer saves the copies with the optimizer; torch::save(optimizer, ...) does not.
// A parameter that was written since the last step gives a new copy: weights were loaded, join()
// without steps or rewrap() has taken another rank's. On a device, what a program writes through
// .data() is not noticed: write to the parameter itself, under torch::NoGradGuard.
class LOCKSTEP_API MasterWeights {
 public:
  // From the next step on. Call it before the optimizer is given to a Checkpointer's load.
  void use_master_weights() { is_used_ = true; }
  bool uses_master_weights() const { return is_used_; }
  // Undefined before the parameter's first step, if it was written since its last one (the next
  // makes a new copy), and for one that has 32 bits or more.
  at::Tensor master_of(const at::Tensor& parameter) const;
  // The same, unless the parameter's version has changed; its bits are not looked at.
  at::Tensor master_since_write(const at::Tensor& parameter) const;
  // What a step updates: that of master_of(), made of the parameter where there is none. Undefined:
  // the parameter itself.
  at::Tensor master_for(const at::Tensor& parameter);
  // From now on the parameter's copy. Requires: it is f32, of the same sizes.
  void set_master(const at::Tensor& parameter, const at::Tensor& master);

 protected:
  MasterWeights() = default;
  ~MasterWeights() = default;

  // After a step: parameters are what their copies are.
  void round_to_parameters(const std::vector<at::Tensor>& parameters);

 private:
  struct Master {
    at::Tensor tensor;
    std::int64_t version;  // of the parameter, as it was written last
  };
  static bool is_current(const at::Tensor& parameter, const Master& master);

  bool is_used_ = false;
  std::unordered_map<const c10::TensorImpl*, Master> masters_;
};

// Throw, as torch::optim's: c10::Error if a learning rate is negative and the like. Gradients must
// be dense.
class LOCKSTEP_API AdamW : public torch::optim::AdamW, public MasterWeights {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class LOCKSTEP_API Adam : public torch::optim::Adam, public MasterWeights {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class LOCKSTEP_API SGD : public torch::optim::SGD, public MasterWeights {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Scales all gradients so that the 2-norm of them together is at most `max_norm`; returns what it
// was. They are read once, and written only if they are too large. With DistributedDataParallel all
// ranks have the same gradients, so all do the same. Throws: UsageError if max_norm is not
// positive, or the norm is not finite and `must_be_finite`.
// Of gradients on a device, the host waits for the norm.
LOCKSTEP_API double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                                   bool must_be_finite = false);
// The same without a wait, if all gradients are on one device: the norm is a tensor there. Where it
// is not finite, gradients stay as they are.
LOCKSTEP_API at::Tensor clip_grad_norm_async(const std::vector<at::Tensor>& parameters,
                                             double max_norm);

// By how much the learning rate is multiplied at a step, from 0.
using Curve = std::function<double(std::int64_t step)>;

// From `from` to `to` in `steps` steps, then `to`.
LOCKSTEP_API Curve linear(std::int64_t steps, double from = 1, double to = 0);
// Half a cosine from 1 to `floor` in `steps` steps, then `floor`.
LOCKSTEP_API Curve cosine(std::int64_t steps, double floor = 0);
// Multiplied by `gamma` every `steps` steps.
LOCKSTEP_API Curve stairs(std::int64_t steps, double gamma = 0.1);
// Up to 1 and down again, both as cosines; the optimizer's rate is the highest. As Python's
// OneCycleLR, which moves the momentum as well: see one_cycle_momentum().
struct OneCycle {
  double rising = 0.3;       // part of the steps
  double first = 1.0 / 25;   // at the beginning
  double last = 1.0 / 25e4;  // at the end
};
LOCKSTEP_API Curve one_cycle(std::int64_t steps, const OneCycle& options = {});
// The momentum that goes with it, for Schedule's third argument: low where the rate is high.
struct OneCycleMomentum {
  double rising = 0.3;  // as OneCycle's
  double low = 0.85;
  double high = 0.95;
};
LOCKSTEP_API Curve one_cycle_momentum(std::int64_t steps, const OneCycleMomentum& options = {});
// From 1/steps to 1 in `steps` steps, then `then`, which begins with its step 0.
LOCKSTEP_API Curve warm_up(
    std::int64_t steps, Curve then = [](std::int64_t) { return 1.0; });

// The linear scaling rule: with n ranks the batch is n times as large, and so is the rate. Use it
// with warm_up().
LOCKSTEP_API double scaled_lr(double base, const World& world);

// Sets the learning rates of all groups of an optimizer, from those that they have now.
class LOCKSTEP_API Schedule {
 public:
  // The optimizer must outlive it. Its rates are set for step 0. `momentum`, if given, is the
  // momentum at each step (SGD, RMSprop), or beta1 (Adam, AdamW).
  // Throws: UsageError if the optimizer has neither.
  Schedule(torch::optim::Optimizer& optimizer, Curve curve, Curve momentum = {});

  void step();  // after the optimizer's
  std::int64_t steps() const { return steps_; }
  double lr() const;  // of the first group

  // All that a checkpoint needs; the base rates are in it, as the optimizer's are changed all the
  // time.
  struct State {
    std::int64_t steps = 0;
    std::vector<double> base_lrs = {};
  };
  State state() const { return {steps_, base_lrs_}; }
  // Throws: UsageError if it is of a run with other groups.
  void check_state(const State& state) const;
  void load_state(const State& state);  // throws as check_state()

 private:
  void apply();

  torch::optim::Optimizer& optimizer_;
  Curve curve_;
  Curve momentum_;
  std::vector<double> base_lrs_;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep::optim
