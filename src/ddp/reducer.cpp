// The reducer while backward runs: gradients arrive, are moved into buckets, buckets are posted.

#include "ddp/reducer.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <lockstep/error.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/gradient_hook.h"

namespace lockstep {
namespace {

std::atomic<int> next_number = 0;

std::string line_of(const std::string& role, const NamedTensor& one) {
  return text::format("{} {} {} {} strides {}{}", role, one.name,
                      c10::toString(one.tensor.scalar_type()), c10::str(one.tensor.sizes()),
                      c10::str(one.tensor.strides()),
                      one.tensor.requires_grad() ? ", trained" : "");
}

std::vector<std::string> describe_all(const std::vector<NamedTensor>& parameters,
                                      const std::vector<NamedTensor>& buffers,
                                      const std::vector<std::string>& sparse,
                                      const DdpOptions& options) {
  std::vector<std::string> lines = {text::format(
      "options: bucket_bytes {}, first_bucket_bytes {}, buffers {}, check_every {}, "
      "hook {}, name '{}'",
      options.bucket_bytes, options.first_bucket_bytes, static_cast<int>(options.buffers),
      options.check_every, options.hook ? options.hook->text() : "none", options.name)};
  for (const NamedTensor& one : parameters) lines.push_back(line_of("parameter", one));
  for (const NamedTensor& one : buffers) lines.push_back(line_of("buffer", one));
  for (const std::string& name : sparse) lines.push_back("sparse " + name);
  return lines;
}

// What errors call the model that is averaged.
std::string label_of(const ModelView& model, int number, const std::string& name) {
  if (!name.empty()) return "the model " + name;
  const std::vector<NamedTensor> parameters = model.parameters();
  if (parameters.empty()) return text::format("wrapped model {}", number);
  return text::format("wrapped model {} ({} and {} more)", number, parameters.front().name,
                      parameters.size() - 1);
}

// Whether memory can be copied byte by byte from one to the other.
bool has_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && b.is_cpu() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_conj() &&
         !a.is_neg();
}

}  // namespace

Reducer::Reducer(ModelView model, std::vector<std::string> sparse, World world, DdpOptions options)
    : number_(next_number++),
      world_(world.size() == 1 ? world : world.duplicate(label_of(model, number_, options.name))),
      options_(std::move(options)),
      hook_comm_(world_),
      watch_(std::move(model)),
      buckets_(world_.backend()),
      numbers_(world_.rank(), world_.size()) {
  const at::NoGradGuard no_grad;
  const std::vector<NamedTensor> parameters = watch_.parameters();
  if (world_.size() > 1) {
    check_same_lines(world_, describe_all(parameters, watch_.buffers(), sparse, options_),
                     "Models or options");
  }
  if (std::ranges::none_of(parameters,
                           [](const NamedTensor& one) { return one.tensor.requires_grad(); })) {
    throw UsageError({.rank = world_.rank(), .operation = "DistributedDataParallel"},
                     text::format("None of the {} parameters requires a gradient: there is nothing "
                                  "to train.\nWrap the model after its parameters are made and "
                                  "before they are frozen.",
                                  parameters.size()));
  }
  add_slots(std::move(sparse));
  weighs_first_ = options_.hook || std::ranges::any_of(slots_, [](const Slot& slot) {
                    return slot.shape.type == at::kHalf;
                  });
  has_buffers_ = !watch_.buffers().empty();
  if (world_.size() > 1) take_state_from(0);
  if (is_alone()) return;

  order_ = ReadyOrder(slots_);
  numbers_.set_num_slots(slots_.size());
  const auto warning = std::make_shared<GradientHook::Warning>();
  warning->say = [rank = world_.rank(), name = options_.name] {
    Log(rank).warning(
        "backward() of {}: its DistributedDataParallel has gone, so gradients are not averaged and "
        "ranks drift apart. Keep it as long as the model is trained.",
        name.empty() ? "a wrapped model" : name);
  };
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& parameter = slots_[i].parameter;
    auto before = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    GradientHook::remove_expired(before);
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter,
        std::make_unique<GradientHook>(
            std::move(before), hook_target_, [i](Reducer& self) { self.on_gradient(i); }, warning));
  }
}

// The hooks of parameters that nobody averages any more stay, to warn. If hooks of others are in
// the way, ours become no-ops.
Reducer::~Reducer() {
  hook_target_.reset();
  for (const Slot& slot : slots_) {
    if (world_.size() > 1 && !GradientHook::is_on(slot.parameter)) continue;
    GradientHook::remove_expired(torch::autograd::impl::post_acc_grad_hooks(slot.parameter));
  }
}

void Reducer::add_slots(std::vector<std::string> sparse) {
  for (NamedTensor& one : watch_.parameters()) {
    if (!one.tensor.requires_grad()) {
      watch_.add_frozen(std::move(one));
      continue;
    }
    if (!one.tensor.is_leaf() || one.tensor.layout() != at::kStrided) {
      throw UsageError(
          {.rank = world_.rank(), .operation = "DistributedDataParallel"},
          text::format("The parameter {} is {}.\nGive the dense tensor that the "
                       "optimizer updates.",
                       one.name,
                       one.tensor.is_leaf() ? "not dense" : "the result of a computation"));
    }
    Slot slot;
    slot.is_sparse = std::erase(sparse, one.name) != 0;
    slot.name = std::move(one.name);
    slot.parameter = std::move(one.tensor);
    slot.shape = {slot.parameter.numel(), slot.parameter.scalar_type(), slot.parameter.device()};
    slot.sizes = slot.parameter.sizes().vec();
    const c10::DimVector by_row = c10::contiguous_strides(slot.parameter.sizes());
    slot.strides = slot.parameter.is_non_overlapping_and_dense()
                       ? slot.parameter.strides().vec()
                       : std::vector<std::int64_t>(by_row.begin(), by_row.end());
    slots_.push_back(std::move(slot));
  }
  if (!sparse.empty()) {
    throw UsageError({.rank = world_.rank(), .operation = "DistributedDataParallel"},
                     text::format("DdpOptions::sparse names {}, and there is no such parameter.\n"
                                  "Use the names of named_parameters().",
                                  sparse.front()));
  }
}

void Reducer::on_gradient(std::size_t index) {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  if (step_.phase != Phase::kIdle && step_.task.expired()) abandon();
  if (step_.phase == Phase::kIdle) begin_backward(true);
  Slot& slot = slots_[index];
  // A backward has a thread for each device; one within another is on the same.
  if (step_.thread != std::this_thread::get_id() &&
      step_.graph != torch::autograd::get_current_graph_task_id()) {
    throw UsageError({.rank = world_.rank(), .step = stats_.steps(), .operation = operation()},
                     "Two threads run backward() of one wrapped model at the same time.\n"
                     "Run one at a time.");
  }
  // Reached, but with no gradient; or nothing of this rank counts in this step.
  if (!slot.parameter.grad().defined() || !step_.problem.empty()) return;
  if (step_.phase == Phase::kLocal) {
    if (!slot.is_sparse && !move_in(slot)) {
      throw UsageError({.rank = world_.rank(), .operation = operation()},
                       std::exchange(step_.problem, {}));
    }
    return;
  }
  if (!slot.is_sparse) {
    Bucket& bucket = buckets_.all()[slot.bucket];
    if (bucket.is_posted) {  // .grad is a tensor of its own: post() took the other away
      slot.is_late = true;
      return;
    }
    move_in(slot);
    if (!slot.has_fired) --bucket.num_pending;
  }
  if (!slot.has_fired) order_.note(index);
  slot.has_fired = true;
  post_ready(false);
  poll();
}

// The first gradient of a backward. Inside autograd's engine, what is left to do happens when it
// has run the whole graph, before backward() returns.
void Reducer::begin_backward(bool is_in_engine) {
  const auto task = std::make_shared<int>(0);
  if (is_in_engine) {
    torch::autograd::Engine::get_default_engine().queue_callback([this, task] { end_backward(); });
  }
  ++num_backwards_;
  const std::string change = watch_.find_change(slots_, num_local_ > 0);
  const bool is_local = *no_sync_depth_ > 0 || num_local_ + 1 < accumulate_;
  if (is_local && !change.empty()) {
    throw UsageError({.rank = world_.rank(), .step = stats_.steps(), .operation = operation()},
                     change);
  }
  begin_step(is_local ? Phase::kLocal : Phase::kSynchronised);
  step_.task = task;
  note_problem(change);
}

// Everything is as if nothing of this step had happened, and in the layout agreed last.
void Reducer::begin_step(Phase phase) {
  lay_out_buckets();
  step_ = {};
  step_.phase = phase;
  step_.thread = std::this_thread::get_id();
  step_.graph = torch::autograd::get_current_graph_task_id();
  if (phase == Phase::kSynchronised) step_.factor = step_.weight = std::exchange(weight_, 1);
  stats_.begin_backward(hook_comm_.bytes_sent());
  for (Slot& slot : slots_) {
    slot.has_fired = false;
    slot.is_late = false;
    slot.is_present = false;
  }
  for (Bucket& bucket : buckets_.all()) {
    bucket.num_pending = bucket.plan.slots.size();
    bucket.is_posted = false;
    bucket.work.reset();
    bucket.complete = nullptr;
  }
  if (phase == Phase::kSynchronised && weighs_first_) send_weight_ahead();
}

void Reducer::send_weight_ahead() {
  const std::vector<double> mine = {step_.weight, step_.weight == 1 ? 0.0 : 1.0};
  step_.weights = at::tensor(mine).to(slots_.front().parameter.device());
  std::vector<at::Tensor> tensors = {step_.weights};
  try {
    step_.weights_work = world_.backend()->allreduce(tensors, {});
  } catch (...) {
    explain(std::current_exception(), "all_reduce of weights");
  }
}

// This rank's share of the whole: at most 1, or, for a hook, 1 if all ranks have the same.
void Reducer::take_weights() {
  if (!step_.weights_work) return;
  try {
    std::exchange(step_.weights_work, {})->wait();
  } catch (...) {
    explain(std::current_exception(), "all_reduce of weights");
  }
  step_.weights = step_.weights.cpu();
  const auto total = step_.weights[0].item<double>();
  const bool is_weighted = step_.weights[1].item<double>() > 0;
  if (!is_weighted) return;
  const double share = total == 0 ? 0 : step_.weight / total;
  step_.factor = options_.hook ? share * world_.size() : share;
}

void Reducer::lay_out_buckets() {
  if (order_.next().empty() && !buckets_.all().empty()) return;
  std::vector<SlotShape> shapes;
  for (const Slot& slot : slots_) shapes.push_back(slot.shape);
  const auto plans =
      plan_buckets(shapes, order_.next(), {options_.bucket_bytes, options_.first_bucket_bytes});
  buckets_.lay_out(plans, slots_, numbers_.count(), options_.hook != nullptr);
  order_.is_used();  // not before: there may have been no memory
  ++epoch_;
  stats_.set_buckets(buckets_.all());
}

void Reducer::note_problem(const std::string& problem) {
  if (step_.problem.empty()) step_.problem = problem;
}

// Makes .grad a view of the bucket, in one pass at most. False if it is of a kind that cannot be.
bool Reducer::move_in(Slot& slot) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.is_same(slot.view)) return true;
  if (grad.layout() != at::kStrided) {
    note_problem(
        text::format("The gradient of {} is sparse.\nName the parameter in "
                     "DdpOptions::sparse, on all ranks.",
                     slot.name));
    return false;
  }
  if (grad.requires_grad() && !has_warned_of_graph_) {
    has_warned_of_graph_ = true;
    Log(world_.rank())
        .warning(
            "backward(create_graph): the averaged gradients have no graph; for gradients of "
            "gradients "
            "use torch::autograd::grad");
  }
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
void Reducer::post_ready(bool is_end) {
  auto& buckets = buckets_.all();
  while (step_.num_posted < buckets.size()) {
    Bucket& bucket = buckets[step_.num_posted];
    const bool is_last = step_.num_posted + 1 == buckets.size();
    if (!is_end && (bucket.num_pending > 0 || is_last)) return;
    post(bucket);
    ++step_.num_posted;
  }
}

void Reducer::post(Bucket& bucket) {
  take_weights();
  const std::size_t index = step_.num_posted;
  for (const std::size_t one : bucket.plan.slots) {
    Slot& slot = slots_[one];
    at::Tensor& grad = slot.parameter.mutable_grad();
    slot.is_present = step_.problem.empty() && grad.defined() && move_in(slot);
    if (!slot.is_present) slot.view.zero_();
    grad = at::Tensor();  // until the mean is there; what autograd adds meanwhile goes elsewhere
  }
  if (options_.check_finite) check_finite(bucket);
  weigh(bucket.flat, step_.factor);
  bucket.is_posted = true;
  stats_.post();
  try {
    if (options_.hook) {
      GradBucket view{.index = static_cast<int>(index), .epoch = epoch_, .flat = bucket.flat};
      for (const std::size_t one : bucket.plan.slots) {
        view.gradients.push_back(slots_[one].view);
        view.names.push_back(slots_[one].name);
      }
      bucket.complete = options_.hook->start(std::move(view), hook_comm_);
      return;
    }
    if (stats_.steps() == 0 && index == 0 && step_.weight == 1 && world_.size() > 1)
      first_gradients_.keep(bucket.flat);
    if (index + 1 == buckets_.all().size()) write_numbers();
    bucket.work = start_mean(bucket.wire);
  } catch (...) {
    explain(std::current_exception(), text_of(bucket));
  }
}

void Reducer::check_finite(const Bucket& bucket) {
  const auto is_finite = [](const at::Tensor& numbers) {
    return at::isfinite(numbers).all().item<bool>();
  };
  if (is_finite(bucket.flat)) return;
  for (const std::size_t one : bucket.plan.slots) {
    if (is_finite(slots_[one].view)) continue;
    note_problem(
        text::format("The gradient of {} is not finite on this rank.\nLook at its samples and its "
                     "loss, or lower the learning rate.",
                     slots_[one].name));
  }
}

c10::intrusive_ptr<c10d::Work> Reducer::start_mean(const at::Tensor& tensor) {
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  std::vector<at::Tensor> tensors = {tensor};
  return world_.backend()->allreduce(tensors, options);
}

// Lets the engine do what has become possible. Buckets complete in the order posted.
void Reducer::poll() {
  if (options_.hook) return hook_comm_.poll();
  auto& buckets = buckets_.all();
  while (step_.num_completed < step_.num_posted) {
    if (!buckets[step_.num_completed].work->isCompleted()) return;
    ++step_.num_completed;
  }
}

void Reducer::end_backward() {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  if (step_.phase == Phase::kLocal) {
    step_ = {};
    ++num_local_;
    ModelWatch::take_fingerprints(slots_);
    return;
  }
  // The reducers whose last buckets are posted in this backward: all are, before one waits.
  static thread_local std::weak_ptr<std::vector<Reducer*>> posted;
  auto together = posted.lock();
  if (!together) {
    posted = together = std::make_shared<std::vector<Reducer*>>();
    torch::autograd::Engine::get_default_engine().queue_callback(
        [together] { finish_all(std::exchange(*together, {})); });
  }
  // A model that is wrapped twice: the mean of the first wrapper is what the second averages.
  if (!together->empty() && std::ranges::any_of(slots_, [](const Slot& slot) {
        return GradientHook::is_second_on(slot.parameter);
      })) {
    finish_all(std::exchange(*together, {}));
  }
  post_rest();
  together->push_back(this);
}

// Models in one graph may end their backwards in different orders on two ranks. They wait in the
// same order everywhere, so that no two wait for each other.
void Reducer::finish_all(std::vector<Reducer*> reducers) {
  std::ranges::sort(reducers, {}, &Reducer::number_);
  std::exception_ptr first;
  for (Reducer* const one : reducers) {
    try {
      const MutexLock lock(one->mutex_);
      const at::NoGradGuard no_grad;
      one->finish();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

// The last backward ended by an exception, so its step was never finished. The other ranks may wait
// for it, or have failed as well: give them the buckets they expect, and the reason.
void Reducer::abandon() {
  if (step_.phase == Phase::kLocal) {
    step_ = {};
    return;
  }
  note_problem("Its backward() was ended by an exception in the middle.\nSee what that rank said.");
  std::vector<at::Tensor> kept;  // gradients of the new backward must survive
  for (Slot& slot : slots_) {
    at::Tensor grad = std::exchange(slot.parameter.mutable_grad(), {});
    const bool is_in_bucket = !slot.is_sparse && grad.defined() && grad.is_alias_of(slot.view);
    kept.push_back(is_in_bucket ? grad.clone() : grad);
  }
  const auto give_back = [&]() LOCKSTEP_REQUIRES(mutex_) {
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].parameter.mutable_grad() = kept[i];
  };
  try {
    finish();
  } catch (const UsageError&) {  // the problem itself, which this rank knows
    give_back();
  } catch (...) {
    give_back();
    throw;
  }
}

void Reducer::backward(const at::Tensor& loss, const at::Tensor& gradient,
                       std::optional<bool> retain_graph, bool create_graph) {
  const auto count = [this] {
    const MutexLock lock(mutex_);
    return num_backwards_;
  };
  const std::int64_t before = count();
  if (loss.requires_grad()) loss.backward(gradient, retain_graph, create_graph);
  if (is_alone() || count() != before) return;
  // No parameter was reached: this rank has nothing to give, but the others count on it.
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  if (step_.phase != Phase::kIdle) abandon();
  begin_backward(false);
  if (step_.phase == Phase::kLocal) {
    end_backward();
  } else {
    finish();
  }
}

}  // namespace lockstep
