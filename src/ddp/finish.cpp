// The reducer when backward has ended: the rest is posted, all ranks' flags are read, and the means
// are handed out as gradients.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>

#include "base/cause.h"
#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/reducer.h"
#include "ddp/sparse.h"
#include "world/exchange.h"
#include "world/packed.h"

namespace lockstep {

using Flag = StepNumbers::Flag;

bool Reducer::is_check_due() const {
  return options_.check_every > 0 && (stats_.steps() + 1) % options_.check_every == 0;
}

// Backward has ended: what is missing is posted, and the numbers. Without a wait, buckets that have
// no place yet are left, and what comes after them.
void Reducer::post_rest(bool may_wait) {
  if (!step_.is_at_end) end_of_backward();
  if (step_.is_all_posted) return;
  post_ready(may_wait ? Until::kEnd : Until::kFirstWait);
  if (step_.num_posted < buckets_.all().size()) return;
  step_.is_all_posted = true;
  take_weights();                                              // if there is no bucket
  if (!buckets_.all().empty() && !are_numbers_apart_) return;  // they are behind the last bucket
  note_failures();
  try {
    write_numbers();
    step_.numbers_work = start_mean(buckets_.control(), world_);
  } catch (...) {
    explain(std::current_exception(), "the last numbers of a step");
  }
}

void Reducer::end_of_backward() {
  step_.is_at_end = true;
  step_.wait_began = StepStats::Clock::now();
  gauges_->set(Doing::kWaiting);
  const bool is_complete =
      std::ranges::all_of(slots_, [](const Slot& slot) { return slot.has_fired; });
  if (step_.problem.empty() && !is_joined_ && (!is_complete || is_check_due())) {
    note_problem(watch_.find_addition(slots_));
  }
  if (options_.optimizer != nullptr) note_changed_optimizer();
}

void Reducer::finish() {
  post_rest(true);
  try {
    finish_posted();
  } catch (const Error& error) {
    if (step_.phase != Phase::kIdle) drop_failed_step(error.kind());
    throw;
  }
}

void Reducer::finish_posted() {
  // On their own, the numbers are looked at first: a step that is dropped leaves no traces in a
  // hook. A rank that is lost is found by them, too, where the host does not wait for buckets.
  const auto wait_began = step_.wait_began;
  const bool is_due = is_check_due();
  const bool is_apart = step_.numbers_work != nullptr;
  try {
    if (is_apart) {
      step_.numbers_work->wait();
    } else {
      wait_for_all();
    }
  } catch (const Error&) {
    throw;
  } catch (...) {
    explain(std::current_exception(), "the last numbers of a step");
  }
  numbers_.read_from(buckets_.control_mean());
  if (numbers_.num_active() > 0) is_followed_ = numbers_.any(Flag::kFollowed);
  // Not while a rank without steps of its own is behind: it could not save.
  must_stop_ = numbers_.any(Flag::kStop) && !numbers_.any(Flag::kNeedsState);
  must_reform_ = numbers_.any(Flag::kReform);
  if (numbers_.any(Flag::kProblem)) throw_problems();
  if (numbers_.num_active() == 0) {  // nobody has data any more: this was the last round
    order_after_posted();
    if (numbers_.any(Flag::kNeedsState)) take_state_from(rank_with_data(), true);
    return end_step();
  }
  if (numbers_.any(Flag::kEndsEarly)) throw_early_end();
  // Late gradients need all means first, and a first step tells whether ranks have data of their
  // own.
  const bool is_by_bucket =
      options_.optimizer != nullptr && stats_.steps() > 0 && !numbers_.any(Flag::kLate);
  if (is_apart && !is_by_bucket) wait_for_all();
  auto all_done = StepStats::Clock::now();
  find_scale();
  if (is_by_bucket) {
    step_bucket_by_bucket();
    all_done = StepStats::Clock::now();
  } else {
    if (!buckets_.all().empty()) {
      first_gradients_.compare(my_means(buckets_.all().front()), stats_.steps(), numbers_, world_);
    }
    for (Bucket& bucket : buckets_.all()) scale(bucket);
    if (numbers_.any(Flag::kLate)) add_late();
    for (std::size_t i = 0; i < slots_.size(); ++i) hand_out(i);
    if (shares_gradients()) hand_out_shared();
    if (options_.optimizer != nullptr) step_in_backward();
  }
  if (has_buffers_ && options_.buffers != BufferSync::kOff) sync_buffers();
  stats_.end(numbers_, world_.size(), buckets_.all(), hook_comm_.bytes_sent(), wait_began,
             all_done);
  order_.agree(world_, slots_);
  keep_unfinished();
  end_step();
  if (options_.hook) options_.hook->end_step();
  // A rank that joined without steps of its own is behind until the end.
  if (is_due && !numbers_.any(Flag::kNeedsState)) compare_replicas();
  stats_.end_step();
  note_step();
}

void Reducer::note_step() {
  if (!gauges_->take_steps(number_)) return;
  const std::chrono::duration<double, std::milli> waited(stats_.get().waiting_ms);
  gauges_->end_step(first_step_ + stats_.steps(), stats_.last_end(),
                    std::chrono::duration_cast<std::chrono::nanoseconds>(waited),
                    stats_.get().bytes);
}

// Those that must be equal: of all ranks, or of a part each. All ranks hear of a part that is not.
void Reducer::compare_replicas() {
  if (world_.size() == 1) return;
  if (!options_.hook || !options_.hook->is_local()) {
    return check_same_tensors(world_, state(), stats_.steps());
  }
  const std::optional<World> part = options_.hook->part();
  if (!part) return;
  std::string difference;
  try {
    check_same_tensors(*part, state(), stats_.steps());
  } catch (const MismatchError&) {
    difference = to_text(cause_of(std::current_exception(), world_.global_rank()));
  }
  throw_first_cause(
      world_, exchange_texts(world_, difference),
      {.rank = world_.global_rank(), .step = stats_.steps(), .operation = "replica check"});
}

// The one place where a step ends, however it does. The current stream is behind all that was done
// to the buckets, and who writes there next comes behind it.
void Reducer::end_step() {
  for (Bucket& bucket : buckets_.all()) bucket.writers.begin(bucket.flat.device());
  step_ = {};
  turns_.reset();
  hook_comm_.end_step();
  num_local_ = 0;
  if (sharing()) sharing()->set_local(false);
}

void Reducer::wait_for_all() {
  // The second halves of all exchanges travel together.
  for (Bucket& bucket : buckets_.all()) {
    if (!bucket.exchange) continue;
    try {
      bucket.exchange->start_second_half();
    } catch (...) {
      explain(std::current_exception(), text_of(bucket));
    }
  }
  for (Bucket& bucket : buckets_.all()) wait_for(bucket);
}

void Reducer::wait_for(Bucket& bucket) {
  if (bucket.is_taken) return;
  try {
    if (bucket.complete) {
      {
        const auto in_stream = hook_stream_.enter(bucket.flat.device());
        bucket.complete();
      }
      hook_stream_.order_before_current(bucket.flat.device());
    } else if (turns_.are_exchanged()) {
      finish_exchange(bucket);
    } else {
      try {
        bucket.work->wait();
      } catch (...) {
        // The numbers have gone: what fails from here on is a later step's error, on all ranks.
        if (!has_streams(bucket.flat.device()) || !bucket.work->exception()) throw;
      }
    }
    keep_for_current_stream(bucket.flat);
    if (is_sliced_) keep_for_current_stream(bucket.own);
    if (shares_gradients()) take_out(bucket);
  } catch (...) {
    explain(std::current_exception(), text_of(bucket));
  }
}

void Reducer::write_numbers() {
  numbers_.clear();
  numbers_.set(Flag::kProblem, !step_.problem.empty());
  numbers_.set(Flag::kWeighted, step_.weight != 1 || turns_.is_weighted());
  numbers_.set(Flag::kNeedsState, needs_state_);
  numbers_.set(Flag::kDiffers, first_gradients_.differ());
  numbers_.set(Flag::kEndsEarly,
               turns_.ends_early() || (is_joined_ && uneven_.throw_on_early_termination));
  numbers_.set(Flag::kFollowed, step_.is_followed);
  numbers_.set(Flag::kSkips, is_joined_ && is_skipping_);
  numbers_.set(Flag::kBroken, step_.is_broken);
  numbers_.set(Flag::kStop, is_asked_to_stop_ && is_asked_to_stop_());
  numbers_.set(Flag::kReform, is_asked_to_reform_ && is_asked_to_reform_());
  if (turns_.are_on()) {
    for (const int one : turns_.with_data()) numbers_.set_active(one);
  } else if (!is_joined_) {
    numbers_.set_active(world_.rank());
  }
  numbers_.set_step_ms(stats_.ms_since_last_step());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const bool is_present = slot.is_sparse
                                ? step_.problem.empty() && slot.parameter.grad().defined()
                                : slot.is_present || slot.is_late;
    if (is_present) numbers_.set_present(i);
    if (slot.is_late) numbers_.set(Flag::kLate, true);
  }
  numbers_.write_to(buckets_.control());
}

// The mean was taken as if all ranks had weight 1. Weights are whole numbers that need more digits
// than a bf16 bucket has, so they are added up apart: here, only in steps that use them, or ahead
// of all buckets (weighs_first_).
void Reducer::find_scale() {
  if (!numbers_.any(Flag::kWeighted)) return;
  const double total = weighs_first_ ? step_.weights[0].item<double>() : total_weight();
  if (total == 0 && !step_.part) {  // of a part: take_weights()
    drop_step();
    throw UsageError(
        {.rank = world_.global_rank(), .step = stats_.steps(), .operation = operation()},
        "All ranks gave the weight 0: a mean of no samples does not exist.\n"
        "Leave out the step, on all ranks, or call join() on ranks out of data.");
  }
  step_.scale = !weighs_first_ ? world_.logical_size() / total : options_.hook ? 1 : world_.size();
}

void Reducer::scale(Bucket& bucket) {
  if (turns_.divisor() > 1) {
    const at::Tensor sums = my_means(bucket);
    (sums.is_complex() ? at::view_as_real(sums) : sums).div_(turns_.divisor());
  }
  if (step_.scale != 1) my_means(bucket).mul_(step_.scale);
}

// Gradients that came after their bucket was posted (a backward within backward, used twice) make a
// second round, on all ranks.
void Reducer::add_late() {
  for (Bucket& bucket : buckets_.all()) {
    const at::Tensor more = at::zeros_like(bucket.own);
    for (std::size_t i = 0; i < bucket.plan.slots.size(); ++i) {
      const Slot& slot = slots_[bucket.plan.slots[i]];
      if (!slot.is_late) continue;
      const at::Tensor place = more.narrow(0, bucket.plan.offsets[i], bucket.plan.counts[i]);
      place.copy_(flat_of(slot, slot.parameter.grad())
                      .narrow(0, bucket.plan.firsts[i], bucket.plan.counts[i]));
    }
    weigh(more, step_.factor);
    try {
      if (!step_.is_own) {
        auto work = start_mean(more.is_complex() ? at::view_as_real(more) : more, sharers());
        work->wait();
        if (has_streams(more.device())) {
          unfinished_.add(std::move(work), "all_reduce",
                          text::format("{} of step {}", text_of(bucket), stats_.steps()));
        }
      }
    } catch (...) {
      explain(std::current_exception(), text_of(bucket));
    }
    my_means(bucket).add_(my_part(more), step_.scale);
  }
}

// A parameter that has a gradient on any rank has the mean on all, or in each part; one that has
// none keeps none. Where gradients stay each rank's own, sparse ones are where they are.
void Reducer::hand_out(std::size_t index) {
  const Slot& slot = slots_[index];
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!numbers_.is_present(index)) {
    grad = at::Tensor();
  } else if (!slot.is_sparse) {
    // With logical ranks 16-bit gradients are added up in f32, and rounded here, once.
    const bool is_rounded = turns_.are_on() && !options_.reduce_type && !shares_gradients();
    grad = shares_gradients() ? at::Tensor() : is_rounded ? slot.view.to(slot.type) : slot.view;
  } else if (!step_.is_own) {
    grad = mean_of_sparse(sharers(), grad, slot.parameter, step_.factor, step_.scale);
  }
}

// Written so that autograd does not see it: a graph that is still to be run keeps its buffers.
void Reducer::sync_buffers() {
  if (turns_.are_on()) {
    const bool are_averaged = options_.buffers == BufferSync::kMean;
    return turns_.finish_buffers(world_, watch_.buffers(), are_averaged, numbers_.first_active());
  }
  if (world_.size() == 1) return;
  std::vector<at::Tensor> averaged;
  std::vector<at::Tensor> copied;
  for (const NamedTensor& one : watch_.buffers()) {
    const bool is_mean = options_.buffers == BufferSync::kMean &&
                         (one.tensor.is_floating_point() || one.tensor.is_complex());
    (is_mean ? averaged : copied).push_back(one.tensor);
  }
  move_packed(averaged,
              [&](const at::Tensor& packed) { world_.all_reduce(packed, ReduceOp::AVG); });
  const int root = rank_with_data();
  move_packed(copied, [&](const at::Tensor& packed) { world_.broadcast(packed, root); });
}

void Reducer::take_state_from(int root, bool are_apart) {
  std::vector<at::Tensor> tensors;
  for (const Slot& slot : slots_) tensors.push_back(slot.parameter);
  for (const NamedTensor& one : watch_.frozen()) tensors.push_back(one.tensor);
  const std::size_t num_parameters = tensors.size();
  for (const NamedTensor& one : watch_.buffers()) tensors.push_back(one.tensor);
  move_packed(tensors, [&](const at::Tensor& packed) { world_.broadcast(packed, root); });
  // On the root, too: what is derived from them is then the same on all. Parameters that were equal
  // before are not written: master weights that were loaded with them stay.
  if (!are_apart)
    tensors.erase(tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(num_parameters));
  mark_written(tensors);
}

// What must be the same on all ranks.
std::vector<NamedTensor> Reducer::state() const {
  std::vector<NamedTensor> all;
  for (const Slot& slot : slots_) all.push_back({slot.name, slot.parameter});
  all.insert(all.end(), watch_.frozen().begin(), watch_.frozen().end());
  if (options_.buffers != BufferSync::kOff) {
    for (NamedTensor& one : watch_.buffers()) all.push_back(std::move(one));
  }
  return all;
}

}  // namespace lockstep
