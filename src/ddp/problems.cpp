// What goes wrong in a step of the reducer: it is told to all ranks, and the step is dropped.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>

#include "base/cause.h"
#include "base/text.h"
#include "ddp/reducer.h"
#include "world/exchange.h"
#include "world/translate.h"

namespace lockstep {

using Flag = StepNumbers::Flag;

namespace {

constexpr const char* kGather = "all_gather";  // of parameters that ranks have updated in slices

}  // namespace

void Reducer::note_problem(const std::string& problem, ErrorKind kind) {
  if (!step_.problem.empty() || problem.empty()) return;
  step_.problem = problem;
  step_.kind_of_problem = kind;
}

// A collective on a device may fail at any time, on this rank alone, also after the host has ended
// its step: the others hear of it as of any other problem.
void Reducer::note_failures() {
  if (slices_) {
    for (auto& work : slices_->take_works()) {
      unfinished_.add(std::move(work), kGather, "parameters");
    }
  }
  if (const auto failure = unfinished_.take_failure()) {
    note_failure(*failure,
                 failure->operation == kGather
                     ? " after step() had returned, so this rank does not have all of them"
                     : " after its backward() had returned, so its gradients were no means",
                 "\nLoad a checkpoint from before that step.");
  }
  for (const Bucket& bucket : buckets_.all()) {
    if (!bucket.work || !has_streams(bucket.flat.device()) || !bucket.work->isCompleted()) continue;
    if (const auto error = bucket.work->exception()) {
      note_failure({error, name_of_reduction(), text_of(bucket)}, "", "");
    }
  }
  for (const auto& work : hook_comm_.works_of_devices_) {
    if (!work->isCompleted()) continue;
    if (const auto error = work->exception()) {
      note_failure({error, "A collective", "the hook " + options_.hook->text()}, "", "");
    }
  }
}

void Reducer::note_failure(const UnfinishedWorks::Failure& failure, const std::string& when,
                           const std::string& advice) {
  try {
    rethrow_translated(failure.error, world_.members(), world_.rank(), failure.operation,
                       failure.subject);
  } catch (const Error& known) {
    note_problem(text::format("{} of {} failed{}.\n{}{}", failure.operation, failure.subject, when,
                              known.message(), advice),
                 known.kind());
  }
}

// Every rank throws the same: the first rank's problem.
void Reducer::throw_problems() {
  const Cause mine{
      .kind = step_.kind_of_problem,
      .rank = world_.global_rank(),
      .message = step_.problem + "\nThe gradients of this step are dropped on all ranks."};
  const std::vector<std::string> causes =
      exchange_texts(world_, step_.problem.empty() ? std::string() : to_text(mine));
  if (numbers_.any(Flag::kBroken)) abort_devices();  // collectives that not all have started
  drop_step();
  throw_first_cause(
      world_, causes,
      {.rank = world_.global_rank(), .step = stats_.steps(), .operation = operation()});
}

// A step that cannot end is not worth computing.
void Reducer::throw_if_ended() const {
  if (!has_ended_ || !has_ended_()) return;
  throw PeerLostError(
      {.rank = world_.global_rank(), .step = stats_.steps(), .operation = operation()},
      "A rank was lost.\nAn elastic job goes on without it (lockstep/elastic.h).");
}

// All ranks know it from the numbers.
void Reducer::throw_early_end() {
  std::vector<int> without_data;
  const bool is_logical = turns_.are_on();
  for (int player = 0; player < world_.logical_size(); ++player) {
    if (numbers_.is_active(player)) continue;
    without_data.push_back(is_logical ? player : world_.global_rank(player));
  }
  drop_step();
  throw UsageError(
      {.rank = world_.global_rank(),
       .peer = is_logical ? turns_.mean().holder_of(without_data.front()) : without_data.front(),
       .step = stats_.steps(),
       .operation = operation()},
      text::format("{} {} is out of data and others are not, with "
                   "throw_on_early_termination.\nEnd the training on all ranks, or "
                   "give them equally many batches.",
                   is_logical ? "Logical rank" : "Rank", text::join(without_data, ", ")));
}

// What the engine still does to buckets is done before anybody writes there again. In main memory
// the host waits, on a device the current stream does.
void Reducer::order_after_posted() {
  bool is_cpu_lost = false;  // the first failure is the end of what an engine does there
  for (const Bucket& bucket : buckets_.all()) {
    const at::Device device = bucket.flat.device();
    if (!bucket.is_posted || (device.is_cpu() && is_cpu_lost)) continue;
    try {
      if (bucket.work) {
        bucket.work->wait();
      } else if (options_.hook) {
        const auto in_stream = hook_stream_.enter(device);
        hook_comm_.order_after_started(device.is_cpu());
      }
    } catch (const std::exception&) {  // NOLINT: the step counts no more, whatever it was
      is_cpu_lost |= device.is_cpu();
    }
    if (options_.hook) hook_stream_.order_before_current(device);
  }
}

// Collectives on a device that the host has not seen the end of: a later step looks.
void Reducer::keep_unfinished() {
  const std::int64_t step = stats_.steps() - 1;  // it has been counted
  for (Bucket& bucket : buckets_.all()) {
    if (!bucket.work || !has_streams(bucket.flat.device())) continue;
    unfinished_.add(std::exchange(bucket.work, {}), name_of_reduction(),
                    text::format("{} of step {}", text_of(bucket), step));
  }
  for (auto& work : hook_comm_.take_works_of_devices()) {
    unfinished_.add(std::move(work), "A collective",
                    text::format("the hook {} in step {}", options_.hook->text(), step));
  }
}

// No gradient of a step that failed may be taken for an averaged one.
void Reducer::drop_step() {
  order_after_posted();
  if (shares_gradients()) sharing()->set_gradients({});  // their memory was written again
  if (turns_.are_on() && has_buffers_) turns_.restore_buffers(watch_.buffers());
  for (Slot& slot : slots_) {
    slot.own = at::Tensor();
    if (slot.is_sparse || buckets_.all()[slot.buckets.front()].is_posted) {
      slot.parameter.mutable_grad() = at::Tensor();
    }
  }
  end_step();
}

void Reducer::drop_failed_step(ErrorKind kind) {
  if (kind == ErrorKind::kPeerLost || kind == ErrorKind::kTimeout) abort_devices();
  drop_step();
}

// A collective on a device whose peer is gone may never end, and what is queued behind it neither:
// the engine gives it up before a stream waits for it.
void Reducer::abort_devices() {
  if (std::ranges::none_of(slots_,
                           [](const Slot& slot) { return has_streams(slot.shape.device); })) {
    return;
  }
  try {
    if (step_.part) step_.part->backend()->abort();
    world_.backend()->abort();
  } catch (const std::exception&) {  // NOLINT: the first error is the one to tell
  }
}

std::string Reducer::text_of(const Bucket& bucket) const {
  const std::size_t index = static_cast<std::size_t>(&bucket - buckets_.all().data());
  const std::size_t more = bucket.plan.slots.size() - 1;
  const auto kib = static_cast<double>(bucket.own.nbytes()) / 1024;
  return text::format(
      "bucket {}{} ({}{}, {:.1f} {})", index, options_.name.empty() ? "" : " of " + options_.name,
      slots_[bucket.plan.slots.front()].name, more == 0 ? "" : text::format(" and {} more", more),
      kib < 1024 ? kib : kib / 1024, kib < 1024 ? "KiB" : "MiB");
}

void Reducer::explain(std::exception_ptr error, const std::string& subject) {
  try {
    rethrow_translated(error, world_.members(), world_.rank(), name_of_reduction(), subject);
  } catch (const Error& known) {
    const std::string half_done =
        step_.num_stepped == 0
            ? ""
            : text::format(
                  "\nThe parameters of {} of {} buckets have taken this step already "
                  "(DdpOptions::optimizer): go on from a checkpoint.",
                  step_.num_stepped, buckets_.all().size());
    drop_failed_step(known.kind());
    throw_error(known.kind(),
                {.rank = world_.global_rank(),
                 .peer = known.peer(),
                 .step = stats_.steps(),
                 .operation = operation()},
                text::format("{} of {} failed.\n{}{}", name_of_reduction(), subject,
                             known.message(), half_done));
  }
}

}  // namespace lockstep
