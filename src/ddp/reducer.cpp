// The reducer while backward runs: it begins, gradients arrive, it ends.

#include "ddp/reducer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/util/strides.h>
#include <lockstep/error.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>

#include "base/log.h"
#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/gradient_hook.h"
#include "ddp/platform.h"
#include "ddp/reduce_type.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

std::atomic<int> next_number = 0;

std::string line_of(const std::string& role, const NamedTensor& one) {
  // The kind of device: its index is a rank's own.
  return text::format("{} {} {} {} on {}, strides {}{}", role, one.name,
                      c10::toString(one.tensor.scalar_type()), c10::str(one.tensor.sizes()),
                      c10::DeviceTypeName(one.tensor.device().type(), /*lower_case=*/true),
                      c10::str(one.tensor.strides()),
                      one.tensor.requires_grad() ? ", trained" : "");
}

std::vector<std::string> describe_all(const std::vector<NamedTensor>& parameters,
                                      const std::vector<NamedTensor>& buffers,
                                      const std::vector<std::string>& sparse,
                                      const DdpOptions& options, const World& world) {
  std::vector<std::string> lines = {text::format(
      "options: bucket_bytes {}, first_bucket_bytes {}, buffers {}, check_every {}, "
      "hook {}, reduce_type {}, optimizer {}, shard {} from {} bytes, name '{}'",
      options.bucket_bytes, options.first_bucket_bytes, static_cast<int>(options.buffers),
      options.check_every, options.hook ? options.hook->text() : "none",
      options.reduce_type ? c10::toString(*options.reduce_type) : "none",
      options.optimizer == nullptr ? "none" : "in backward", static_cast<int>(options.shard),
      options.shard_min_bytes, options.name)};
  if (world.has_logical_ranks()) {
    lines.push_back(text::format("logical ranks with seed {} and {} threads each{}", world.seed(),
                                 at::get_num_threads(),
                                 is_any_platform_allowed() ? "" : ", on " + platform()));
  }
  if (const int every = HashLog::steps_between(); every > 0) {
    lines.push_back(text::format("hashes every {} steps", every));
  }
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

}  // namespace

Reducer::Reducer(ModelView model, std::vector<std::string> sparse, World world, DdpOptions options,
                 bool are_equal)
    : number_(next_number++),
      world_(world.size() == 1 ? world : world.duplicate(label_of(model, number_, options.name))),
      options_(std::move(options)),
      hook_comm_(world_),
      watch_(std::move(model)),
      buckets_(world_.backend()),
      turns_(world_),
      numbers_(world_.rank(), world_.size(), world_.logical_size()) {
  const at::NoGradGuard no_grad;
  const std::vector<NamedTensor> parameters = watch_.parameters();
  if (world_.size() > 1) {
    check_same_lines(world_, describe_all(parameters, watch_.buffers(), sparse, options_, world_),
                     "DistributedDataParallel", "Models or options",
                     "Build the same model with the same options on all ranks.");
  }
  if (std::ranges::none_of(parameters,
                           [](const NamedTensor& one) { return one.tensor.requires_grad(); })) {
    throw UsageError({.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
                     text::format("None of the {} parameters requires a gradient: there is nothing "
                                  "to train.\nWrap the model after its parameters are made and "
                                  "before they are frozen.",
                                  parameters.size()));
  }
  check_reduce_type(options_, world_.global_rank());
  if (options_.hook) options_.hook->begin(world_);
  add_slots(std::move(sparse));
  if (options_.optimizer != nullptr) check_optimizer();
  check_shard();
  check_logical();
  weighs_first_ = options_.hook || std::ranges::any_of(slots_, [](const Slot& slot) {
                    return slot.shape.type == at::kHalf;
                  });
  are_numbers_apart_ = options_.hook || options_.optimizer != nullptr || has_devices();
  has_buffers_ = !watch_.buffers().empty();
  if (world_.size() > 1 && !are_equal) {
    take_state_from(0, !has_same_tensors(world_, parameters));
  }
  if (!world_.is_waiting()) hash_log_ = HashLog::open(world_, options_.name);
  if (is_alone()) return;

  order_ = ReadyOrder(slots_);
  numbers_.set_num_slots(slots_.size());
  if (turns_.are_on() && !are_numbers_apart_) {
    numbers_.set_divisor(turns_.divisor() > 1 ? 1 : world_.logical_size());
  }
  if (options_.shard != Shard::kNone && world_.size() > 1) share_memory();
  const auto warning = std::make_shared<GradientHook::Warning>();
  warning->say = [rank = world_.global_rank(), name = options_.name] {
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

std::vector<std::string> Reducer::describe() const {
  const MutexLock lock(mutex_);
  return describe_all(watch_.parameters(), watch_.buffers(), {}, options_, world_);
}

// The hooks of parameters that nobody averages any more stay, to warn. If hooks of others are in
// the way, ours become no-ops.
Reducer::~Reducer() {
  hook_target_.reset();
  gauges_->leave_steps(number_);
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
          {.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
          text::format("The parameter {} is {}.\nGive the dense tensor that the "
                       "optimizer updates.",
                       one.name,
                       one.tensor.is_leaf() ? "not dense" : "the result of a computation"));
    }
    Slot slot;
    slot.is_sparse = std::erase(sparse, one.name) != 0;
    slot.name = std::move(one.name);
    slot.parameter = std::move(one.tensor);
    slot.type = slot.parameter.scalar_type();
    const at::ScalarType type = reduce_type_of(slot.parameter, options_);
    // Sums of several logical ranks are not rounded.
    slot.shape = {slot.parameter.numel(), turns_.are_on() ? at::toOpMathType(type) : type,
                  slot.parameter.device()};
    slot.sizes = slot.parameter.sizes().vec();
    const c10::DimVector by_row = c10::contiguous_strides(slot.parameter.sizes());
    slot.strides = slot.parameter.is_non_overlapping_and_dense()
                       ? slot.parameter.strides().vec()
                       : std::vector<std::int64_t>(by_row.begin(), by_row.end());
    slots_.push_back(std::move(slot));
  }
  if (!sparse.empty()) {
    throw UsageError({.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
                     text::format("DdpOptions::sparse names {}, and there is no such parameter.\n"
                                  "Use the names of named_parameters().",
                                  sparse.front()));
  }
}

void Reducer::on_gradient(std::size_t index) {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  throw_if_ended();
  if (step_.phase != Phase::kIdle && step_.task.expired()) abandon();
  if (step_.phase == Phase::kIdle) begin_backward(true);
  Slot& slot = slots_[index];
  // A backward has a thread for each device; one within another is on the same.
  if (step_.thread != std::this_thread::get_id() &&
      step_.graph != torch::autograd::get_current_graph_task_id()) {
    throw UsageError(
        {.rank = world_.global_rank(), .step = stats_.steps(), .operation = operation()},
        "Two threads run backward() of one wrapped model at the same time.\n"
        "Run one at a time.");
  }
  // Reached, but with no gradient; or nothing of this rank counts in this step.
  if (!slot.parameter.grad().defined() || !step_.problem.empty()) return;
  if (step_.phase == Phase::kLocal) {
    const bool keeps_own = shares_gradients() || !turns_.is_last();
    if (!slot.is_sparse && !(keeps_own ? keep_own(slot) : move_in(slot))) {
      throw UsageError({.rank = world_.global_rank(), .operation = operation()},
                       std::exchange(step_.problem, {}));
    }
    return;
  }
  if (!slot.is_sparse) {
    // .grad is a tensor of its own: post() took the other away.
    if (buckets_.all()[slot.buckets.front()].is_posted) {
      slot.is_late = true;
      if (turns_.are_on()) note_late_turn(slot);
      return;
    }
    if (!shares_gradients()) {
      move_in(slot);
    } else {
      for (const std::size_t one : slot.buckets) {
        buckets_.all()[one].writers.note(slot.shape.device);
      }
    }
    if (!slot.has_fired) {
      for (const std::size_t one : slot.buckets) --buckets_.all()[one].num_pending;
    }
  }
  if (!slot.has_fired) order_.note(index);
  slot.has_fired = true;
  post_ready(Until::kNotReady);
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
  const std::string change = watch_.find_change(slots_, pending() > 0);
  const bool ends_turn = *no_sync_depth_ == 0 && num_local_ + 1 >= accumulate_;
  const bool is_local = !ends_turn || !turns_.is_last();
  if (is_local && !change.empty()) {
    throw UsageError(
        {.rank = world_.global_rank(), .step = stats_.steps(), .operation = operation()}, change);
  }
  begin_step(is_local ? Phase::kLocal : Phase::kSynchronised);
  step_.task = task;
  step_.ends_turn = is_local && ends_turn;
  if (turns_.are_on()) check_turn();
  note_problem(change);
  if (sharing() && step_.phase == Phase::kSynchronised) note_misuse_of_shards();
}

// Everything is as if nothing of this step had happened, and in the layout agreed last.
void Reducer::begin_step(Phase phase) {
  lay_out_buckets();
  step_ = {};
  step_.phase = phase;
  gauges_->set(Doing::kBackward);
  step_.thread = std::this_thread::get_id();
  step_.graph = torch::autograd::get_current_graph_task_id();
  if (phase == Phase::kSynchronised) step_.factor = step_.weight = std::exchange(weight_, 1);
  if (options_.hook) {
    step_.part = options_.hook->part();
    step_.is_own = options_.hook->is_local() && !step_.part;
    hook_comm_.use(sharers());
  }
  if (phase == Phase::kSynchronised && !is_joined_) last_weight_ = step_.weight;
  if (phase == Phase::kSynchronised && turns_.are_on()) {
    turns_.add_weight(step_.weight, !is_joined_);
  }
  stats_.begin_backward(hook_comm_.bytes_sent());
  for (Slot& slot : slots_) {
    slot.has_fired = false;
    slot.is_late = false;
    slot.is_present = false;
    slot.is_folded = false;
  }
  for (Bucket& bucket : buckets_.all()) {
    bucket.num_pending = bucket.plan.slots.size();
    bucket.is_posted = false;
    bucket.is_taken = false;
    bucket.work.reset();
    bucket.exchange.reset();
    bucket.is_exchanged = false;
    bucket.bytes_given = 0;
    bucket.complete = nullptr;
  }
  if (phase != Phase::kSynchronised) return;
  if (const std::int64_t step = first_step_ + stats_.steps();
      hash_log_ && hash_log_->is_due(step)) {
    hash_log_->write(step, watch_.parameters());
  }
  note_failures();
  if (needs_state_ && (step_.is_own || step_.part)) {
    note_problem(
        text::format("join() was called without a step while ranks train apart (hook {}): one "
                     "replica would replace the others.\nGive it what the program does after "
                     "backward().",
                     options_.hook->text()));
  }
  if (needs_state_ && sharing()) {
    note_problem(
        "join() was called without a step, and this rank updates a part of the parameters "
        "(DdpOptions::shard).\nGive it what the program does after backward().");
  }
  if (weighs_first_) send_weight_ahead();
}

void Reducer::lay_out_buckets() {
  if (order_.next().empty() && !buckets_.all().empty()) return;
  std::vector<SlotShape> shapes;
  for (const Slot& slot : slots_) shapes.push_back(slot.shape);
  // Where a bucket's memory is used again, no tensor makes it much larger than it should be.
  const auto plans = plan_buckets(
      shapes, order_.next(),
      {.bucket_bytes = options_.bucket_bytes,
       .first_bucket_bytes = options_.first_bucket_bytes,
       .part_bytes = shares_gradients() ? std::max<std::size_t>(options_.bucket_bytes / 8, 1) : 0,
       .num_slices = is_sliced_ ? world_.size() : 1});
  buckets_.lay_out(plans, slots_, numbers_.count(), are_numbers_apart_);
  order_.is_used();  // not before: there may have been no memory
  ++epoch_;
  stats_.set_buckets(buckets_.all());
}

void Reducer::end_backward() {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  if (step_.phase == Phase::kLocal) {
    const bool ends_turn = step_.ends_turn;
    step_ = {};
    ++num_local_;
    turns_.end_backward();
    if (ends_turn) end_turn();
    if (sharing()) sharing()->set_local(true);
    gauges_->set(Doing::kComputing);
    ModelWatch::take_fingerprints(slots_);
    return;
  }
  // The reducers of this backward. All end it before the first one posts its last bucket, with the
  // numbers, which tell that there are others.
  static thread_local std::weak_ptr<std::vector<Reducer*>> ended;
  auto together = ended.lock();
  if (!together) {
    ended = together = std::make_shared<std::vector<Reducer*>>();
    torch::autograd::Engine::get_default_engine().queue_callback(
        [together] { finish_all(std::exchange(*together, {}), false); });
  }
  // A model that is wrapped twice: the mean of the first wrapper is what the second averages.
  if (!together->empty() && std::ranges::any_of(slots_, [](const Slot& slot) {
        return GradientHook::is_second_on(slot.parameter);
      })) {
    finish_all(std::exchange(*together, {}), true);
  }
  together->push_back(this);
}

// Models in one graph may end their backwards in different orders on two ranks. All post what is
// left before one waits, and they wait in the same order everywhere, so that no two wait for each
// other.
void Reducer::finish_all(std::vector<Reducer*> reducers, bool are_followed) {
  std::ranges::sort(reducers, {}, &Reducer::number_);
  std::exception_ptr first;
  const auto gauges = reducers.empty() ? std::make_shared<Gauges>() : reducers.front()->gauges_;
  const auto for_all = [&](const auto& call) {
    for (Reducer*& one : reducers) {
      if (one == nullptr) continue;
      try {
        const at::NoGradGuard no_grad;
        call(*one, &one != &reducers.back() || are_followed);
      } catch (...) {
        if (!first) first = std::current_exception();
        one = nullptr;  // its step is dropped
      }
    }
  };
  for_all([](Reducer& one, bool is_followed) {
    const MutexLock lock(one.mutex_);
    one.step_.is_followed = is_followed;
    one.post_rest(false);
  });
  for_all([](Reducer& one, bool) {
    const MutexLock lock(one.mutex_);
    one.finish();
  });
  gauges->set(Doing::kComputing);
  if (first) std::rethrow_exception(first);
}

// The last backward ended by an exception, so its step was never finished. The other ranks may wait
// for it, or have failed as well: give them the buckets they expect, and the reason.
void Reducer::abandon() {
  if (step_.phase == Phase::kLocal) {
    const bool ends_turn = step_.ends_turn;
    step_ = {};
    if (!turns_.are_on()) return;
    // What this logical rank would have given is missing: all are told at the end of the step.
    turns_.note_problem(
        "Its backward() was ended by an exception in the middle of a turn.\nSee what that rank "
        "said.");
    for (Slot& slot : slots_) slot.parameter.mutable_grad() = at::Tensor();
    turns_.end_backward();
    ++num_local_;
    if (ends_turn) end_turn();
    return;
  }
  // Whether this rank's program has been told: by the exception that ended its backward.
  const bool is_told = step_.problem.empty() && !step_.is_of_join;
  note_problem(step_.is_of_join
                   ? "Its join() had begun this step together with another model's, and then "
                     "failed.\nSee what that rank said; steps after this one count again."
                   : "Its backward() was ended by an exception in the middle.\nSee what that rank "
                     "said.");
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
  } catch (const UsageError&) {  // the problem itself
    give_back();
    if (!is_told) throw;
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
