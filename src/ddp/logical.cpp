// The reducer with logical ranks: each rank plays some of them in turns, and the mean is over all.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <lockstep/error.h>

#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "ddp/gradient_hook.h"
#include "ddp/platform.h"
#include "ddp/reducer.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostExchangedBytes = 64 << 20;

}  // namespace

// The options are the same on all ranks, and so are these errors. What would not give the same bits
// with another number of ranks is refused with any number.
void Reducer::check_logical() {
  if (!turns_.are_on()) return;
  std::string problem;
  if (options_.hook) {
    problem = text::format("the hook {} changes what a rank gives, and a rank gives a sum",
                           options_.hook->text());
  } else if (std::ranges::any_of(slots_, &Slot::is_sparse)) {
    problem = "sparse gradients are added up in the order of ranks";
  } else if (has_devices()) {
    problem = "the engines of devices add up in an order of their own";
  } else if (options_.buffers == BufferSync::kOff && !watch_.buffers().empty()) {
    problem = "with BufferSync::kOff a rank's buffers come from the logical ranks that it plays";
  } else if (options_.shard != Shard::kNone && !options_.reduce_type &&
             std::ranges::any_of(slots_,
                                 [](const Slot& slot) { return slot.shape.type != slot.type; })) {
    problem =
        "gradients of 16-bit parameters are added up in f32, which optim::Sharded must know: set "
        "DdpOptions::reduce_type to at::kFloat, and use master weights";
  }
  if (problem.empty()) return;
  throw UsageError({.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
                   text::format("With logical ranks the result does not depend on the number of "
                                "ranks, and this cannot be had with what else is asked for: {}.\n"
                                "Leave out one of them.",
                                problem));
}

Turn Reducer::play() {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  throw_if_ended();
  if (step_.phase != Phase::kIdle) abandon();
  const bool is_last = *no_sync_depth_ == 0 && num_local_ + 1 >= accumulate_ && turns_.is_last();
  if (!turns_.are_on()) return {.logical_rank = world_.rank(), .is_last = is_last};
  if (at::get_num_threads() != turns_.num_threads()) {
    throw UsageError(
        {.rank = world_.global_rank(), .step = stats_.steps(), .operation = "play"},
        text::format("LibTorch uses {} threads, and {} when the model was wrapped: the bits would "
                     "differ.\nCall at::set_num_threads() before the model is wrapped, and not "
                     "again.",
                     at::get_num_threads(), turns_.num_threads()));
  }
  if (pending() == 0) drop_old_gradients();
  begin_turn();
  return {.logical_rank = turns_.mean().held().first + turns_.turn(), .is_last = is_last};
}

void Reducer::begin_turn() {
  // Models that are trained together have random numbers of their own.
  const std::uint64_t seed = hash_bytes(options_.name.data(), options_.name.size(), world_.seed());
  turns_.begin(num_local_, seed, first_step_ + stats_.steps(),
               has_buffers_ ? watch_.buffers() : std::vector<NamedTensor>());
}

Reducer::LogicalState Reducer::logical_state() const {
  const MutexLock lock(mutex_);
  if (!turns_.are_on()) return {};
  return {.num_ranks = turns_.mean().num_leaves(),
          .seed = world_.seed(),
          .num_threads = at::get_num_threads(),
          .platform = platform(),
          .steps = first_step_ + stats_.steps()};
}

void Reducer::check_logical_state(const LogicalState& state) const {
  LogicalState here = logical_state();
  here.steps = state.steps;
  if (here == state && state.steps >= 0) return;
  const auto text_of = [](const LogicalState& one) {
    return one.num_ranks == 0 ? std::string("no logical ranks")
                              : text::format("{} logical ranks with seed {} and {} threads each",
                                             one.num_ranks, one.seed, one.num_threads);
  };
  const std::string there = std::exchange(here.platform, state.platform);
  const ErrorPlace place{.rank = world_.global_rank(), .operation = "load"};
  if (here != state || state.steps < 0) {
    throw UsageError(
        place, text::format("The run had {} at step {}, here are {}: the bits would differ.\nGo on "
                            "with what the run began with (JoinOptions::logical_ranks and threads, "
                            "seed_all).",
                            text_of(state), state.steps, text_of(here)));
  }
  if (is_any_platform_allowed()) {
    Log(world_.global_rank())
        .warning("load: the run was on {}, here is {}: the bits will differ", state.platform,
                 there);
    return;
  }
  throw UsageError(place, text::format("The run was on {}, here is {}: LibTorch adds up in another "
                                       "order, and the bits would differ.\nGo on with the same "
                                       "LibTorch on the same CPU, or set LOCKSTEP_ANY_PLATFORM=1 "
                                       "to go on with other bits.",
                                       state.platform, there));
}

void Reducer::load_logical_state(const LogicalState& state) { set_num_steps(state.steps); }

// A gradient from before the step would count once for each rank, not for each logical rank. Zeros
// are left by zero_grad(/*set_to_none=*/false), in the memory of buckets.
void Reducer::drop_old_gradients() {
  for (const Slot& slot : slots_) {
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (grad.defined() && grad.any().item<bool>()) {
      throw UsageError(
          {.rank = world_.global_rank(), .step = stats_.steps(), .operation = "play"},
          text::format("The gradient of {} from before this step is still there.\nCall "
                       "zero_grad() before play(): with logical ranks gradients are not added up "
                       "over steps.",
                       slot.name));
    }
    grad = at::Tensor();
  }
}

void Reducer::check_turn() {
  std::string problem = turns_.problem();
  if (!turns_.has_begun()) {
    problem =
        "play() was not called before this backward().\nWith logical ranks each backward is a part "
        "of a turn: call ddp.play() before its forward.";
  } else if (GradientHook::is_second_on(slots_.front().parameter)) {
    problem =
        "The model is wrapped twice, and with logical ranks the second wrapper would find no "
        "gradients.\nWrap it once.";
  }
  if (step_.phase == Phase::kSynchronised) return note_problem(problem);
  if (problem.empty() || problem == turns_.problem()) return;  // that is told in the last turn
  step_ = {};                                                  // as if it had not begun
  for (Slot& slot : slots_) slot.parameter.mutable_grad() = at::Tensor();
  throw UsageError({.rank = world_.global_rank(), .step = stats_.steps(), .operation = operation()},
                   problem);
}

void Reducer::note_late_turn(const Slot& slot) {
  note_problem(text::format(
      "The gradient of {} came again after its bucket was sent, from a backward within "
      "backward().\nWith logical ranks there is no second round: use "
      "torch::autograd::grad inside.",
      slot.name));
}

// Gradients of this logical rank are complete, and others are played after it.
void Reducer::end_turn() {
  if (is_joined_) weight_ = weight_without_data();
  const double weight = std::exchange(weight_, 1);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    at::Tensor grad = std::exchange(slot.parameter.mutable_grad(), at::Tensor());
    if (is_joined_) grad = at::Tensor();
    // It is weighed in place: not in memory of a bucket, or of another gradient.
    if (grad.defined() && weight != 1 && grad.storage().use_count() > 1) grad = grad.clone();
    at::Tensor flat = grad.defined() ? flat_of(slot, grad) : at::Tensor();
    if (flat.defined() && options_.check_finite && !at::isfinite(flat).all().item<bool>()) {
      turns_.note_problem(text_of_not_finite(slot));
    }
    if (flat.defined()) weigh(flat, weight);
    turns_.add(i, flat);
  }
  turns_.add_weight(weight, !is_joined_);
  if (is_joined_ && uneven_.throw_on_early_termination) turns_.end_early();
  if (has_buffers_) {
    turns_.note_buffers(watch_.buffers(), options_.buffers == BufferSync::kMean, !is_joined_);
  }
  turns_.end_turn();
  num_local_ = 0;
}

// The turns of this rank up to its last one, of which only the first may have gradients.
void Reducer::play_without_data() {
  while (turns_.are_on() && !turns_.is_last()) {
    begin_turn();
    end_turn();
    is_joined_ = true;
  }
  if (turns_.are_on()) begin_turn();
}

// To a bucket that has the last turn's gradients.
void Reducer::add_turns(Bucket& bucket) {
  const BucketPlan& plan = bucket.plan;
  for (std::size_t i = 0; i < plan.slots.size(); ++i) {
    Slot& slot = slots_[plan.slots[i]];
    if (!slot.is_folded) {
      const at::Tensor place = bucket.own.narrow(0, plan.offsets[i], plan.counts[i]);
      turns_.fold(plan.slots[i], plan.firsts[i], place, place);
    }
    slot.is_present = slot.is_present || turns_.is_present(plan.slots[i]);
  }
}

// Starts the exchange of this rank's sums, which are copied.
void Reducer::start_exchange(Bucket& bucket) {
  const BucketPlan& plan = bucket.plan;
  std::vector<at::Tensor> roots;
  for (std::size_t root = 0; root + 1 < turns_.mean().num_roots(); ++root) {
    // Behind it, where the last one has the numbers of the step, are zeros.
    roots.push_back(at::zeros_like(bucket.wire));
    const at::Tensor flat =
        bucket.own.is_complex()
            ? at::view_as_complex(roots.back().narrow(0, 0, 2 * plan.num_elements).view({-1, 2}))
            : roots.back().narrow(0, 0, plan.num_elements);
    for (std::size_t i = 0; i < plan.slots.size(); ++i) {
      turns_.copy_root(plan.slots[i], root, plan.firsts[i],
                       flat.narrow(0, plan.offsets[i], plan.counts[i]));
    }
  }
  roots.push_back(bucket.wire);
  bucket.exchange = turns_.mean().start(roots, bucket.wire);
}

// While backward runs only so much, as it is in memory twice: the rest when it is waited for. All
// ranks decide alike, so that they start the same exchanges in the same order.
void Reducer::post_exchange(Bucket& bucket) {
  bucket.bytes_given = static_cast<std::int64_t>(bucket.wire.nbytes() * turns_.mean().num_roots());
  step_.bytes_exchanged += bucket.wire.nbytes() * turns_.mean().most_roots();
  if (step_.bytes_exchanged <= kMostExchangedBytes) start_exchange(bucket);
}

void Reducer::finish_exchange(Bucket& bucket) {
  if (std::exchange(bucket.is_exchanged, true)) return;
  if (!bucket.exchange) start_exchange(bucket);
  bucket.exchange->finish();
  bucket.exchange.reset();
}

// Weights need not be whole numbers: they are added up in the order of logical ranks.
double Reducer::total_weight() {
  if (!turns_.are_on()) {
    return world_.all_reduce(at::tensor(step_.weight, at::kDouble)).item<double>();
  }
  const std::vector<double> mine = turns_.weights();
  const at::Tensor all = world_.all_reduce(at::tensor(mine, at::kDouble));
  double total = 0;
  for (std::int64_t i = 0; i < all.numel(); ++i) total += all[i].item<double>();
  return total;
}

}  // namespace lockstep
