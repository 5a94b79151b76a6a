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
#include "world/translate.h"

namespace lockstep {

using Flag = StepNumbers::Flag;

bool Reducer::is_check_due() const {
  return options_.check_every > 0 && (stats_.steps() + 1) % options_.check_every == 0;
}

// Backward has ended: what is missing is posted, and the numbers.
void Reducer::post_rest() {
  if (step_.is_at_end) return;
  step_.is_at_end = true;
  step_.wait_began = StepStats::Clock::now();
  const bool is_complete =
      std::ranges::all_of(slots_, [](const Slot& slot) { return slot.has_fired; });
  if (step_.problem.empty() && !is_joined_ && (!is_complete || is_check_due())) {
    note_problem(watch_.find_addition(slots_));
  }
  post_ready(true);
  take_weights();                                         // if there is no bucket
  if (!buckets_.all().empty() && !options_.hook) return;  // they are behind the last bucket
  try {
    write_numbers();
    step_.numbers_work = start_mean(buckets_.control());
  } catch (...) {
    explain(std::current_exception(), "all_reduce of the last numbers of a step");
  }
}

void Reducer::finish() {
  post_rest();
  // On their own, the numbers are looked at first: a step that is dropped leaves no traces in a
  // hook.
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
    drop_step();
    throw;
  } catch (...) {
    explain(std::current_exception(), "all_reduce of the last numbers of a step");
  }
  numbers_.read_from(buckets_.control());
  // Not while a rank without steps of its own is behind: it could not save.
  must_stop_ = numbers_.any(Flag::kStop) && !numbers_.any(Flag::kNeedsState);
  if (numbers_.any(Flag::kProblem)) throw_problems();
  if (numbers_.num_active() == 0) {  // nobody has data any more: this was the last round
    if (numbers_.any(Flag::kNeedsState)) take_state_from(numbers_.first_active());
    return end_step();
  }
  if (is_apart) wait_for_all();
  const auto all_done = StepStats::Clock::now();
  if (!buckets_.all().empty()) {
    first_gradients_.compare(buckets_.all().front().flat, stats_.steps(), numbers_, world_.rank(),
                             world_.size());
  }
  scale_by_weights();
  if (numbers_.any(Flag::kLate)) add_late();
  hand_out_gradients();
  if (has_buffers_ && options_.buffers != BufferSync::kOff) sync_buffers();
  stats_.end(numbers_, world_.size(), buckets_.all(), hook_comm_.bytes_sent(), wait_began,
             all_done);
  order_.agree(world_, slots_);
  end_step();
  // A rank that joined without steps of its own is behind until the end.
  if (is_due && world_.size() > 1 && !numbers_.any(Flag::kNeedsState))
    check_same_tensors(world_, state(), stats_.steps());
  stats_.end_step();
}

// The one place where a step ends, however it does.
void Reducer::end_step() {
  step_ = {};
  hook_comm_.end_step();
  num_local_ = 0;
}

void Reducer::wait_for_all() {
  auto& buckets = buckets_.all();
  for (Bucket& bucket : buckets) {
    try {
      if (bucket.complete) {
        bucket.complete();
      } else {
        bucket.work->wait();
      }
    } catch (...) {
      explain(std::current_exception(), text_of(bucket));
    }
  }
}

void Reducer::write_numbers() {
  numbers_.clear();
  numbers_.set(Flag::kProblem, !step_.problem.empty());
  numbers_.set(Flag::kWeighted, step_.weight != 1);
  numbers_.set(Flag::kNeedsState, needs_state_);
  numbers_.set(Flag::kDiffers, first_gradients_.differ());
  numbers_.set(Flag::kStop, is_asked_to_stop_ && is_asked_to_stop_());
  numbers_.set_active(!is_joined_);
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

// Every rank throws the same: the first rank's problem.
void Reducer::throw_problems() {
  const Cause mine{
      .kind = ErrorKind::kUsage,
      .rank = world_.rank(),
      .message = step_.problem + "\nThe gradients of this step are dropped on all ranks."};
  const std::vector<std::string> causes =
      exchange_texts(world_, step_.problem.empty() ? std::string() : to_text(mine));
  drop_step();
  throw_first_cause(world_, causes,
                    {.rank = world_.rank(), .step = stats_.steps(), .operation = operation()});
}

// No gradient of a step that failed may be taken for an averaged one.
void Reducer::drop_step() {
  for (Slot& slot : slots_) {
    if (slot.is_sparse || buckets_.all()[slot.bucket].is_posted) {
      slot.parameter.mutable_grad() = at::Tensor();
    }
  }
  end_step();
}

// The mean was taken as if all ranks had weight 1. Weights are whole numbers that need more digits
// than a bf16 bucket has, so they are added up apart: here, only in steps that use them, or ahead
// of all buckets (weighs_first_).
void Reducer::scale_by_weights() {
  if (!numbers_.any(Flag::kWeighted)) return;
  const auto total = weighs_first_
                         ? step_.weights[0].item<double>()
                         : world_.all_reduce(at::tensor(step_.weight, at::kDouble)).item<double>();
  if (total == 0) {
    drop_step();
    throw UsageError({.rank = world_.rank(), .step = stats_.steps(), .operation = operation()},
                     "All ranks gave the weight 0: a mean of no samples does not exist.\n"
                     "Leave out the step, on all ranks, or call join() on ranks out of data.");
  }
  step_.scale = !weighs_first_ ? world_.size() / total : options_.hook ? 1 : world_.size();
  if (step_.scale == 1) return;
  for (Bucket& bucket : buckets_.all()) bucket.flat.mul_(step_.scale);
}

// Gradients that came after their bucket was posted (a backward within backward, used twice) make a
// second round, on all ranks.
void Reducer::add_late() {
  for (Bucket& bucket : buckets_.all()) {
    const at::Tensor more = at::zeros_like(bucket.flat);
    for (std::size_t i = 0; i < bucket.plan.slots.size(); ++i) {
      const Slot& slot = slots_[bucket.plan.slots[i]];
      if (!slot.is_late) continue;
      const at::Tensor place = more.narrow(0, bucket.plan.offsets[i], slot.view.numel());
      place.as_strided(slot.view.sizes(), slot.view.strides(), place.storage_offset())
          .copy_(slot.parameter.grad());
    }
    weigh(more, step_.factor);
    try {
      start_mean(more.is_complex() ? at::view_as_real(more) : more)->wait();
    } catch (...) {
      explain(std::current_exception(), text_of(bucket));
    }
    bucket.flat.add_(more, step_.scale);
  }
}

// A parameter that has a gradient on any rank has the mean on all; one that has none keeps none.
void Reducer::hand_out_gradients() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!numbers_.is_present(i)) {
      slot.parameter.mutable_grad() = at::Tensor();
    } else if (slot.is_sparse) {
      slot.parameter.mutable_grad() =
          mean_of_sparse(world_, slot.parameter.grad(), slot.parameter, step_.factor, step_.scale);
    } else {
      slot.parameter.mutable_grad() = slot.view;
    }
  }
}

// Written so that autograd does not see it: a graph that is still to be run keeps its buffers.
void Reducer::sync_buffers() {
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
  const int root = numbers_.first_active();
  move_packed(copied, [&](const at::Tensor& packed) { world_.broadcast(packed, root); });
}

void Reducer::take_state_from(int root) {
  std::vector<at::Tensor> tensors;
  for (const Slot& slot : slots_) tensors.push_back(slot.parameter);
  for (const NamedTensor& one : watch_.frozen()) tensors.push_back(one.tensor);
  for (const NamedTensor& one : watch_.buffers()) tensors.push_back(one.tensor);
  move_packed(tensors, [&](const at::Tensor& packed) { world_.broadcast(packed, root); });
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

std::string Reducer::text_of(const Bucket& bucket) const {
  const std::size_t index = static_cast<std::size_t>(&bucket - buckets_.all().data());
  const std::size_t more = bucket.plan.slots.size() - 1;
  const auto kib = static_cast<double>(bucket.flat.nbytes()) / 1024;
  return text::format("all_reduce of bucket {}{} ({}{}, {:.1f} {})", index,
                      options_.name.empty() ? "" : " of " + options_.name,
                      slots_[bucket.plan.slots.front()].name,
                      more == 0 ? "" : text::format(" and {} more", more),
                      kib < 1024 ? kib : kib / 1024, kib < 1024 ? "KiB" : "MiB");
}

void Reducer::explain(std::exception_ptr error, const std::string& what) {
  drop_step();
  try {
    rethrow_translated(error, world_.members(), world_.rank(), "all_reduce", what);
  } catch (const Error& known) {
    throw_error(known.kind(),
                {.rank = world_.rank(),
                 .peer = known.peer(),
                 .step = stats_.steps(),
                 .operation = operation()},
                text::format("{} failed.\n{}", what, known.message()));
  }
}

}  // namespace lockstep
