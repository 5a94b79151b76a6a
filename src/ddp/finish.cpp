// The reducer when backward has ended: the rest is posted, all ranks' flags are read, and the means
// are handed out as gradients.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>

#include "base/cause.h"
#include "base/log.h"
#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/reducer.h"
#include "world/exchange.h"
#include "world/packed.h"
#include "world/translate.h"

namespace lockstep {
namespace {

constexpr double kMaxMs = 60000;  // a time that fits every type of number

double ms_between(std::chrono::steady_clock::time_point from,
                  std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

}  // namespace

void Reducer::finish() {
  const auto began = Clock::now();
  bool is_complete = true;
  for (const Slot& slot : slots_) is_complete &= slot.has_fired;
  const bool is_check_due =
      options_.check_every > 0 && (stats_.steps + 1) % options_.check_every == 0;
  if (problem_.empty() && !is_joined_ && (!is_complete || is_check_due)) {
    const std::string addition = find_addition();
    if (!addition.empty()) note_problem(addition);
  }
  post_ready(true);
  try {
    if (buckets_.all().empty() || options_.hook) {
      write_control();
      control_work_ = start_mean(buckets_.control());
    }
    wait_for_all();
    if (control_work_) control_work_->wait();
  } catch (const Error&) {
    reset();
    throw;
  } catch (...) {
    explain(std::current_exception(), "all_reduce of the last numbers of a step");
  }
  const auto all_done = Clock::now();
  read_control();
  if (control_[kProblem] > 0) throw_problems();
  if (num_active_ == 0) {  // nobody has data any more: this was the last round
    if (control_[kNeedsState] > 0) take_state_from(first_active_);
    weight_ = 1;
    phase_ = Phase::kIdle;
    return;
  }
  look_at_first_gradients();
  scale_by_weights();
  if (control_[kLate] > 0) add_late();
  hand_out_gradients();
  if (has_buffers_ && options_.buffers != BufferSync::kOff) sync_buffers();
  ++stats_.steps;
  write_stats(began, all_done);
  if (!has_learnt_order_) learn_order();
  weight_ = 1;
  num_local_ = 0;
  phase_ = Phase::kIdle;
  if (is_check_due && world_.size() > 1) check_same_tensors(world_, state(), stats_.steps);
  last_end_ = Clock::now();
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

void Reducer::write_control() {
  control_.assign(static_cast<std::size_t>(num_control()), 0.0F);
  const auto set = [&](std::int64_t at, double value) {
    control_[static_cast<std::size_t>(at)] = static_cast<float>(value);
  };
  set(kProblem, problem_.empty() ? 0 : 1);
  set(kWeighted, weight_ == 1 ? 0 : 1);
  set(kNeedsState, needs_state_ ? 1 : 0);
  set(kDiffers, differs_ ? 1 : 0);
  set(kStop, is_asked_to_stop_ && is_asked_to_stop_() ? 1 : 0);
  set(active_at(world_.rank()), is_joined_ ? 0 : 1);
  set(time_at(world_.rank()), std::min(ms_between(last_end_, Clock::now()), kMaxMs));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const bool is_present = slot.is_sparse ? problem_.empty() && slot.parameter.grad().defined()
                                           : slot.is_present || slot.is_late;
    if (is_present) set(present_at(i), 1);
    if (slot.is_late) set(kLate, 1);
  }
  buckets_.control().copy_(at::from_blob(control_.data(), {num_control()}, at::kFloat));
}

void Reducer::read_control() {
  at::from_blob(control_.data(), {num_control()}, at::kFloat).copy_(buckets_.control());
  // Not while a rank without steps of its own is behind: it could not save.
  must_stop_ = control_[kStop] > 0 && control_[kNeedsState] <= 0;
  num_active_ = 0;
  for (int rank = world_.size() - 1; rank >= 0; --rank) {
    if (control_[static_cast<std::size_t>(active_at(rank))] <= 0) continue;
    ++num_active_;
    first_active_ = rank;
  }
}

// Every rank throws the same: the first rank's problem.
void Reducer::throw_problems() {
  const Cause mine{.kind = ErrorKind::kUsage,
                   .rank = world_.rank(),
                   .message = problem_ + "\nThe gradients of this step are dropped on all ranks."};
  const std::vector<std::string> causes =
      exchange_texts(world_, problem_.empty() ? std::string() : to_text(mine));
  reset();
  throw_first_cause(world_, causes,
                    {.rank = world_.rank(), .step = stats_.steps, .operation = "backward"});
}

// No gradient of a step that failed may be taken for an averaged one.
void Reducer::reset() {
  for (Slot& slot : slots_) {
    if (slot.is_sparse || buckets_.all()[slot.bucket].is_posted) {
      slot.parameter.mutable_grad() = at::Tensor();
    }
  }
  weight_ = 1;
  num_local_ = 0;
  phase_ = Phase::kIdle;
}

// Ranks that read the same data, because somebody has forgotten the sampler, do the same work N
// times and nothing looks wrong. Their gradients tell: in the first step each compares its own with
// the mean, in the second all know what the others have found.
void Reducer::look_at_first_gradients() {
  if (first_gradients_.defined()) {
    const at::Tensor& mean = buckets_.all().front().flat;
    const auto largest = mean.abs().max().item<double>();
    const auto difference = (first_gradients_ - mean).abs().max().item<double>();
    differs_ = !(largest > 0 && difference <= 1e-6 * largest);
    first_gradients_.reset();
  } else if (stats_.steps == 1 && control_[kDiffers] <= 0 && world_.rank() == 0) {
    Log(world_.rank())
        .warning(
            "All ranks had the same gradients in the first step: they seem to read the same data, "
            "and do the same work {} times. Give each its own part, with DistributedSampler.",
            world_.size());
  }
}

// The mean was taken as if all ranks had weight 1. Weights are whole numbers that need more digits
// than a bf16 bucket has, so they are added up apart, only in steps that use them.
void Reducer::scale_by_weights() {
  scale_ = 1;
  if (control_[kWeighted] <= 0) return;
  const auto total = world_.all_reduce(at::tensor(weight_, at::kDouble)).item<double>();
  if (total == 0) {
    reset();
    throw UsageError({.rank = world_.rank(), .step = stats_.steps, .operation = "backward"},
                     "All ranks gave the weight 0: a mean of no samples does not exist.\n"
                     "Leave out the step, on all ranks, or call join() on ranks out of data.");
  }
  scale_ = world_.size() / total;
  for (Bucket& bucket : buckets_.all()) bucket.flat.mul_(scale_);
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
    if (weight_ != 1) more.mul_(weight_);
    try {
      start_mean(more.is_complex() ? at::view_as_real(more) : more)->wait();
    } catch (...) {
      explain(std::current_exception(), text_of(bucket));
    }
    bucket.flat.add_(more, scale_);
  }
}

// A parameter that has a gradient on any rank has the mean on all; one that has none keeps none.
void Reducer::hand_out_gradients() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (control_[static_cast<std::size_t>(present_at(i))] <= 0) {
      slot.parameter.mutable_grad() = at::Tensor();
    } else if (slot.is_sparse) {
      reduce_sparse(i);
    } else {
      slot.parameter.mutable_grad() = slot.view;
    }
  }
}

// Indices and values of all ranks, one behind the other in the order of ranks, then added up: the
// same computation on all ranks.
void Reducer::reduce_sparse(std::size_t index) {
  Slot& slot = slots_[index];
  at::Tensor mine = slot.parameter.grad();
  if (!mine.defined()) {
    mine =
        at::sparse_coo_tensor(slot.parameter.sizes(), slot.parameter.options().layout(at::kSparse));
  }
  // Embeddings have whole rows; a gradient that came dense is seen in that way, too.
  if (!mine.is_sparse() || mine.sparse_dim() != 1) mine = mine.to_dense().to_sparse(1);
  mine = mine.coalesce();
  const std::int64_t count = mine._nnz();
  const at::Tensor counts = world_.all_gather(at::tensor(count, at::TensorOptions(at::kLong)));
  const auto most = counts.max().item<std::int64_t>();
  at::Tensor rows = at::zeros({most}, at::TensorOptions(at::kLong).device(mine.device()));
  std::vector<std::int64_t> sizes = mine.values().sizes().vec();
  sizes[0] = most;
  at::Tensor values = at::zeros(sizes, mine.values().options());
  rows.narrow(0, 0, count).copy_(mine.indices()[0]);
  values.narrow(0, 0, count).copy_(mine.values());
  if (weight_ != 1) values.mul_(weight_);
  const at::Tensor all_rows = world_.all_gather(rows);
  const at::Tensor all_values =
      values.is_complex() ? at::view_as_complex(world_.all_gather(at::view_as_real(values)))
                          : world_.all_gather(values);
  std::vector<at::Tensor> used_rows;
  std::vector<at::Tensor> used_values;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto used = counts[rank].item<std::int64_t>();
    used_rows.push_back(all_rows[rank].narrow(0, 0, used));
    used_values.push_back(all_values[rank].narrow(0, 0, used));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(used_rows).unsqueeze(0),
                                               at::cat(used_values), slot.parameter.sizes())
                             .coalesce();
  slot.parameter.mutable_grad() = sum.mul(scale_ / world_.size());
}

// Written so that autograd does not see it: a graph that is still to be run keeps its buffers.
void Reducer::sync_buffers() {
  if (world_.size() == 1) return;
  std::vector<at::Tensor> averaged;
  std::vector<at::Tensor> copied;
  for (const NamedTensor& one : model_.buffers()) {
    const bool is_mean = options_.buffers == BufferSync::kMean &&
                         (one.tensor.is_floating_point() || one.tensor.is_complex());
    (is_mean ? averaged : copied).push_back(one.tensor);
  }
  move_packed(averaged,
              [&](const at::Tensor& packed) { world_.all_reduce(packed, ReduceOp::AVG); });
  move_packed(copied, [&](const at::Tensor& packed) { world_.broadcast(packed, first_active_); });
}

void Reducer::take_state_from(int root) {
  std::vector<at::Tensor> tensors;
  for (const Slot& slot : slots_) tensors.push_back(slot.parameter);
  for (const NamedTensor& one : frozen_) tensors.push_back(one.tensor);
  for (const NamedTensor& one : model_.buffers()) tensors.push_back(one.tensor);
  move_packed(tensors, [&](const at::Tensor& packed) { world_.broadcast(packed, root); });
}

// What must be the same on all ranks.
std::vector<NamedTensor> Reducer::state() const {
  std::vector<NamedTensor> all;
  for (const Slot& slot : slots_) all.push_back({slot.name, slot.parameter});
  all.insert(all.end(), frozen_.begin(), frozen_.end());
  if (options_.buffers != BufferSync::kOff) {
    for (NamedTensor& one : model_.buffers()) all.push_back(std::move(one));
  }
  return all;
}

// The order in which rank 0's gradients came is the order of buckets from the next backward on.
void Reducer::learn_order() {
  has_learnt_order_ = true;
  std::vector<std::int64_t> order;
  std::vector<bool> is_in(slots_.size(), false);
  const auto append = [&](std::size_t index) {
    if (!is_in[index] && !slots_[index].is_sparse)
      order.push_back(static_cast<std::int64_t>(index));
    is_in[index] = true;
  };
  for (const std::size_t index : ready_order_) append(index);
  for (std::size_t i = slots_.size(); i-- > 0;) append(i);
  ready_order_ = {};
  if (order.empty() || world_.size() == 1) return;
  world_.broadcast(at::from_blob(order.data(), {static_cast<std::int64_t>(order.size())},
                                 at::TensorOptions(at::kLong)));
  next_order_.assign(order.begin(), order.end());
}

void Reducer::write_stats(Clock::time_point finish_began, Clock::time_point all_done) {
  stats_.backward_ms = ms_between(backward_began_, all_done);
  stats_.communication_ms = first_posted_ ? ms_between(*first_posted_, all_done) : 0;
  stats_.waiting_ms = ms_between(finish_began, all_done);
  stats_.overlap_percent =
      stats_.communication_ms > 0
          ? 100 * std::max(0.0, 1 - stats_.waiting_ms / stats_.communication_ms)
          : 0;
  stats_.bytes_sent = hook_comm_.bytes_sent() - bytes_sent_;
  for (const Bucket& bucket : buckets_.all()) {
    if (bucket.work) stats_.bytes_sent += static_cast<std::int64_t>(bucket.wire.nbytes());
  }
  stats_.step_ms.clear();
  for (int rank = 0; rank < world_.size(); ++rank) {
    stats_.step_ms.push_back(control_[static_cast<std::size_t>(time_at(rank))] * world_.size());
  }
  stats_.slowest_rank =
      static_cast<int>(std::ranges::max_element(stats_.step_ms) - stats_.step_ms.begin());
}

std::string Reducer::text_of(const Bucket& bucket) const {
  const std::size_t index = static_cast<std::size_t>(&bucket - buckets_.all().data());
  const std::size_t more = bucket.plan.slots.size() - 1;
  return text::format("all_reduce of bucket {} ({}{}, {:.1f} MiB)", index,
                      slots_[bucket.plan.slots.front()].name,
                      more == 0 ? "" : text::format(" and {} more", more),
                      static_cast<double>(bucket.flat.nbytes()) / (1 << 20));
}

void Reducer::explain(std::exception_ptr error, const std::string& what) {
  reset();
  try {
    rethrow_translated(error, world_.members(), world_.rank(), "all_reduce", what);
  } catch (const Error& known) {
    throw_error(known.kind(),
                {.rank = world_.rank(),
                 .peer = known.peer(),
                 .step = stats_.steps,
                 .operation = "backward"},
                text::format("{} failed.\n{}", what, known.message()));
  }
}

}  // namespace lockstep
