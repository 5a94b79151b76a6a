// What LibTorch's optimizers are made of: the names of their options, numbers and tensors.
//
// `options(o, visit)` and `numbers(s, visit)` show each value by name, `tensors(s, visit)` each
// tensor; `used(o)` are the names of those tensors that a step with these options has.
#pragma once

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace lockstep::optim {

template <typename Options>
void visit_adam_options(Options& o, const auto& visit) {
  visit("lr", o.lr());
  visit("eps", o.eps());
  visit("weight_decay", o.weight_decay());
  visit("amsgrad", o.amsgrad());
  visit("beta1", std::get<0>(o.betas()));
  visit("beta2", std::get<1>(o.betas()));
}
template <typename Options>
std::vector<std::string> adam_tensors(const Options& o) {
  if (o.amsgrad()) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"exp_avg", "exp_avg_sq"};
}
template <typename State>
void visit_adam_tensors(State& s, const auto& visit) {
  visit("exp_avg", s.exp_avg());
  visit("exp_avg_sq", s.exp_avg_sq());
  visit("max_exp_avg_sq", s.max_exp_avg_sq());
}

struct AdamWKind {
  using Optimizer = torch::optim::AdamW;
  using Options = torch::optim::AdamWOptions;
  using State = torch::optim::AdamWParamState;
  static constexpr const char* kName = "AdamW";
  static std::vector<std::string> used(const Options& o) { return adam_tensors(o); }
  static void options(Options& o, const auto& visit) { visit_adam_options(o, visit); }
  static void numbers(State& s, const auto& visit) { visit("step", s.step()); }
  static void tensors(State& s, const auto& visit) { visit_adam_tensors(s, visit); }
};

struct AdamKind {
  using Optimizer = torch::optim::Adam;
  using Options = torch::optim::AdamOptions;
  using State = torch::optim::AdamParamState;
  static constexpr const char* kName = "Adam";
  static std::vector<std::string> used(const Options& o) { return adam_tensors(o); }
  static void options(Options& o, const auto& visit) { visit_adam_options(o, visit); }
  static void numbers(State& s, const auto& visit) { visit("step", s.step()); }
  static void tensors(State& s, const auto& visit) { visit_adam_tensors(s, visit); }
};

struct SgdKind {
  using Optimizer = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* kName = "SGD";
  static std::vector<std::string> used(const Options& o) {
    if (o.momentum() == 0) return {};
    return {"momentum_buffer"};
  }
  static void options(Options& o, const auto& visit) {
    visit("lr", o.lr());
    visit("momentum", o.momentum());
    visit("dampening", o.dampening());
    visit("weight_decay", o.weight_decay());
    visit("nesterov", o.nesterov());
  }
  static void numbers(State&, const auto&) {}
  static void tensors(State& s, const auto& visit) {
    visit("momentum_buffer", s.momentum_buffer());
  }
};

struct RmsPropKind {
  using Optimizer = torch::optim::RMSprop;
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static constexpr const char* kName = "RMSprop";
  static std::vector<std::string> used(const Options& o) {
    std::vector<std::string> names = {"square_avg"};
    if (o.momentum() > 0) names.emplace_back("momentum_buffer");
    if (o.centered()) names.emplace_back("grad_avg");
    return names;
  }
  static void options(Options& o, const auto& visit) {
    visit("lr", o.lr());
    visit("alpha", o.alpha());
    visit("eps", o.eps());
    visit("weight_decay", o.weight_decay());
    visit("momentum", o.momentum());
    visit("centered", o.centered());
  }
  static void numbers(State& s, const auto& visit) { visit("step", s.step()); }
  static void tensors(State& s, const auto& visit) {
    visit("square_avg", s.square_avg());
    visit("momentum_buffer", s.momentum_buffer());
    visit("grad_avg", s.grad_avg());
  }
};

struct AdagradKind {
  using Optimizer = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr const char* kName = "Adagrad";
  static std::vector<std::string> used(const Options&) { return {"sum"}; }
  // Its constructor makes them, not its step: of groups that were added later there are none.
  static std::unique_ptr<State> first_state(const Options& o, const at::Tensor& parameter) {
    auto made = std::make_unique<State>();
    made->step(0);
    made->sum(at::full_like(parameter.detach(), o.initial_accumulator_value()));
    return made;
  }
  static void options(Options& o, const auto& visit) {
    visit("lr", o.lr());
    visit("lr_decay", o.lr_decay());
    visit("eps", o.eps());
    visit("weight_decay", o.weight_decay());
    visit("initial_accumulator_value", o.initial_accumulator_value());
  }
  static void numbers(State& s, const auto& visit) { visit("step", s.step()); }
  static void tensors(State& s, const auto& visit) { visit("sum", s.sum()); }
};

// Calls `use` with the kind of an optimizer, or of what it is derived from. False: it is another.
bool with_kind(torch::optim::Optimizer& optimizer, const auto& use) {
  const auto use_if = [&](auto kind) {
    if (dynamic_cast<typename decltype(kind)::Optimizer*>(&optimizer) == nullptr) return false;
    use(kind);
    return true;
  };
  return use_if(AdamWKind{}) || use_if(AdamKind{}) || use_if(SgdKind{}) || use_if(RmsPropKind{}) ||
         use_if(AdagradKind{});
}

}  // namespace lockstep::optim
