// DdpOptions::optimizer: the step is taken in backward, a bucket at a time. An optimizer leaves out
// parameters without a gradient, so those of a bucket are updated while only they have one.

#include <lockstep/error.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/cause.h"
#include "base/text.h"
#include "ddp/reducer.h"
#include "world/exchange.h"

namespace lockstep {

namespace {

std::size_t num_parameters_of(const torch::optim::Optimizer& optimizer) {
  std::size_t sum = 0;
  for (const auto& group : optimizer.param_groups()) sum += group.params().size();
  return sum;
}

}  // namespace

// Collective: a problem of one rank is an error on all.
void Reducer::check_optimizer() {
  num_optimized_ = num_parameters_of(*options_.optimizer);
  const std::string problem = find_problem_of_optimizer();
  const Cause mine{.kind = ErrorKind::kUsage, .rank = world_.global_rank(), .message = problem};
  throw_first_cause(world_, exchange_texts(world_, problem.empty() ? std::string() : to_text(mine)),
                    {.rank = world_.global_rank(), .operation = "DistributedDataParallel"});
}

void Reducer::note_changed_optimizer() {
  if (num_parameters_of(*options_.optimizer) != num_optimized_) {
    note_problem(find_problem_of_optimizer());
  }
}

std::string Reducer::find_problem_of_optimizer() const {
  if (dynamic_cast<const torch::optim::LBFGS*>(options_.optimizer) != nullptr) {
    return "DdpOptions::optimizer is an LBFGS, which needs all gradients at once.\n"
           "Call its step() after backward().";
  }
  std::unordered_set<const c10::TensorImpl*> others;
  for (const auto& group : options_.optimizer->param_groups()) {
    for (const at::Tensor& one : group.params()) {
      if (one.requires_grad()) others.insert(one.unsafeGetTensorImpl());
    }
  }
  for (const Slot& slot : slots_) {
    if (others.erase(slot.parameter.unsafeGetTensorImpl()) > 0) continue;
    return text::format(
        "DdpOptions::optimizer does not have the parameter {}.\n"
        "Give it all parameters that this wrapper trains, or call its step() after backward().",
        slot.name);
  }
  if (others.empty()) return {};
  return text::format(
      "DdpOptions::optimizer has {} parameters that this wrapper does not train: it would update "
      "them once per bucket.\nGive it the parameters of the wrapped model alone, and call rewrap() "
      "after add_param_group().",
      others.size());
}

// Updates what has a gradient. Nothing is left for another step.
void Reducer::step_in_backward() {
  try {
    options_.optimizer->step();
  } catch (const std::exception& error) {
    const std::int64_t step = stats_.steps();
    drop_step();
    throw UsageError(
        {.rank = world_.global_rank(), .step = step, .operation = operation()},
        text::format("The optimizer's step() in backward() failed.\n{}", error.what()));
  }
  for (const Slot& slot : slots_) slot.parameter.mutable_grad() = at::Tensor();
}

void Reducer::step_bucket_by_bucket() {
  // Dense ones have none by now: their buckets were posted.
  std::vector<at::Tensor> sparse;
  for (const Slot& slot : slots_) {
    sparse.push_back(std::exchange(slot.parameter.mutable_grad(), at::Tensor()));
  }
  for (Bucket& bucket : buckets_.all()) {
    wait_for(bucket);
    scale(bucket);
    for (const std::size_t one : bucket.plan.slots) hand_out(one);
    step_in_backward();
    ++step_.num_stepped;
  }
  if (std::ranges::none_of(slots_, &Slot::is_sparse)) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].is_sparse) continue;
    slots_[i].parameter.mutable_grad() = sparse[i];
    hand_out(i);
  }
  step_in_backward();
}

}  // namespace lockstep
