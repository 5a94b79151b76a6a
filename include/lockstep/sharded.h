// optim::Sharded: an optimizer for a model that is wrapped with DdpOptions::shard. The ranks of a
// host share out the elements of the parameters, and what the optimizer keeps exists once. On
// devices all ranks do, and each keeps what belongs to its elements.
//
//   lockstep::DistributedDataParallel ddp(model, world, {.shard = lockstep::Shard::kGradients});
//   lockstep::optim::Sharded<lockstep::optim::AdamW> optimizer(model->parameters(), 1e-3);
#pragma once

#include <lockstep/export.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::optim {

namespace detail {

template <typename T, typename... Known>
struct FirstBase {
  using Type = void;
};
template <typename T, typename First, typename... Others>
struct FirstBase<T, First, Others...> {
  using Type = std::conditional_t<std::is_base_of_v<First, T>, First,
                                  typename FirstBase<T, Others...>::Type>;
};
// That of LibTorch's optimizers that T is, or is derived from; void: none whose elements do not
// depend on each other.
template <typename T>
using KindOf = typename FirstBase<T, torch::optim::AdamW, torch::optim::Adam, torch::optim::SGD,
                                  torch::optim::RMSprop, torch::optim::Adagrad>::Type;

inline torch::optim::AdamWOptions options_of(torch::optim::AdamW*);
inline torch::optim::AdamOptions options_of(torch::optim::Adam*);
inline torch::optim::SGDOptions options_of(torch::optim::SGD*);
inline torch::optim::RMSpropOptions options_of(torch::optim::RMSprop*);
inline torch::optim::AdagradOptions options_of(torch::optim::Adagrad*);

// The step of any of them (src/optim/sharded.cpp).
class LOCKSTEP_API ShardedStep {
 public:
  // An optimizer of the same type for one parameter, with these options.
  using Make = std::unique_ptr<torch::optim::Optimizer> (*)(
      const at::Tensor& parameter, const torch::optim::OptimizerOptions& options);

  explicit ShardedStep(Make make);
  ~ShardedStep();
  ShardedStep(const ShardedStep&) = delete;
  ShardedStep& operator=(const ShardedStep&) = delete;

  // `plain` is the step for parameters that nobody shares.
  at::Tensor run(torch::optim::Optimizer& optimizer,
                 const torch::optim::Optimizer::LossClosure& closure,
                 const std::function<void()>& plain);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

// T with another step(): each rank of a host updates a part of the elements, with the bits that T
// alone has. T is AdamW, Adam, SGD, RMSprop or Adagrad, of torch::optim or of lockstep::optim, or
// derived from one, with a step that depends on options and state alone and treats each element on
// its own: pieces go through optimizers that are made for them, of the options. With LibTorch's
// own, which cut tensors by threads, the bits are those of T with one thread per rank. Options,
// groups, state, schedules, GradScaler and Checkpointer are T's: its state are whole tensors in
// shared memory, on devices this rank's elements in one dimension. Parameters of models without
// sharding are updated as T does.
//
// step() is collective for the ranks of a host, on devices for all. Throws, on all of them:
// MismatchError (options, or which parameters have gradients, differ), PeerLostError and
// TimeoutError (they say whether parameters are those before or after the step), UsageError (a rank
// wrote to parameters by itself).
template <typename T>
class Sharded final : public T {
  static_assert(!std::is_void_v<detail::KindOf<T>>,
                "optim::Sharded takes AdamW, Adam, SGD, RMSprop and Adagrad, and what is derived "
                "from them: they treat each element on its own. LBFGS and others look at whole "
                "tensors.");

 public:
  using T::T;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    return step_.run(*this, closure, [this] { T::step(); });
  }

 private:
  static std::unique_ptr<torch::optim::Optimizer> make(
      const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) {
    using Options = decltype(detail::options_of(static_cast<detail::KindOf<T>*>(nullptr)));
    return std::make_unique<T>(std::vector<at::Tensor>{parameter},
                               static_cast<const Options&>(options));
  }

  detail::ShardedStep step_{&make};
};

}  // namespace lockstep::optim
