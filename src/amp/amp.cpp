#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <lockstep/amp.h>
#include <lockstep/error.h>

#include <cmath>
#include <map>

#include "base/text.h"

namespace lockstep {

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
        {.rank = world_.rank(), .operation = "GradScaler"},
        text::format("The options are scale {}, growth {}, backoff {}, growth_interval {}.\nGive a "
                     "positive scale, growth above 1, backoff between 0 and 1, and 1 step or more.",
                     options.scale, options.growth, options.backoff, options.growth_interval));
  }
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return loss * scale_; }

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (unscaled_ != nullptr) {
    throw UsageError({.rank = world_.rank(), .operation = "GradScaler"},
                     "unscale() was called twice for one step.\nCall update() after each step().");
  }
  const at::NoGradGuard no_grad;
  std::map<std::pair<at::ScalarType, at::DeviceType>, std::vector<at::Tensor>> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.is_sparse()) gradient = gradient._values();
      gradients[{gradient.scalar_type(), gradient.device().type()}].push_back(gradient);
    }
  }
  float found = 0;
  for (auto& [key, list] : gradients) {
    const auto options = list.front().options().dtype(at::kFloat);
    at::Tensor is_bad = at::zeros({}, options);
    const at::Tensor inverse = at::full({}, 1 / scale_, options);
    at::_amp_foreach_non_finite_check_and_unscale_(list, is_bad, inverse);
    found = std::max(found, is_bad.item<float>());
  }
  has_overflow_ = world_.all_reduce(at::tensor(found), ReduceOp::MAX).item<float>() > 0;
  unscaled_ = &optimizer;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (unscaled_ == nullptr) unscale(optimizer);
  if (has_overflow_) return false;
  optimizer.step();
  return true;
}

void GradScaler::update() {
  if (unscaled_ == nullptr) {
    throw UsageError({.rank = world_.rank(), .operation = "GradScaler"},
                     "update() was called, but no step().\nCall step(optimizer) first.");
  }
  unscaled_ = nullptr;
  if (has_overflow_) {
    scale_ *= options_.backoff;
    good_steps_ = 0;
    ++skipped_;
  } else if (++good_steps_ >= options_.growth_interval) {
    scale_ *= options_.growth;
    good_steps_ = 0;
  }
}

void GradScaler::load_state(const State& state) {
  if (!(state.scale > 0) || !std::isfinite(state.scale)) {
    throw UsageError(
        {.rank = world_.rank(), .operation = "GradScaler"},
        text::format("The state has the scale {}.\nIt must be positive.", state.scale));
  }
  scale_ = state.scale;
  good_steps_ = state.good_steps;
  skipped_ = state.skipped;
}

}  // namespace lockstep
