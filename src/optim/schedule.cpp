#include <lockstep/error.h>
#include <lockstep/optim.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/text.h"

namespace lockstep::optim {
namespace {

void check_steps(const char* curve, std::int64_t steps) {
  if (steps >= 1) return;
  throw UsageError({.operation = curve},
                   text::format("{} steps were asked for.\nGive 1 or more.", steps));
}

// From `from` at 0 to `to` at 1, along half a cosine.
double ease(double from, double to, double part) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

// From `first` to `middle` in the part `rising` of the steps, then to `last`.
Curve cycle(std::int64_t steps, double rising, double first, double middle, double last) {
  const double peak = rising * static_cast<double>(steps) - 1;
  const double end = static_cast<double>(steps) - 1;
  return [=](std::int64_t step) {
    const auto at = static_cast<double>(std::min(step, steps - 1));
    if (at <= peak) return peak > 0 ? ease(first, middle, at / peak) : middle;
    return end > peak ? ease(middle, last, (at - peak) / (end - peak)) : last;
  };
}

void set_momentum(torch::optim::OptimizerOptions& options, double momentum) {
  const auto set_beta1 = [&](auto* of_adam) {
    of_adam->betas({momentum, std::get<1>(of_adam->betas())});
  };
  if (auto* const sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) {
    sgd->momentum(momentum);
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) {
    rmsprop->momentum(momentum);
  } else if (auto* const adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) {
    set_beta1(adam);
  } else if (auto* const adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options)) {
    set_beta1(adamw);
  } else {
    throw UsageError(
        {.operation = "Schedule"},
        "This optimizer has no momentum to schedule.\nUse SGD, RMSprop, Adam or AdamW, "
        "or leave the third argument out.");
  }
}

}  // namespace

Curve linear(std::int64_t steps, double from, double to) {
  check_steps("linear", steps);
  return [=](std::int64_t step) {
    return from +
           (to - from) * static_cast<double>(std::min(step, steps)) / static_cast<double>(steps);
  };
}

Curve cosine(std::int64_t steps, double floor) {
  check_steps("cosine", steps);
  return [=](std::int64_t step) {
    return ease(1, floor, static_cast<double>(std::min(step, steps)) / static_cast<double>(steps));
  };
}

Curve stairs(std::int64_t steps, double gamma) {
  check_steps("stairs", steps);
  return [=](std::int64_t step) {
    const std::int64_t stair = step / steps;
    return std::pow(gamma, static_cast<double>(stair));
  };
}

Curve one_cycle(std::int64_t steps, const OneCycle& options) {
  check_steps("one_cycle", steps);
  return cycle(steps, options.rising, options.first, 1, options.last);
}

Curve one_cycle_momentum(std::int64_t steps, const OneCycleMomentum& options) {
  check_steps("one_cycle_momentum", steps);
  return cycle(steps, options.rising, options.high, options.low, options.high);
}

Curve warm_up(std::int64_t steps, Curve then) {
  check_steps("warm_up", steps);
  return [steps, then = std::move(then)](std::int64_t step) {
    return step < steps ? static_cast<double>(step + 1) / static_cast<double>(steps)
                        : then(step - steps);
  };
}

double scaled_lr(double base, const World& world) { return base * world.size(); }

Schedule::Schedule(torch::optim::Optimizer& optimizer, Curve curve, Curve momentum)
    : optimizer_(optimizer), curve_(std::move(curve)), momentum_(std::move(momentum)) {
  for (const auto& group : optimizer.param_groups()) base_lrs_.push_back(group.options().get_lr());
  apply();
}

void Schedule::step() {
  ++steps_;
  apply();
}

double Schedule::lr() const { return base_lrs_.empty() ? 0 : base_lrs_[0] * curve_(steps_); }

void Schedule::check_state(const State& state) const {
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // what a double counts exactly
  if (state.base_lrs.size() != base_lrs_.size() || state.steps < 0 || state.steps > kMost) {
    throw UsageError(
        {.operation = "Schedule"},
        text::format("The state has {} learning rates and {} steps, but the optimizer has "
                     "{} groups.\nLoad the state of a run with the same groups.",
                     state.base_lrs.size(), state.steps, base_lrs_.size()));
  }
}

void Schedule::load_state(const State& state) {
  check_state(state);
  steps_ = state.steps;
  base_lrs_ = state.base_lrs;
  apply();
}

void Schedule::apply() {
  const double factor = curve_(steps_);
  for (std::size_t i = 0; i < base_lrs_.size(); ++i) {
    torch::optim::OptimizerOptions& options = optimizer_.param_groups()[i].options();
    options.set_lr(base_lrs_[i] * factor);
    if (momentum_) set_momentum(options, momentum_(steps_));
  }
}

}  // namespace lockstep::optim
