// PeriodicAverager and HierarchicalAverager: the mean over ranks of weights, and of an optimizer's
// states, every few steps.

#include <ATen/ATen.h>
#include <lockstep/averaging.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>

#include <algorithm>

#include "base/text.h"
#include "ddp/sharing.h"
#include "world/exchange.h"
#include "world/packed.h"

namespace lockstep {
namespace {

bool knows_states_of(torch::optim::Optimizer& optimizer) {
  return dynamic_cast<torch::optim::Adam*>(&optimizer) ||
         dynamic_cast<torch::optim::AdamW*>(&optimizer) ||
         dynamic_cast<torch::optim::SGD*>(&optimizer);
}

template <typename State>
void add_adam(torch::optim::OptimizerParamState& state, std::vector<at::Tensor>& tensors) {
  auto* const adam = dynamic_cast<State*>(&state);
  if (!adam) return;
  for (const at::Tensor& one : {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()}) {
    if (one.defined()) tensors.push_back(one);
  }
}

void add_states(torch::optim::OptimizerParamState& state, std::vector<at::Tensor>& tensors) {
  add_adam<torch::optim::AdamParamState>(state, tensors);
  add_adam<torch::optim::AdamWParamState>(state, tensors);
  auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state);
  if (sgd && sgd->momentum_buffer().defined()) tensors.push_back(sgd->momentum_buffer());
}

// The parameters that require a gradient become the mean over ranks.
void average(torch::optim::Optimizer& optimizer, const World& world, bool averages_state) {
  if (world.size() == 1) return;
  const at::NoGradGuard no_grad;
  auto* const masters = dynamic_cast<optim::MasterWeights*>(&optimizer);
  std::vector<at::Tensor> tensors;
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      // Whether or not it has a gradient now: it may have had one since the last average.
      if (!parameter.requires_grad()) continue;
      if (Sharing::of(parameter)) {
        throw UsageError({.rank = world.global_rank(), .operation = "averaging of weights"},
                         "Ranks share the model (DdpOptions::shard): there are no replicas to "
                         "average.\nUse Shard::kNone with averagers.");
      }
      // Made where there is none: a rank without one would average another type than the others.
      const at::Tensor master = masters ? masters->master_for(parameter) : at::Tensor();
      tensors.push_back(master.defined() ? master : parameter);
      if (master.defined()) rounded.emplace_back(parameter, master);
      if (!averages_state) continue;
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) add_states(*found->second, tensors);
    }
  }
  move_packed(tensors, [&](const at::Tensor& packed) { world.all_reduce(packed, ReduceOp::AVG); });
  for (const auto& [parameter, master] : rounded) {
    parameter.data().copy_(master);
    masters->set_master(parameter, master);
  }
}

// What averagers have in common. Ranks compare their options first, so that what is wrong is an
// error of all of them.
void check_options(torch::optim::Optimizer& optimizer, const World& world, const char* operation,
                   std::int64_t start_step, bool averages_state, const std::string& rest) {
  const bool can_average = !averages_state || knows_states_of(optimizer);
  const std::string mine =
      text::format("start_step {}, averages_state {}{}, {}", start_step, averages_state,
                   can_average ? "" : " of an optimizer whose states cannot be averaged", rest);
  const auto all = exchange_texts(world, mine);
  const auto other = std::ranges::find_if(all, [&](const auto& one) { return one != all[0]; });
  if (other != all.end()) {
    const int rank = static_cast<int>(other - all.begin());
    throw MismatchError(
        {.rank = world.global_rank(),
         .peer = world.global_rank(world.rank() == rank ? 0 : rank),
         .operation = operation},
        text::format("Options differ between ranks.\n  rank {}: {}\n  rank {}: "
                     "{}\nGive all ranks the same.",
                     world.global_rank(0), all[0], world.global_rank(rank), *other));
  }
  if (start_step < 0) {
    throw UsageError({.rank = world.global_rank(), .operation = operation},
                     text::format("start_step is {}.\nGive 0 or more.", start_step));
  }
  if (!can_average) {
    throw UsageError({.rank = world.global_rank(), .operation = operation},
                     "The states of this kind of optimizer cannot be averaged.\nUse Adam, AdamW or "
                     "SGD, or leave averages_state out.");
  }
}

void check_steps(std::int64_t steps, const World& world, const char* operation) {
  if (steps >= 0) return;
  throw UsageError({.rank = world.global_rank(), .operation = operation},
                   text::format("{} steps cannot be.\nLoad what was saved.", steps));
}

std::string text_of(const std::vector<AveragingLevel>& levels) {
  std::vector<std::string> texts;
  for (const AveragingLevel& one : levels) {
    texts.push_back(text::format("{{{}, {}}}", one.period, one.group_size));
  }
  return texts.empty() ? "none" : text::join(texts, ", ");
}

// Each group is a part of the next level's, and the last one has all ranks.
void check_levels(const std::vector<AveragingLevel>& levels, const World& world) {
  bool is_good = !levels.empty() && levels.back().group_size == world.size();
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const AveragingLevel& one = levels[i];
    is_good = is_good && one.period >= 1 && one.group_size >= 1;
    if (i == 0 || !is_good) continue;
    const AveragingLevel& below = levels[i - 1];
    is_good = one.period > below.period && one.group_size > below.group_size &&
              one.group_size % below.group_size == 0;
  }
  if (is_good) return;
  throw UsageError({.rank = world.global_rank(), .operation = "HierarchicalAverager"},
                   text::format("The levels are {}, in a world of {}.\nGive each a longer period "
                                "than the one before, and a multiple of its ranks; the last one "
                                "has {}.",
                                text_of(levels), world.size(), world.size()));
}

}  // namespace

PeriodicAverager::PeriodicAverager(torch::optim::Optimizer& optimizer, World world,
                                   const PeriodicOptions& options)
    : optimizer_(optimizer), world_(std::move(world)), options_(options) {
  check_options(optimizer, world_, "PeriodicAverager", options.start_step, options.averages_state,
                text::format("period {}", options.period));
  if (options.period < 1) {
    throw UsageError({.rank = world_.global_rank(), .operation = "PeriodicAverager"},
                     text::format("period is {}.\nGive 1 or more.", options.period));
  }
}

bool PeriodicAverager::step() {
  const std::int64_t local = steps_++ - options_.start_step;
  if (local < 0 || local % options_.period != 0) return false;
  average(optimizer_, world_, options_.averages_state);
  return true;
}

void PeriodicAverager::load_steps(std::int64_t steps) {
  check_steps(steps, world_, "PeriodicAverager");
  steps_ = steps;
}

HierarchicalAverager::HierarchicalAverager(torch::optim::Optimizer& optimizer, const World& world,
                                           const HierarchicalOptions& options)
    : optimizer_(optimizer), options_(options) {
  check_options(optimizer, world, "HierarchicalAverager", options.start_step,
                options.averages_state, "levels " + text_of(options.levels));
  check_levels(options.levels, world);
  for (const AveragingLevel& one : options.levels) {
    const bool is_whole = one.group_size == world.size();
    groups_.push_back(is_whole ? world : *world.split(world.rank() / one.group_size));
  }
}

// As Python: periods count from the first step of all, and the longest that is due wins, since its
// group has the ranks of the others'.
int HierarchicalAverager::step() {
  const std::int64_t step = steps_++;
  if (step < options_.start_step) return 0;
  for (std::size_t i = groups_.size(); i-- > 0;) {
    if (step % options_.levels[i].period != 0) continue;
    average(optimizer_, groups_[i], options_.averages_state);
    return groups_[i].size();
  }
  return 0;
}

void HierarchicalAverager::load_steps(std::int64_t steps) {
  check_steps(steps, groups_.back(), "HierarchicalAverager");
  steps_ = steps;
}

}  // namespace lockstep
