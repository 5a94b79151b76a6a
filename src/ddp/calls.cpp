// The reducer between backwards: what a program sets and asks.

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/reducer.h"

namespace lockstep {
namespace {

// Names in hook_state(): the order of slots in the buckets, whether they are laid out so, and, with
// this before them, the hook's own.
constexpr const char* kOrder = "order";
constexpr const char* kIsLaidOut = "is_laid_out";
constexpr const char* kNumSlices = "num_slices";  // that buckets are cut into; not there: 1
constexpr std::string_view kOfHook = "hook.";

}  // namespace

void Reducer::accumulate(int k) {
  if (k < 1) {
    throw UsageError({.rank = world_.global_rank(), .operation = "accumulate"},
                     text::format("accumulate({}) was asked for.\nGive 1 or more.", k));
  }
  const MutexLock lock(mutex_);
  if (turns_.turn() > 0) {
    throw UsageError({.rank = world_.global_rank(), .operation = "accumulate"},
                     "Logical ranks of this step have had their turns, which would be lost.\nCall "
                     "accumulate() between two steps.");
  }
  accumulate_ = k;
  num_local_ = 0;
}

void Reducer::discard() {
  const MutexLock lock(mutex_);
  for (Slot& slot : slots_) slot.parameter.mutable_grad() = at::Tensor();
  if (sharing()) {
    sharing()->set_gradients({});
    sharing()->set_local(false);
  }
  num_local_ = 0;
  if (turns_.are_on() && has_buffers_) turns_.restore_buffers(watch_.buffers());
  turns_.reset();
}

void Reducer::set_weight(double samples) {
  if (!(samples >= 0) || std::isinf(samples)) {
    throw UsageError(
        {.rank = world_.global_rank(), .operation = "set_weight"},
        text::format("set_weight({}) was asked for.\nGive the number of samples.", samples));
  }
  const MutexLock lock(mutex_);
  weight_ = samples;
}

// This rank does what those do that have data, which differs between models of one loss and models
// with backwards of their own. Models of one loss are all begun before the first is finished, and
// all finished whatever happens to one (finish_all); after an error of a backward of its own, the
// next one's does not come. Numbers of earlier steps tell which it is (is_followed).
void Reducer::join(const std::vector<Reducer*>& reducers, const std::function<void()>& step,
                   const UnevenOptions& options) {
  // Whatever happens, this rank takes part again in what comes after.
  const auto leave = c10::make_scope_exit([&] {
    for (Reducer* const one : reducers) one->leave_join();
  });
  for (Reducer* const one : reducers) one->enter_join(!step, options);
  bool has_data = false;
  bool goes_on = false;
  bool must_stop = false;
  do {
    has_data = goes_on = must_stop = false;
    std::exception_ptr first;
    auto next = reducers.begin();  // to begin
    for (auto one = reducers.begin(); one != reducers.end(); ++one) {
      try {
        while (next != reducers.end() &&
               (next <= one || is_followed(std::prev(next), reducers.end()))) {
          (*next++)->begin_round();
        }
        has_data |= (*one)->finish_round();
        goes_on |= (*one)->may_go_on();
        must_stop |= (*one)->must_stop();
      } catch (...) {
        if (!first) first = std::current_exception();
        if (!is_followed(one, reducers.end())) break;
      }
    }
    if (first) std::rethrow_exception(first);
    if (has_data && step) {
      const at::AutoGradMode grad_mode(true);
      step();
    }
  } while ((has_data || goes_on) && !must_stop);
  for (Reducer* const one : reducers) one->discard();
}

// Before the first step nobody has told. Then models are begun early only if the others could wait
// for that in the middle of their backward, which is for a later one's weights; if they do not, and
// the one before it fails, it stays begun, and its next step is dropped on all ranks, with the
// reason (abandon).
bool Reducer::is_followed(std::vector<Reducer*>::const_iterator one,
                          std::vector<Reducer*>::const_iterator end) {
  const Reducer& self = **one;
  const MutexLock lock(self.mutex_);
  return self.is_followed_.value_or(
      std::any_of(std::next(one), end, [](const Reducer* later) { return later->weighs_first_; }));
}

void Reducer::enter_join(bool needs_state, const UnevenOptions& options) {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  if (step_.phase != Phase::kIdle) abandon();
  needs_state_ = needs_state && options_.optimizer == nullptr;  // which takes the others' steps
  uneven_ = options;
  // Gradients that were added up locally are not lost: the first round takes them along.
  is_joined_ = num_local_ == 0;
}

double Reducer::weight_without_data() const {
  if (!uneven_.divide_by_initial_world_size) return 0;
  return turns_.are_on() ? turns_.last_weight() : last_weight_;
}

bool Reducer::skip(const UnevenOptions& options) {
  const auto leave = c10::make_scope_exit([&] { leave_join(); });
  enter_join(false, options);
  {
    const MutexLock lock(mutex_);
    const at::NoGradGuard no_grad;
    is_skipping_ = true;
    if (!turns_.is_last()) {
      begin_turn();
      end_turn();
      if (sharing()) sharing()->set_local(true);
      ModelWatch::take_fingerprints(slots_);
      return false;
    }
  }
  begin_round();
  return finish_round();
}

void Reducer::begin_round() {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  play_without_data();
  if (is_joined_) {
    for (Slot& slot : slots_) slot.parameter.mutable_grad() = at::Tensor();
    weight_ = weight_without_data();
  }
  begin_step(Phase::kSynchronised);
  step_.is_of_join = true;
  if (!turns_.problem().empty()) note_problem(turns_.problem());
}

bool Reducer::finish_round() {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  finish();
  is_joined_ = true;
  return numbers_.num_active() > 0;
}

bool Reducer::may_go_on() const {
  const MutexLock lock(mutex_);
  return numbers_.any(StepNumbers::kSkips);
}

void Reducer::leave_join() {
  const MutexLock lock(mutex_);
  is_joined_ = needs_state_ = is_skipping_ = false;
  uneven_ = {};
}

void Reducer::check_replicas() {
  if (world_.size() == 1) return;
  const MutexLock lock(mutex_);
  check_same_tensors(world_, state(), stats_.steps());
}

int Reducer::num_pending() const {
  const MutexLock lock(mutex_);
  return pending();
}

void Reducer::stop_when(std::function<bool()> is_asked) {
  const MutexLock lock(mutex_);
  is_asked_to_stop_ = std::move(is_asked);
}

bool Reducer::must_stop() const {
  const MutexLock lock(mutex_);
  return is_alone() ? is_asked_to_stop_ && is_asked_to_stop_() : must_stop_;
}

void Reducer::take_settings_from(Reducer& before) {
  take(before.settings());
  const MutexLock lock(mutex_);
  const MutexLock other(before.mutex_);
  first_step_ = before.first_step_ + before.stats_.steps();
  must_stop_ = before.must_stop_;
}

Reducer::Settings Reducer::settings() const {
  const MutexLock lock(mutex_);
  return {.accumulate = accumulate_,
          .is_asked_to_stop = is_asked_to_stop_,
          .is_asked_to_reform = is_asked_to_reform_,
          .has_ended = has_ended_,
          .epoch = epoch_,
          .is_torn = shards_ && shards_->is_torn()};
}

void Reducer::take(const Settings& settings) {
  const MutexLock lock(mutex_);
  accumulate_ = settings.accumulate;
  is_asked_to_stop_ = settings.is_asked_to_stop;
  is_asked_to_reform_ = settings.is_asked_to_reform;
  has_ended_ = settings.has_ended;
  epoch_ = settings.epoch;  // what hooks have kept is of another layout
  // Parameters that were moved out of memory that is torn are torn all the same.
  if (!settings.is_torn) return;
  if (!shards_) Shards::throw_torn(world_.global_rank());  // as they are, too few to be shared
  shards_->set_torn(true);
}

std::int64_t Reducer::num_steps() const {
  const MutexLock lock(mutex_);
  return first_step_ + stats_.steps();
}

void Reducer::set_num_steps(std::int64_t steps) {
  const MutexLock lock(mutex_);
  first_step_ = steps - stats_.steps();
}

void Reducer::reform_when(std::function<bool()> is_asked, std::function<bool()> has_ended) {
  const MutexLock lock(mutex_);
  is_asked_to_reform_ = std::move(is_asked);
  has_ended_ = std::move(has_ended);
}

bool Reducer::must_reform() const {
  const MutexLock lock(mutex_);
  return must_reform_;
}

bool Reducer::give_up(std::int64_t num_complete) {
  const MutexLock lock(mutex_);
  const at::NoGradGuard no_grad;
  const bool is_begun = step_.phase != Phase::kIdle || turns_.is_step_begun() ||
                        first_step_ + stats_.steps() > num_complete;
  step_ = {};
  if (turns_.are_on() && has_buffers_) {
    turns_.restore_buffers(watch_.buffers(), first_step_ + stats_.steps() > num_complete);
  }
  for (Slot& slot : slots_) slot.parameter.mutable_grad() = at::Tensor();
  if (sharing()) sharing()->set_gradients({});
  return is_begun;
}

bool Reducer::has_unused_gradients() const {
  const MutexLock lock(mutex_);
  return sharing() && sharing()->has_unused_gradients();
}

DdpStats Reducer::stats() const {
  const MutexLock lock(mutex_);
  return stats_.get();
}

HookState Reducer::hook_state() const {
  const MutexLock lock(mutex_);
  HookState all;
  if (!options_.hook) return all;
  for (const auto& [name, tensor] : options_.hook->state()) {
    all[std::string(kOfHook) + name] = tensor;
  }
  if (all.empty()) return all;
  const std::vector<std::size_t>& order = order_.latest();
  all[kOrder] = at::tensor(std::vector<std::int64_t>(order.begin(), order.end()));
  all[kIsLaidOut] = at::scalar_tensor(order_.next().empty(), at::kLong);
  if (is_sliced_) all[kNumSlices] = at::scalar_tensor(world_.size(), at::kLong);
  return all;
}

void Reducer::check_hook_state(const HookState& state) const {
  const MutexLock lock(mutex_);
  const ErrorPlace place{.rank = world_.global_rank(), .operation = "load_hook_state"};
  if (!options_.hook) {
    throw UsageError(place,
                     "There is the state of a comm hook, and this model has no hook.\nGive "
                     "DdpOptions::hook, or leave the state out (LoadOptions::strict = false).");
  }
  const auto order = state.find(kOrder);
  bool is_ours = order != state.end() && state.contains(kIsLaidOut) &&
                 order->second.scalar_type() == at::kLong && order->second.dim() == 1;
  if (is_ours) {
    std::vector<std::int64_t> dense;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].is_sparse) dense.push_back(static_cast<std::int64_t>(i));
    }
    is_ours = std::get<0>(order->second.sort()).equal(at::tensor(dense, at::kLong));
  }
  if (is_ours) return;
  throw UsageError(
      place,
      "The state of the comm hook is of another model.\nLoad it into the model that it "
      "was saved with.");
}

void Reducer::load_hook_state(const HookState& state) {
  check_hook_state(state);
  const MutexLock lock(mutex_);
  const at::Tensor order = state.at(kOrder).contiguous();
  const auto* const first = order.const_data_ptr<std::int64_t>();
  // Where ranks keep slices of buckets, these stay as they are.
  const std::vector<std::size_t> its(first, first + order.numel());
  const auto num_slices = state.find(kNumSlices);
  const std::int64_t its_slices =
      num_slices == state.end() ? 1 : num_slices->second.item<std::int64_t>();
  const bool is_ours =
      its_slices == (is_sliced_ ? world_.size() : 1) && (!is_sliced_ || its == order_.latest());
  if (!is_sliced_) order_.restore(its);
  lay_out_buckets();
  HookState of_hook;
  for (const auto& [name, tensor] : state) {
    if (name.starts_with(kOfHook)) of_hook[name.substr(kOfHook.size())] = tensor;
  }
  // If a new order was agreed and not yet used, what was kept is void, as it was in that run.
  const bool is_laid_out = is_ours && state.at(kIsLaidOut).item<std::int64_t>() != 0;
  options_.hook->load_state(of_hook, is_laid_out ? epoch_ : epoch_ - 1);
}

}  // namespace lockstep
