// Elastic::run: trains, and when ranks change, takes back what is not complete, joins the next
// generation, makes all ranks' state that of the last complete step, and trains again.
//
// Invariant: between two commits only optimizers change parameters, after all gradients of a step
// are there, and nothing there waits for another rank. So a survivor has either not begun to change
// its state, or completes the step; parameters whose versions say otherwise are not used.

#include <ATen/Parallel.h>
#include <lockstep/elastic.h>
#include <lockstep/error.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/gauges.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "ddp/platform.h"
#include "ddp/reducer.h"
#include "elastic/shared_state.h"
#include "world/membership.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Leaves `train`; no std::exception, so that programs do not catch it by accident.
struct Reforming {};

// Whether an error may be due to a rank that is lost. The launcher knows.
bool may_be_loss(const Error& error) {
  return error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kTimeout ||
         error.kind() == ErrorKind::kSystem;
}

}  // namespace

struct Elastic::Impl {
  explicit Impl(Checkpointer& checkpoints, std::int64_t its_steps)
      : kept(*checkpoints.impl_), world(kept.world), steps(its_steps) {}

  bool is_elastic() const { return world.is_elastic(); }
  void check() const;
  std::string kind() const;
  void mark();
  bool is_whole() const;
  void take_back();
  void attach();
  void watch(Reducer& reducer) const;
  // False: this process leaves.
  bool reform(bool is_planned, const std::exception_ptr& error);
  void tell(const ElasticChange& change) const;

  Checkpointer::Impl& kept;
  const World world;
  std::int64_t steps;
  std::function<void(const ElasticChange&)> on_change = [](const ElasticChange&) {};
  bool is_running = false;
  const std::shared_ptr<Gauges> gauges = Gauges::of_process();  // for who looks at the job

  // As of the last complete step.
  std::vector<std::int64_t> ddp_steps;
  std::vector<at::Tensor> parameters;
  std::vector<std::int64_t> versions;
  bool is_in_step = false;     // something of the next one was done, for people
  bool is_first_step = false;  // of a generation that others have left
  bool has_state = true;       // false: a newcomer that was not given any yet
  bool is_filled = false;      // it is being given one, or was and that failed in the middle
  bool is_torn = false;        // a loss came between the optimizer and commit()
  std::string my_kind;

  std::vector<Reducer::Settings> settings;  // while there are no reducers
  int tried = -1;                           // the generation that was joined last, or could not be
  Clock::time_point lost_at;
  std::vector<std::string> reasons;  // since the last generation that trained
};

void Elastic::Impl::check() const {
  const ErrorPlace place{.rank = world.global_rank(), .operation = "Elastic"};
  if (kept.ddps.empty()) {
    throw UsageError(place, "No wrapped model was added to the Checkpointer.\nCall add(ddp).");
  }
  if (!world.has_logical_ranks()) {
    throw UsageError(place,
                     "The world has no logical ranks, so the others could not do the work of a "
                     "rank that is lost.\nSet JoinOptions::logical_ranks, or start the job with "
                     "lockstep run --elastic, which does.");
  }
  const std::string engine = world.backend()->getBackendName();
  if (engine.find("mpi") != std::string::npos) {
    throw UsageError(place, text::format("The engine {} ends with the first rank that is lost, as "
                                         "MPI does.\nUse the engine auto.",
                                         engine));
  }
}

// What must be alike for a rank to take over another one's state, for people.
std::string Elastic::Impl::kind() const {
  std::string text;
  for (const Part& part : kept.parts) text += part.name + "\n";
  Snapshot snapshot;
  for (const Part& part : kept.parts) {
    if (!part.has_values && !part.is_collective) part.save(snapshot);
  }
  for (const NamedTensor& one : snapshot.tensors) {
    // State travels in the order of memory.
    text += text::format("{} {} {} {}\n", one.name, c10::toString(one.tensor.scalar_type()),
                         c10::str(one.tensor.sizes()), c10::str(one.tensor.strides()));
  }
  for (const DistributedDataParallel* const ddp : kept.ddps) {
    for (const std::string& line : ddp->reducer_->describe()) text += line + "\n";
  }
  return text::format(
      "lockstep {} with LibTorch {}, {} logical ranks, {} threads, seed {}, model and options "
      "{:x}, on {}",
      LOCKSTEP_VERSION, TORCH_VERSION, world.logical_size(), at::get_num_threads(), world.seed(),
      hash_bytes(text.data(), text.size()),
      is_any_platform_allowed() ? "any platform" : platform());
}

void Elastic::Impl::mark() {
  for (const Part& part : kept.parts) {
    if (part.marks.mark) part.marks.mark();
  }
  ddp_steps.clear();
  for (const DistributedDataParallel* const ddp : kept.ddps) {
    ddp_steps.push_back(ddp->reducer_->num_steps());
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    versions[i] = static_cast<std::int64_t>(parameters[i]._version());
  }
}

bool Elastic::Impl::is_whole() const {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (versions[i] != static_cast<std::int64_t>(parameters[i]._version())) return false;
  }
  return true;
}

// The engine of this generation is of no use any more, nor is what was built on it.
void Elastic::Impl::take_back() {
  if (kept.writer.joinable()) {  // a checkpoint that others will not complete
    kept.is_cancelled = true;
    kept.writer.join();
    kept.is_cancelled = false;
    if (std::exchange(kept.writer_failure, nullptr)) {
      Log(world.global_rank()).warning("the checkpoint that was being written is not complete");
    }
  }
  settings.resize(kept.ddps.size());
  for (std::size_t i = 0; i < kept.ddps.size(); ++i) {
    auto& reducer = kept.ddps[i]->reducer_;
    if (!reducer) continue;
    is_in_step |= reducer->give_up(ddp_steps[i]);
    settings[i] = reducer->settings();
    reducer.reset();
  }
}

void Elastic::Impl::attach() {
  for (std::size_t i = 0; i < kept.ddps.size(); ++i) {
    DistributedDataParallel& ddp = *kept.ddps[i];
    ddp.reducer_ = ddp.make_(/*are_equal=*/true);  // share_state() has made them so
    ddp.reducer_->take(settings[i]);
    ddp.reducer_->set_num_steps(ddp_steps[i]);
    watch(*ddp.reducer_);
  }
}

// In every step its ranks ask whether a change is wanted.
void Elastic::Impl::watch(Reducer& reducer) const {
  reducer.reform_when(
      [its = world] { return its.membership()->is_change_wanted(its.generation()); },
      [its = world] { return its.membership()->has_ended(its.generation()); });
}

bool Elastic::Impl::reform(bool is_planned, const std::exception_ptr& error) {
  const bool was_newcomer = !has_state;
  gauges->set(was_newcomer ? Doing::kWaitsToJoin : Doing::kReForming);
  take_back();
  const NextGeneration next =
      world.membership()->wait_for_next(std::max(world.generation(), tried), is_planned, my_kind);
  if (next.kind == NextKind::kLeave) return false;
  if (next.kind == NextKind::kIntact) std::rethrow_exception(error);  // not a lost rank
  reasons.insert(reasons.end(), next.changes.begin(), next.changes.end());
  tried = next.number;
  world.move_to(next);
  const StateShared shared = share_state(
      world, kept.parts, {.steps = has_state ? steps : -1, .is_whole = !is_torn && !is_filled},
      ddp_steps, is_filled);
  is_first_step = has_state = true;
  is_torn = false;
  steps = shared.steps;
  ddp_steps = shared.counts;
  for (const Part& part : kept.parts) {
    if (part.marks.rewind) part.marks.rewind(world);
  }
  attach();
  mark();
  gauges->set(Doing::kComputing);
  tell({.generation = next.number,
        .size = next.size,
        .step = steps,
        .is_redone = !is_planned && !was_newcomer && std::exchange(is_in_step, false),
        .reasons = std::exchange(reasons, {}),
        .num_joined = shared.num_newcomers,
        .seconds = std::chrono::duration<double>(Clock::now() - lost_at).count(),
        .bytes = shared.bytes});
  return true;
}

void Elastic::Impl::tell(const ElasticChange& change) const {
  if (world.rank() == 0) {
    std::string text =
        text::format("generation {}: {} rank{} at step {} after {:.0f} ms", change.generation,
                     change.size, change.size == 1 ? "" : "s", change.step, change.seconds * 1000);
    if (change.is_redone) text += ", which is done again";
    if (change.num_joined > 0) text += text::format("; {} joined", change.num_joined);
    if (change.bytes > 0) {
      text +=
          text::format("; {:.1f} MB of state were sent", static_cast<double>(change.bytes) / 1e6);
    }
    if (!change.reasons.empty()) text += text::format(" ({})", text::join(change.reasons, "; "));
    Log(world.global_rank()).info("{}", text);
  }
  on_change(change);
}

Elastic::Elastic(Checkpointer& checkpoints, std::int64_t steps)
    : impl_(std::make_unique<Impl>(checkpoints, steps)) {
  if (impl_->is_elastic()) impl_->check();
}
Elastic::~Elastic() = default;

std::int64_t Elastic::steps() const { return impl_->steps; }

void Elastic::on_change(std::function<void(const ElasticChange&)> call) {
  impl_->on_change = std::move(call);
}

void Elastic::commit() {
  ++impl_->steps;
  if (!impl_->is_elastic()) return;
  impl_->mark();
  if (std::exchange(impl_->is_first_step, false) && impl_->world.rank() == 0) {
    impl_->world.membership()->tell_step(impl_->world.generation());
  }
  for (const DistributedDataParallel* const ddp : impl_->kept.ddps) {
    if (ddp->reducer_->must_reform()) throw Reforming{};
  }
}

bool Elastic::run(const std::function<void()>& train) {
  Impl& self = *impl_;
  if (!self.is_elastic()) {
    train();
    return true;
  }
  if (std::exchange(self.is_running, true)) {
    throw UsageError({.rank = self.world.global_rank(), .operation = "Elastic::run"},
                     "run() was called inside of itself, or again.\nCall it once.");
  }
  Membership& membership = *self.world.membership();
  self.parameters.clear();
  Snapshot snapshot;
  for (const Part& part : self.kept.parts) {
    if (!part.has_values && !part.is_collective) part.save(snapshot);
  }
  for (const NamedTensor& one : snapshot.tensors) {
    if (!snapshot.buffers.contains(one.name)) self.parameters.push_back(one.tensor);
  }
  self.versions.resize(self.parameters.size());
  self.mark();
  self.my_kind = self.kind();
  bool must_reform = self.world.is_waiting();
  self.has_state = !must_reform;
  const bool shares = std::ranges::any_of(
      self.kept.ddps, [](const auto* ddp) { return ddp->reducer_->is_to_share(); });
  if (must_reform && !shares) {  // else it has a part of the optimizer's state only
    for (const Part& part : self.kept.parts) part.prepare();
  }
  bool is_planned = false;
  std::exception_ptr error;
  if (!must_reform) {
    for (const DistributedDataParallel* const ddp : self.kept.ddps) self.watch(*ddp->reducer_);
    membership.enter(self.world.logical_size(), self.my_kind);
  }
  self.lost_at = Clock::now();
  while (true) {
    try {
      if (must_reform && !self.reform(std::exchange(is_planned, false), error)) return false;
      must_reform = false;
      train();
      self.world.barrier();  // who did not come so far needs the state of those who did
      membership.finish();
      return true;
    } catch (const Reforming&) {
      is_planned = true;
      self.lost_at = Clock::now();
    } catch (const Error& one) {
      if (!may_be_loss(one)) throw;
      error = std::current_exception();
      if (!must_reform) {  // from here on it is lockstep that writes to parameters
        self.lost_at = Clock::now();
        self.is_torn = !self.is_whole();
      }
    }
    must_reform = true;
  }
}

}  // namespace lockstep
