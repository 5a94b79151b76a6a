#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <lockstep/amp.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "ddp/gradient_hook.h"
#include "ddp/sharing.h"

namespace lockstep {
namespace {

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

}  // namespace

Autocast::Autocast(at::ScalarType type, at::DeviceType device)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      type_before_(at::autocast::get_autocast_dtype(device)) {
  if (type != at::kBFloat16 && type != at::kHalf) {
    throw UsageError({.operation = "Autocast"},
                     text::format("Autocast to {} was asked for.\nGive torch::kBFloat16 or "
                                  "torch::kHalf.",
                                  c10::toString(type)));
  }
  at::autocast::set_autocast_dtype(device, type);
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // Casts of parameters are kept for the scope; they must not survive the next step.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, type_before_);
}

GradScaler::GradScaler(World world, const ScalerOptions& options)
    : world_(std::move(world)), options_(options), scale_(options.scale) {
  if (!(options.scale > 0) || !(options.growth > 1) || !(options.backoff > 0) ||
      !(options.backoff < 1) || options.growth_interval < 1) {
    throw UsageError(
        {.rank = world_.global_rank(), .operation = "GradScaler"},
        text::format("The options are scale {}, growth {}, backoff {}, growth_interval {}.\nGive a "
                     "positive scale, growth above 1, backoff between 0 and 1, and 1 step or more.",
                     options.scale, options.growth, options.backoff, options.growth_interval));
  }
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return options_.enabled ? loss * scale_ : loss;
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  if (unscaled_.contains(&optimizer)) {
    throw UsageError({.rank = world_.global_rank(), .operation = "GradScaler"},
                     "unscale() was called twice for one step of an optimizer, or after its "
                     "step().\nCall update() once after the steps of all optimizers.");
  }
  const at::NoGradGuard no_grad;
  const auto divide = [&](const std::vector<at::Tensor>& gradients) {
    std::map<std::pair<at::ScalarType, at::DeviceType>, std::vector<at::Tensor>> alike;
    for (const at::Tensor& one : gradients) {
      alike[{one.scalar_type(), one.device().type()}].push_back(one);
    }
    double found = 0;
    for (auto& [key, list] : alike) {
      const auto options = list.front().options().dtype(at::kFloat);
      at::Tensor is_bad = at::zeros({}, options);
      const at::Tensor inverse = at::full({}, 1 / scale_, options);
      at::_amp_foreach_non_finite_check_and_unscale_(list, is_bad, inverse);
      found = std::max(found, is_bad.item<double>());
    }
    return found;
  };
  std::vector<at::Tensor> gradients;
  bool is_averaged = true;
  const std::vector<at::Tensor> parameters = parameters_of(optimizer);
  for (const at::Tensor& parameter : parameters) {
    is_averaged &= !parameter.requires_grad() || GradientHook::is_on(parameter);
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient._values();
    gradients.push_back(gradient);
  }
  double found = std::max(divide(gradients), change_shared_gradients(parameters, divide));
  if (!is_averaged) {
    found = world_.all_reduce(at::tensor(found, at::kDouble), ReduceOp::MAX).item<double>();
  }
  unscaled_[&optimizer] = {.has_overflow = found > 0};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!unscaled_.contains(&optimizer)) unscale(optimizer);
  Progress& progress = unscaled_.at(&optimizer);
  if (progress.has_stepped) {
    throw UsageError({.rank = world_.global_rank(), .operation = "GradScaler"},
                     "step() was called twice for an optimizer.\nCall update() once after the "
                     "steps of all optimizers.");
  }
  progress.has_stepped = true;
  if (!progress.has_overflow) {
    optimizer.step();
    return true;
  }
  for (const at::Tensor& parameter : parameters_of(optimizer)) {
    const auto sharing = Sharing::of(parameter);
    if (!sharing) continue;
    if (const auto slot = sharing->find(parameter)) sharing->drop_gradients({*slot});
  }
  return false;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (unscaled_.empty()) {
    throw UsageError({.rank = world_.global_rank(), .operation = "GradScaler"},
                     "update() was called, but no step().\nCall step(optimizer) first.");
  }
  const bool has_overflow =
      std::ranges::any_of(unscaled_, [](const auto& one) { return one.second.has_overflow; });
  unscaled_.clear();
  if (has_overflow) {
    scale_ *= options_.backoff;
    good_steps_ = 0;
    ++skipped_;
  } else if (++good_steps_ >= options_.growth_interval) {
    scale_ *= options_.growth;
    good_steps_ = 0;
  }
}

void GradScaler::check_state(const State& state) const {
  if (!(state.scale > 0) || !std::isfinite(state.scale)) {
    throw UsageError(
        {.rank = world_.global_rank(), .operation = "GradScaler"},
        text::format("The state has the scale {}.\nIt must be positive.", state.scale));
  }
}

void GradScaler::load_state(const State& state) {
  check_state(state);
  scale_ = state.scale;
  good_steps_ = state.good_steps;
  skipped_ = state.skipped;
  unscaled_.clear();
}

}  // namespace lockstep
