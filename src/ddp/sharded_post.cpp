// The reducer with DdpOptions::shard. What a rank gives is in one of two places of its own, used in
// turn; the mean is written once for all ranks of the host, or, on devices, each rank gets a slice
// of it.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/text.h"
#include "ddp/gradient_hook.h"
#include "ddp/reducer.h"
#include "engine/reduce_once.h"
#include "world/exchange.h"
#include "world/host_memory.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// How long a rank waits for a place whatever the others do. Ranks that share a core are further
// apart, and so are those whose backwards take long.
milliseconds short_wait(const World& world, double last_backward_ms) {
  const auto num_cores = std::max(::sysconf(_SC_NPROCESSORS_ONLN), 1L);
  const auto ranks_per_core = (world.local_size() + num_cores - 1) / num_cores;
  return std::max(milliseconds(300) * std::max(ranks_per_core, 1L),
                  milliseconds(static_cast<std::int64_t>(last_backward_ms / 4)));
}

// How long while the others compute. What they wait for outside of lockstep is not seen.
constexpr milliseconds kLongWait{30'000};
constexpr milliseconds kBetweenLooks{100};

}  // namespace

// The options are the same on all ranks, and so are these errors: a mode that the model is too
// small for is refused for the same reasons.
void Reducer::check_shard() {
  const Shard asked = options_.shard;
  const bool is_shared = std::ranges::any_of(
      slots_, [](const Slot& slot) { return use_of(slot.parameter) != nullptr; });
  const bool is_in_slices = std::ranges::any_of(
      slots_, [](const Slot& slot) { return Slices::holder_of(slot.parameter) != nullptr; });
  if (!is_shared && !is_in_slices && is_too_small_to_share()) options_.shard = Shard::kNone;
  if (world_.size() == 1 && is_shared) unshare();
  if (options_.shard == Shard::kNone && is_shared && world_.size() > 1) {
    throw UsageError(
        {.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
        "The ranks of a host share the parameters since they were wrapped with "
        "DdpOptions::shard: there are no replicas.\nWrap them with a shard mode again, "
        "or build the model anew.");
  }
  if (options_.shard == Shard::kNone && world_.size() > 1 && is_in_slices) {
    throw UsageError({.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
                     "Another wrapper with DdpOptions::shard has the parameters.\nEnd it first.");
  }
  if (world_.size() == 1 || options_.shard == Shard::kNone) {
    const std::vector<NamedTensor> all = trained();
    // What is torn on one rank is so for all.
    if (has_devices()) {
      do_together(world_, "DistributedDataParallel",
                  [&] { Shards::check_whole(all, world_.global_rank()); });
    }
    leave_slices(all);
  }
  leave_slices(watch_.frozen());
  if (asked == Shard::kNone) return;
  std::string problem;
  if (options_.hook && options_.hook->may_be_local()) {
    problem = text::format(
        "the hook {} trains replicas apart, and the ranks of a host have one set of parameters",
        options_.hook->text());
  } else if (options_.hook && asked == Shard::kGradients) {
    problem = text::format("the hook {} needs whole buckets: use Shard::kOptimizer",
                           options_.hook->text());
  } else if (options_.optimizer != nullptr) {
    problem = "DdpOptions::optimizer steps in backward(), where parameters are still in use";
  } else if (has_devices() && std::ranges::any_of(slots_, &Slot::is_sparse)) {
    problem = "sparse gradients on devices, of which ranks cannot keep slices";
  } else if (has_devices() && std::ranges::any_of(slots_, [](const Slot& slot) {
               return !has_streams(slot.shape.device);
             })) {
    problem = "parameters in main memory, where others are on a device";
  }
  if (problem.empty()) return;
  throw UsageError({.rank = world_.global_rank(), .operation = "DistributedDataParallel"},
                   text::format("DdpOptions::shard cannot be had with what else is asked for: "
                                "{}.\nLeave out one of them.",
                                problem));
}

bool Reducer::is_too_small_to_share() const {
  std::size_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.parameter.nbytes();
  for (const NamedTensor& one : watch_.frozen()) bytes += one.tensor.nbytes();
  return bytes < options_.shard_min_bytes;
}

// The model of a world of one, which others may still have: it gets memory of its own.
void Reducer::unshare() {
  std::vector<NamedTensor> all = trained();
  all.insert(all.end(), watch_.frozen().begin(), watch_.frozen().end());
  Shards::check_whole(all, world_.global_rank());
  for (NamedTensor& one : all) {
    if (use_of(one.tensor) != nullptr) one.tensor.set_data(one.tensor.detach().clone());
  }
}

std::vector<NamedTensor> Reducer::trained() const {
  std::vector<NamedTensor> all;
  for (const Slot& slot : slots_) all.push_back({slot.name, slot.parameter});
  return all;
}

bool Reducer::has_devices() const {
  return std::ranges::any_of(slots_,
                             [](const Slot& slot) { return has_streams(slot.shape.device); });
}

// Parameters that an earlier wrapper has placed and that are not cut any more get memory of their
// own.
void Reducer::leave_slices(const std::vector<NamedTensor>& parameters) {
  for (const NamedTensor& one : parameters) {
    at::Tensor parameter = one.tensor;
    if (const at::Tensor copy = Slices::take_out(parameter); copy.defined()) {
      parameter.set_data(copy);
    }
  }
}

// Collective.
void Reducer::share_memory() {
  if (has_devices()) return cut_slices();
  shards_ = Shards::place(world_, trained(), watch_.frozen());
  if (!shares_gradients()) return;
  reduces_once_ = can_reduce_once(*world_.backend()) && !turns_.are_exchanged();
  buckets_.share(shards_->host(), reduces_once_);
  lay_out_buckets();
}

// Collective. Buckets have parameters of one type, as parameters lie as their gradients do.
void Reducer::cut_slices() {
  TakenMemory taken;
  std::vector<NamedTensor> all = trained();
  all.insert(all.end(), watch_.frozen().begin(), watch_.frozen().end());
  do_together(world_, "DistributedDataParallel", [&] {
    for (const NamedTensor& one : all) Slices::check(world_, one, taken);
  });
  for (Slot& slot : slots_) slot.shape.group = static_cast<int>(slot.type);
  is_sliced_ = true;
  order_.keep();
  if (shares_gradients()) buckets_.slice(world_.rank(), world_.size());
  lay_out_buckets();
  std::vector<BucketPlan> plans;
  for (const Bucket& bucket : buckets_.all()) plans.push_back(bucket.plan);
  slices_ = Slices::place(world_, trained(), std::move(plans));
}

void Reducer::note_misuse_of_shards() {
  if (shards_) {
    try {
      shards_->check_usable();
    } catch (const UsageError& error) {
      note_problem(error.message());
    }
  }
  note_problem(sharing()->find_foreign_change());
  if (shares_gradients() && GradientHook::is_second_on(slots_.front().parameter)) {
    note_problem(
        "The model is wrapped twice, and with Shard::kGradients the second wrapper would find no "
        "gradients.\nWrap it once, or use Shard::kOptimizer.");
  }
  if (!sharing()->has_unused_gradients()) return;
  note_problem(
      "The gradients of the last backward() were not used. With Shard::kGradients step() of an "
      "optim::Sharded follows every synchronised backward().\nAdd up gradients with accumulate(), "
      "or drop them with discard(), on all ranks.");
}

// A local backward: the gradient stays in memory of this rank's own, in the type in which it is
// added up.
bool Reducer::keep_own(Slot& slot) {
  if (!is_dense(slot)) return false;
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.scalar_type() != slot.shape.type) grad = grad.detach().to(slot.shape.type);
  return true;
}

// As one run of memory, in the order and the type of the slot's place.
at::Tensor Reducer::flat_of(const Slot& slot, const at::Tensor& gradient) {
  at::Tensor dense = gradient.detach();
  if (dense.scalar_type() != slot.shape.type || dense.strides() != at::IntArrayRef(slot.strides) ||
      dense.is_neg()) {
    dense = at::empty_strided(slot.sizes, slot.strides, dense.options().dtype(slot.shape.type))
                .copy_(dense);
  }
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

// Whether the place of a bucket can be used again. A rank that is far ahead waits for the others,
// so that it does not pile up gradients; not for ever, as another rank may need this one first: for
// a layer that computes over ranks, or for another model.
bool Reducer::has_place(const Bucket& bucket, Until until) {
  // On a device nobody waits: the place is used in the order of streams.
  if (!shares_gradients() || !bucket.before || is_sliced_) return true;
  Bucket& before = buckets_.all()[*bucket.before];
  if (before.is_taken || !before.work) return before.is_taken;
  if (before.work->isCompleted()) return true;
  if (step_.waits_no_more || until == Until::kFirstWait) return false;
  step_.waits_no_more = !wait_for_place(*before.work);
  return !step_.waits_no_more;
}

// While the others compute, they need nothing of this rank. Those that wait in another engine are
// seen on the board; other models of this process may wait for their places in the same way, which
// is not. A long wait that times out disables long waits for 100 steps, the next one for 400, ...
bool Reducer::wait_for_place(c10d::Work& before) {
  using Clock = std::chrono::steady_clock;
  const milliseconds shortest = short_wait(world_, stats_.get().backward_ms);
  const bool is_long = reduces_once_ && stats_.steps() >= next_long_wait_ && counted_.is_only_one();
  const milliseconds longest = is_long ? std::max(kLongWait, shortest) : shortest;
  const auto began = Clock::now();
  while (!before.isCompleted()) {
    const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - began);
    if (waited >= longest) {
      if (is_long) next_long_wait_ = stats_.steps() + (steps_between_long_waits_ *= 4);
      return false;
    }
    if (waited >= shortest && is_needed_elsewhere(*world_.backend())) return false;
    try {
      before.wait(
          std::min(waited < shortest ? shortest - waited : kBetweenLooks, longest - waited));
    } catch (const std::exception&) {  // NOLINT: what it is, the wait at the end of the step tells
    }
  }
  return true;
}

void Reducer::copy_in(Bucket& bucket) {
  if (bucket.before && !step_.is_broken) wait_for(buckets_.all()[*bucket.before]);
  bucket.writers.order_before_current(bucket.flat.device());  // who has made the gradients
  bucket.writers.note(bucket.flat.device());
  const BucketPlan& plan = bucket.plan;
  for (std::size_t i = 0; i < plan.slots.size(); ++i) {
    Slot& slot = slots_[plan.slots[i]];
    if (plan.firsts[i] == 0) {
      at::Tensor& grad = slot.parameter.mutable_grad();
      slot.is_present = step_.problem.empty() && grad.defined() && is_dense(slot);
      slot.own = slot.is_present ? flat_of(slot, grad) : at::Tensor();
      if (is_sliced_ && slot.is_present) {
        // It may have been copied just now: what the other buckets send comes behind that.
        keep_for_current_stream(grad);
        for (const std::size_t one : slot.buckets) {
          buckets_.all()[one].writers.note(slot.shape.device);
        }
      }
      grad = at::Tensor();  // what autograd adds from now on goes elsewhere
    }
    const at::Tensor place = bucket.own.narrow(0, plan.offsets[i], plan.counts[i]);
    if (!slot.own.defined()) {
      place.zero_();
    } else if (is_sliced_) {
      place.copy_(slot.own.narrow(0, plan.firsts[i], plan.counts[i]));
      keep_for_current_stream(slot.own);  // it may be another stream's, and goes now
    } else if (turns_.num_turns() > 1 && step_.factor == 1 && !options_.check_finite) {
      // In the same pass, as nothing is done to it before.
      turns_.fold(plan.slots[i], plan.firsts[i], slot.own.narrow(0, plan.firsts[i], plan.counts[i]),
                  place);
      slot.is_folded = true;
    } else if (plan.counts[i] > 0) {
      std::memcpy(place.mutable_data_ptr(),
                  slot.own.narrow(0, plan.firsts[i], plan.counts[i]).const_data_ptr(),
                  place.nbytes());
    }
    if (plan.firsts[i] + plan.counts[i] == slot.shape.num_elements) slot.own = at::Tensor();
  }
}

c10::intrusive_ptr<c10d::Work> Reducer::start_shared_mean(const Bucket& bucket) {
  if (is_sliced_) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    at::Tensor output = bucket.flat;
    at::Tensor input = bucket.own;
    return world_.backend()->_reduce_scatter_base(output, input, options);
  }
  if (!reduces_once_) return start_mean_of(bucket);
  return start_reduce_once(*world_.backend(), bucket.wire, bucket.result, c10d::ReduceOp::AVG,
                           turns_.are_on() ? turns_.mean().num_leaves() : 0);
}

// Where the engine leaves the mean in this rank's place, each rank of the host moves a part of it
// to where all have it.
void Reducer::take_out(Bucket& bucket) {
  if (!reduces_once_ && !is_sliced_) my_part(bucket.flat).copy_(my_part(bucket.own));
  bucket.is_taken = true;
}

// Of memory that the ranks of a host write together, or that slices are cut from; all of it if
// neither is.
at::Tensor Reducer::my_part(const at::Tensor& flat) const {
  if (!shares_gradients()) return flat;
  const World& host = is_sliced_ ? world_ : shards_->host();
  // In whole vectors, so that what kernels do to a rest falls on the same elements as without cuts.
  constexpr std::int64_t kLine = 64;
  const auto first_of = [&](int rank) {
    return rank == host.size() ? flat.numel() : flat.numel() * rank / host.size() / kLine * kLine;
  };
  return flat.narrow(0, first_of(host.rank()), first_of(host.rank() + 1) - first_of(host.rank()));
}

// Collective on the host, where ranks have written parts: when it returns, all of them have.
void Reducer::hand_out_shared() {
  if (shards_ && (!reduces_once_ || step_.scale != 1 || numbers_.any(StepNumbers::kLate))) {
    shards_->host().barrier();
  }
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const bool is_shared = numbers_.is_present(i) && !slots_[i].is_sparse;
    gradients.push_back(is_shared ? slots_[i].view : at::Tensor());
  }
  sharing()->set_gradients(std::move(gradients));
}

std::vector<NamedTensor> Reducer::full_gradients() const {
  const MutexLock lock(mutex_);
  if (slices_ && shares_gradients()) return slices_->full_gradients();
  std::vector<NamedTensor> all;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& own = slots_[i].parameter.grad();
    const at::Tensor gradient = own.defined() || !shards_ ? own : shards_->gradient(i);
    if (gradient.defined()) all.push_back({slots_[i].name, gradient});
  }
  return all;
}

void Reducer::change_parameters(const std::function<void()>& change) {
  std::shared_ptr<Shards> shards;
  {
    const MutexLock lock(mutex_);
    shards = shards_;
  }
  if (shards) return shards->change_parameters(change);
  const at::NoGradGuard no_grad;
  change();
}

}  // namespace lockstep
