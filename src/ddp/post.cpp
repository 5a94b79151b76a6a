// The reducer's buckets while backward runs: gradients are moved in, and full ones are sent.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "ddp/reducer.h"

namespace lockstep {
namespace {

// Whether memory can be copied byte by byte from one to the other.
bool has_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && b.is_cpu() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_conj() &&
         !a.is_neg();
}

}  // namespace

void Reducer::send_weight_ahead() {
  const std::vector<double> mine = {step_.weight, step_.weight == 1 ? 0.0 : 1.0};
  step_.weights = at::tensor(mine);  // in main memory: the host reads them while backward runs
  std::vector<at::Tensor> tensors = {step_.weights};
  try {
    step_.weights_work = sharers().backend()->allreduce(tensors, {});
  } catch (...) {
    explain(std::current_exception(), "weights");
  }
}

// This rank's share of the whole: at most 1, or, for a hook, 1 if all ranks have the same.
void Reducer::take_weights() {
  if (!step_.weights_work) return;
  try {
    std::exchange(step_.weights_work, {})->wait();
  } catch (...) {
    explain(std::current_exception(), "weights");
  }
  const auto total = step_.weights[0].item<double>();
  const bool is_weighted = step_.weights[1].item<double>() > 0;
  if (!is_weighted) return;
  if (step_.is_own) {  // nobody shares
    step_.factor = 1;
    return;
  }
  // A part that is out of data has gradients of zero. All ranks hear of other parts without weight.
  if (total == 0 && step_.part && !is_joined_) {
    note_problem(
        "All ranks of its part gave the weight 0: a mean of no samples does not exist.\n"
        "Leave out the step, on all ranks, or call join() on ranks out of data.");
  }
  const double share = total == 0 ? 0 : step_.weight / total;
  step_.factor = options_.hook ? share * sharers().size() : share;
}

// Whether a gradient can be averaged in a bucket.
bool Reducer::is_dense(const Slot& slot) {
  const at::Tensor& grad = slot.parameter.grad();
  if (grad.layout() != at::kStrided) {
    note_problem(
        text::format("The gradient of {} is sparse.\nName the parameter in "
                     "DdpOptions::sparse, on all ranks.",
                     slot.name));
    return false;
  }
  if (grad.requires_grad() && !has_warned_of_graph_) {
    has_warned_of_graph_ = true;
    Log(world_.global_rank())
        .warning(
            "backward(create_graph): the averaged gradients have no graph; for gradients of "
            "gradients use torch::autograd::grad");
  }
  return true;
}

// Makes .grad a view of the bucket, in one pass at most. False if it is of a kind that cannot be.
bool Reducer::move_in(Slot& slot) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  buckets_.all()[slot.buckets.front()].writers.note(slot.shape.device);
  if (grad.is_same(slot.view)) return true;
  if (!is_dense(slot)) return false;
  if (grad.data_ptr() != slot.view.data_ptr() || grad.strides() != slot.view.strides()) {
    if (has_same_layout(grad, slot.view)) {
      if (grad.numel() != 0)
        std::memcpy(slot.view.data_ptr(), grad.const_data_ptr(), grad.nbytes());
    } else {
      slot.view.copy_(grad);
    }
  }
  grad = slot.view;
  return true;
}

// In plan order. The last bucket waits for the end of backward: it carries what is known only then.
void Reducer::post_ready(Until until) {
  auto& buckets = buckets_.all();
  while (step_.num_posted < buckets.size()) {
    Bucket& bucket = buckets[step_.num_posted];
    const bool is_last = step_.num_posted + 1 == buckets.size();
    const bool is_pending = until == Until::kNotReady && (bucket.num_pending > 0 || is_last);
    if (is_pending || (until != Until::kEnd && !has_place(bucket, until))) return;
    post(bucket);
    ++step_.num_posted;
  }
}

void Reducer::post(Bucket& bucket) {
  take_weights();
  const std::size_t index = step_.num_posted;
  const at::Device device = bucket.flat.device();
  bucket.writers.note(device);
  if (shares_gradients()) {
    copy_in(bucket);
  } else {
    for (const std::size_t one : bucket.plan.slots) {
      Slot& slot = slots_[one];
      at::Tensor& grad = slot.parameter.mutable_grad();
      slot.is_present = step_.problem.empty() && grad.defined() && move_in(slot);
      if (!slot.is_present) slot.view.zero_();
      grad = at::Tensor();  // until the mean is there; what autograd adds meanwhile goes elsewhere
    }
  }
  bucket.is_posted = true;
  stats_.post();
  try {
    // Left before an error is explained: that is done in the caller's stream.
    const auto in_stream = options_.hook ? hook_stream_.enter(device) : std::nullopt;
    bucket.writers.order_before_current(device);
    if (options_.check_finite) check_finite(bucket);
    weigh(bucket.own, step_.factor);
    if (turns_.are_on()) add_turns(bucket);
    if (options_.hook) {
      GradBucket view{.index = static_cast<int>(index), .epoch = epoch_, .flat = bucket.flat};
      for (const std::size_t one : bucket.plan.slots) {
        view.gradients.push_back(slots_[one].view);
        view.names.push_back(slots_[one].name);
      }
      bucket.complete = options_.hook->start(std::move(view), hook_comm_);
      return;
    }
    if (stats_.steps() == 0 && index == 0 && step_.weight == 1 && world_.size() > 1 &&
        !turns_.are_on())
      first_gradients_.keep(my_part(bucket.own));
    if (index + 1 == buckets_.all().size() && !are_numbers_apart_) write_numbers();
    if (turns_.are_exchanged()) return post_exchange(bucket);
    bucket.bytes_given = static_cast<std::int64_t>(bucket.wire.nbytes());
    bucket.work = shares_gradients() ? start_shared_mean(bucket) : start_mean_of(bucket);
  } catch (...) {
    // A device's engine that has failed may refuse all that follows. The numbers of the step, in
    // main memory, tell all ranks why, and nobody uses its buckets.
    if (has_streams(device)) note_failures();
    if (has_streams(device) && !step_.problem.empty()) {
      step_.is_broken = true;
      return;
    }
    explain(std::current_exception(), text_of(bucket));
  }
}

void Reducer::check_finite(const Bucket& bucket) {
  const auto is_finite = [](const at::Tensor& numbers) {
    return at::isfinite(numbers).all().item<bool>();
  };
  if (is_finite(bucket.own)) return;
  for (std::size_t i = 0; i < bucket.plan.slots.size(); ++i) {
    const std::size_t one = bucket.plan.slots[i];
    if (is_finite(bucket.own.narrow(0, bucket.plan.offsets[i], bucket.plan.counts[i]))) continue;
    note_problem(text_of_not_finite(slots_[one]));
  }
}

std::string Reducer::text_of_not_finite(const Slot& slot) {
  return text::format(
      "The gradient of {} is not finite on this rank.\nLook at its samples and its loss, or lower "
      "the learning rate.",
      slot.name);
}

c10::intrusive_ptr<c10d::Work> Reducer::start_mean(const at::Tensor& tensor, const World& world,
                                                   c10d::ReduceOp op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<at::Tensor> tensors = {tensor};
  return world.backend()->allreduce(tensors, options);
}

// With logical ranks the engine adds up those that each rank plays.
c10::intrusive_ptr<c10d::Work> Reducer::start_mean_of(const Bucket& bucket) {
  if (turns_.are_on() && world_.size() > 1) return turns_.mean().start_all_reduce(bucket.wire);
  return start_mean(bucket.wire, world_,
                    turns_.divisor() > 1 ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG);
}

// Lets the engine do what has become possible. Buckets complete in the order posted.
void Reducer::poll() {
  if (options_.hook) return hook_comm_.poll();
  auto& buckets = buckets_.all();
  while (step_.num_completed < step_.num_posted) {
    const Bucket& next = buckets[step_.num_completed];
    if (next.work && !next.work->isCompleted()) return;
    if (next.exchange && !next.exchange->is_first_half_done()) return;
    ++step_.num_completed;
  }
}

}  // namespace lockstep
