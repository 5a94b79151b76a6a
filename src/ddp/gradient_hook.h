// GradientHook: how the reducer hears of a gradient.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace lockstep {

class Reducer;

// Runs after a gradient has been added to a parameter's .grad. It belongs to the tensor, not to
// autograd's node, which is made anew when the tensor is moved or cast: such a change must be seen.
// A tensor has one such hook, so each runs the one that was there before it.
//
// It may stay when its reducer has gone: a program that goes on training is told, once, that
// gradients are averaged no more.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  using Chain = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;
  struct Warning {
    std::function<void()> say;
    std::once_flag once = {};
  };

  GradientHook(Chain before, std::weak_ptr<Reducer*> target, std::function<void(Reducer&)> call,
               std::shared_ptr<Warning> warning)
      : before_(std::move(before)),
        target_(std::move(target)),
        call_(std::move(call)),
        warning_(std::move(warning)) {}

  void operator()(const at::Tensor& tensor) override {
    if (before_) (*before_)(tensor);
    if (const auto target = target_.lock()) {
      call_(**target);
    } else {
      std::call_once(warning_->once, warning_->say);
    }
  }

  // Whether a reducer that lives averages the gradients of this parameter.
  static bool is_on(const at::Tensor& parameter) { return num_on(parameter) > 0; }
  // Whether another reducer that lives averages them as well, before this one.
  static bool is_second_on(const at::Tensor& parameter) { return num_on(parameter) > 1; }

  // Takes those out whose reducer has gone, as far as no hook of others is in the way.
  static void remove_expired(Chain& chain) {
    while (auto* const hook = dynamic_cast<GradientHook*>(chain.get())) {
      if (!hook->target_.expired()) return remove_expired(hook->before_);
      chain = std::move(hook->before_);
    }
  }

 private:
  static int num_on(const at::Tensor& parameter) {
    int count = 0;
    const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
    while (const auto* const ours = dynamic_cast<const GradientHook*>(hook)) {
      if (!ours->target_.expired()) ++count;
      hook = ours->before_.get();
    }
    return count;
  }

  Chain before_;
  std::weak_ptr<Reducer*> target_;
  std::function<void(Reducer&)> call_;
  std::shared_ptr<Warning> warning_;  // of all parameters together
};

}  // namespace lockstep
