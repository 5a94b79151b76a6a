// GradientHook: how the reducer hears of a gradient.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>

namespace lockstep {

class Reducer;

// Runs after a gradient has been added to a parameter's .grad. It belongs to the tensor, not to
// autograd's node, which is made anew when the tensor is moved or cast: such a change must be seen.
// A tensor has one such hook, so each runs the one that was there before it.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::unique_ptr<PostAccumulateGradHook> before, std::weak_ptr<Reducer*> target,
               std::function<void(Reducer&)> call)
      : before_(std::move(before)), target_(std::move(target)), call_(std::move(call)) {}

  void operator()(const at::Tensor& tensor) override {
    if (before_) (*before_)(tensor);
    if (const auto target = target_.lock()) call_(**target);
  }

  // Whether a reducer that lives averages the gradients of this parameter.
  static bool is_on(const at::Tensor& parameter) {
    const auto* hook = dynamic_cast<const GradientHook*>(
        torch::autograd::impl::post_acc_grad_hooks(parameter).get());
    return hook != nullptr && !hook->target_.expired();
  }

  // Whether another reducer that lives averages them as well, before this one.
  static bool is_second_on(const at::Tensor& parameter) {
    const auto* hook = dynamic_cast<const GradientHook*>(
        torch::autograd::impl::post_acc_grad_hooks(parameter).get());
    if (hook == nullptr) return false;
    const auto* inner = dynamic_cast<const GradientHook*>(hook->before_.get());
    return inner != nullptr && !inner->target_.expired();
  }

  bool is_for(const std::shared_ptr<Reducer*>& target) const { return target_.lock() == target; }
  std::unique_ptr<PostAccumulateGradHook> take_before() { return std::move(before_); }

 private:
  std::unique_ptr<PostAccumulateGradHook> before_;
  std::weak_ptr<Reducer*> target_;
  std::function<void(Reducer&)> call_;
};

}  // namespace lockstep
