// Fused steps. Parameters of one group that can go through one call of the kernel are collected
// into a Batch: same type and device, same number of steps taken.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <tuple>

#include "base/text.h"
#include "ddp/sharing.h"

namespace lockstep::optim {
namespace {

using torch::optim::Optimizer;

struct Batch {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> states[3];  // as the kernel names them, by optimizer
  // Parameters whose memory has gaps go through the kernel as copies.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;

  // The kernels walk over memory, so all tensors of a parameter must lie as it does. `master` is
  // what is updated instead of it; undefined: there is none.
  void add(const at::Tensor& parameter, const at::Tensor& master) {
    at::Tensor target = master.defined() ? master : parameter.detach();
    if (!target.is_non_overlapping_and_dense()) {
      target = target.contiguous();
      copies.emplace_back(parameter.detach(), target);
    }
    parameters.push_back(target);
    gradients.push_back(laid_out_as(target, parameter.grad()));
  }

  static at::Tensor laid_out_as(const at::Tensor& target, const at::Tensor& source) {
    if (source.sizes() == target.sizes() && source.strides() == target.strides() &&
        source.scalar_type() == target.scalar_type()) {
      return source;
    }
    return at::empty_like(target).copy_(source);
  }

  void finish() const {
    for (const auto& [parameter, copy] : copies) at::Tensor(parameter).copy_(copy);
  }
};

using Key = std::tuple<int, int, int, std::int64_t>;  // type, device, step

Key key_of(const at::Tensor& parameter, std::int64_t step) {
  return {static_cast<int>(parameter.scalar_type()), static_cast<int>(parameter.device().type()),
          static_cast<int>(parameter.device().index()), step};
}

at::Tensor run_closure(const Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode enabled(true);
  return closure();
}

void refuse_sparse(const at::Tensor& gradient) {
  if (gradient.layout() == at::kStrided) return;
  throw UsageError({.operation = "optimizer step"},
                   "A gradient is sparse, and the fused optimizers take dense ones.\nUse "
                   "torch::optim::SGD for parameters with sparse gradients.");
}

// State that was made elsewhere (an archive) may lie otherwise than its parameter.
at::Tensor state_for(const at::Tensor& target, const at::Tensor& held) {
  return held.defined() ? Batch::laid_out_as(target, held)
                        : at::zeros_like(target, target.options());
}

using MasterOf = std::function<at::Tensor(const at::Tensor& parameter)>;

template <typename State, typename Options, typename Kernel>
void adam_step(Optimizer& optimizer, const MasterOf& master_of, const Kernel& kernel) {
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    std::map<Key, Batch> batches;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      refuse_sparse(parameter.grad());
      auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (!slot) slot = std::make_unique<State>();
      auto& state = static_cast<State&>(*slot);
      state.step(state.step() + 1);
      const at::Tensor master = master_of(parameter);
      Batch& batch = batches[key_of(master.defined() ? master : parameter, state.step())];
      batch.add(parameter, master);
      const at::Tensor& target = batch.parameters.back();
      state.exp_avg(state_for(target, state.exp_avg()));
      state.exp_avg_sq(state_for(target, state.exp_avg_sq()));
      batch.states[0].push_back(state.exp_avg());
      batch.states[1].push_back(state.exp_avg_sq());
      if (options.amsgrad()) {
        state.max_exp_avg_sq(state_for(target, state.max_exp_avg_sq()));
        batch.states[2].push_back(state.max_exp_avg_sq());
      }
    }
    for (auto& [key, batch] : batches) {
      const std::vector<at::Tensor> steps(
          batch.parameters.size(),
          at::scalar_tensor(static_cast<double>(std::get<3>(key)),
                            batch.parameters.front().options().dtype(at::kFloat)));
      kernel(batch, steps, options);
      batch.finish();
    }
  }
}

}  // namespace

at::Tensor AdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss = run_closure(closure);
  adam_step<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(
      *this, [this](const at::Tensor& parameter) { return master_for(parameter); },
      [](const Batch& batch, const std::vector<at::Tensor>& steps,
         const torch::optim::AdamWOptions& options) {
        at::_fused_adamw_(batch.parameters, batch.gradients, batch.states[0], batch.states[1],
                          batch.states[2], steps, options.lr(), std::get<0>(options.betas()),
                          std::get<1>(options.betas()), options.weight_decay(), options.eps(),
                          options.amsgrad(), /*maximize=*/false);
      });
  for (const auto& group : param_groups()) round_to_parameters(group.params());
  return loss;
}

at::Tensor Adam::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss = run_closure(closure);
  adam_step<torch::optim::AdamParamState, torch::optim::AdamOptions>(
      *this, [this](const at::Tensor& parameter) { return master_for(parameter); },
      [](const Batch& batch, const std::vector<at::Tensor>& steps,
         const torch::optim::AdamOptions& options) {
        at::_fused_adam_(batch.parameters, batch.gradients, batch.states[0], batch.states[1],
                         batch.states[2], steps, options.lr(), std::get<0>(options.betas()),
                         std::get<1>(options.betas()), options.weight_decay(), options.eps(),
                         options.amsgrad(), /*maximize=*/false);
      });
  for (const auto& group : param_groups()) round_to_parameters(group.params());
  return loss;
}

at::Tensor SGD::step(LossClosure closure) {
  using State = torch::optim::SGDParamState;
  const at::NoGradGuard no_grad;
  at::Tensor loss = run_closure(closure);
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    std::map<Key, Batch> batches;  // the "step" is 0 before there is a momentum, then 1
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      refuse_sparse(parameter.grad());
      const auto found = state().find(parameter.unsafeGetTensorImpl());
      const bool is_first = found == state().end() ||
                            !static_cast<State&>(*found->second).momentum_buffer().defined();
      const at::Tensor master = master_for(parameter);
      Batch& batch = batches[key_of(master.defined() ? master : parameter, is_first ? 0 : 1)];
      batch.add(parameter, master);
      if (options.momentum() == 0) continue;
      auto& slot = state()[parameter.unsafeGetTensorImpl()];
      if (!slot) slot = std::make_unique<State>();
      auto& held = static_cast<State&>(*slot);
      held.momentum_buffer(state_for(batch.parameters.back(), held.momentum_buffer()));
      batch.states[0].push_back(held.momentum_buffer());
    }
    for (auto& [key, batch] : batches) {
      at::_fused_sgd_(batch.parameters, batch.gradients, batch.states[0], options.weight_decay(),
                      options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                      /*maximize=*/false, /*is_first_step=*/std::get<3>(key) == 0);
      batch.finish();
    }
    round_to_parameters(group.params());
  }
  return loss;
}

namespace {

void check_max_norm(double max_norm) {
  if (max_norm > 0) return;
  throw UsageError({.operation = "clip_grad_norm"},
                   text::format("max_norm is {}.\nGive a positive number.", max_norm));
}

// One wait for all that is on a device.
std::vector<double> norms_of(const std::vector<at::Tensor>& tensors) {
  std::vector<double> norms(tensors.size());
  std::map<std::string, std::vector<std::size_t>> places;  // by device
  for (std::size_t i = 0; i < tensors.size(); ++i) places[tensors[i].device().str()].push_back(i);
  for (const auto& [device, indexes] : places) {
    std::vector<at::Tensor> there;
    for (const std::size_t i : indexes) there.push_back(tensors[i]);
    const std::vector<at::Tensor> found = at::_foreach_norm(there, 2);
    const bool is_cpu = there.front().is_cpu();
    const at::Tensor values = is_cpu ? at::Tensor() : at::stack(found).to(at::kDouble).cpu();
    for (std::size_t i = 0; i < indexes.size(); ++i) {
      norms[indexes[i]] = is_cpu ? found[i].item<double>() : values.const_data_ptr<double>()[i];
    }
  }
  return norms;
}

// As Python's: a little less than max_norm, so that rounding does not exceed it.
constexpr double kLittle = 1e-6;

}  // namespace

at::Tensor clip_grad_norm_async(const std::vector<at::Tensor>& parameters, double max_norm) {
  check_max_norm(max_norm);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  bool is_shared = false;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
    is_shared |= shared_gradient_of(parameter).defined();
  }
  const bool is_on_device =
      !is_shared && !gradients.empty() && !gradients.front().is_cpu() &&
      std::ranges::all_of(gradients, [&](const at::Tensor& one) {
        return one.device() == gradients.front().device() && one.layout() == at::kStrided;
      });
  if (!is_on_device) return at::scalar_tensor(clip_grad_norm(parameters, max_norm), at::kDouble);
  const at::Tensor norms = at::stack(at::_foreach_norm(gradients, 2)).to(at::kDouble);
  const at::Tensor total = norms.pow(2).sum().sqrt();
  const at::Tensor scale = max_norm / (total + kLittle);
  at::_foreach_mul_(gradients, at::where(scale < 1, scale, at::ones_like(scale)));
  return total;
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                      bool must_be_finite) {
  check_max_norm(max_norm);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;  // in the order of parameters, so that the sum is the same
  std::vector<at::Tensor> own;
  std::vector<at::IntArrayRef> shapes;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor shared = shared_gradient_of(parameter);
    if (parameter.grad().defined()) own.push_back(parameter.grad());
    if (shared.defined() || parameter.grad().defined()) {
      gradients.push_back(shared.defined() ? shared : parameter.grad());
      shapes.push_back(parameter.sizes());
    }
  }
  if (gradients.empty()) return 0;
  const std::vector<double> own_norms = own.empty() ? std::vector<double>() : norms_of(own);
  const std::vector<double> shared_norms = norms_of_shared_gradients(parameters, norms_of);
  double squares = 0;
  std::size_t first = gradients.size();  // that is not finite
  for (std::size_t i = 0, k = 0; i + k < gradients.size();) {
    const bool is_own = i < own.size() && gradients[i + k].is_same(own[i]);
    const std::size_t place = i + k;
    const double value = is_own ? own_norms[i++] : shared_norms[k++];
    squares += value * value;
    if (!std::isfinite(value)) first = std::min(first, place);
  }
  const double total = std::sqrt(squares);
  if (!own.empty() && !shared_norms.empty() && !is_same_where_shared(parameters, total)) {
    throw UsageError({.operation = "clip_grad_norm"},
                     "The norm of the gradients is not the same on all ranks that share some of "
                     "them.\nClip gradients that are not averaged on their own.");
  }
  if (must_be_finite && !std::isfinite(total)) {
    first = std::min(first, gradients.size() - 1);
    throw UsageError(
        {.operation = "clip_grad_norm"},
        text::format(
            "The norm of the gradients is {}: of {} of them, the first that is not finite "
            "is number {}, of shape {}.\nLower the learning rate, look for bad samples, or "
            "use GradScaler with fp16. DdpOptions::check_finite names the rank and the "
            "parameter that they come from.",
            total, gradients.size(), first, c10::str(shapes[first])));
  }
  const double scale = max_norm / (total + kLittle);
  if (!(scale < 1)) return total;
  if (!own.empty()) at::_foreach_mul_(own, scale);
  change_shared_gradients(parameters, [&](const std::vector<at::Tensor>& parts) {
    at::_foreach_mul_(parts, scale);
    return 0.0;
  });
  return total;
}

}  // namespace lockstep::optim
