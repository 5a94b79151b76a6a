#include "world/pending.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "base/posix.h"
#include "base/text.h"
#include "engine/runner_work.h"
#include "shm/neighbours.h"
#include "world/translate.h"

namespace lockstep {
namespace {

constexpr auto kShortestPause = std::chrono::microseconds(50);
constexpr auto kLongestPause = std::chrono::milliseconds(2);
// What is longer is no limit.
constexpr std::chrono::milliseconds kLongestLimit = std::chrono::hours(24 * 365);
// How often one that sleeps looks whether there is something to move on.
constexpr auto kLookInterval = std::chrono::milliseconds(50);

RunnerWork* of_runner(const StartedWork& started) {
  return dynamic_cast<RunnerWork*>(started.work.get());
}

bool is_on_device(const StartedWork& started) { return started.device != at::kCPU; }

// Gloo tells of messages and of reduce_scatter that they are done only who waits for them, once.
// Works of lockstep's engines may be asked, and those of devices are events in a stream.
bool needs_waiter(const StartedWork& started) {
  return of_runner(started) == nullptr && !is_on_device(started);
}

}  // namespace

std::string describe_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "all ranks";
  return text::format("{}[{}], {} bytes", c10::toString(tensor.scalar_type()),
                      text::join(tensor.sizes(), ", "), tensor.nbytes());
}

void throw_late_failure(const World& world, UnfinishedWorks& unfinished) {
  const auto failure = unfinished.take_failure();
  if (!failure) return;
  try {
    rethrow_translated(failure->error, world.members(), world.rank(), failure->operation,
                       failure->subject);
  } catch (const Error& known) {
    throw_error(known.kind(),
                {.rank = world.global_rank(), .peer = known.peer(), .operation = known.operation()},
                text::format("{} of {} failed on its device after the wait for it had returned, so "
                             "what it wrote is not its result.\n{}",
                             failure->operation, failure->subject, known.message()));
  }
}

Pending::State::State(World world, Call call, std::chrono::milliseconds timeout,
                      std::shared_ptr<UnfinishedWorks> unfinished)
    : world_(std::move(world)),
      operation_(call.operation),
      subject_(std::move(call.subject)),
      works_(std::move(call.works)),
      are_ours_(std::ranges::all_of(works_, of_runner)),
      timeout_at_(std::ranges::any_of(works_, is_on_device)
                      ? Clock::time_point::max()
                      : Clock::now() + std::min(timeout, kLongestLimit)),
      unfinished_(std::move(unfinished)),
      finish_(std::move(call.finish)) {}

Pending::State::~State() {
  if (!is_over_) let_go();
}

// A receive that nothing has come for is taken back, or it would take the next message. One whose
// first half is here goes on: the second half belongs to it. Gloo ends a send whose work is gone: a
// thread keeps it, which `hierarchical` starts when it is asked.
void Pending::State::let_go() noexcept try {
  std::vector<RunnerWork*> receives;
  for (const StartedWork& started : works_) {
    const c10d::OpType type = started.work->retrieveOpType();
    RunnerWork* const work = of_runner(started);
    if (type == c10d::OpType::SEND && work != nullptr) work->isCompleted();
    if (type == c10d::OpType::SEND && needs_waiter(started) && !waiter_) keep_in_thread();
    if (type != c10d::OpType::RECV) continue;
    if (work != nullptr) receives.push_back(work);
    if (work == nullptr && needs_waiter(started)) started.work->abort();
  }
  RunnerWork::cancel(receives);
  keep_unfinished();
} catch (...) {  // NOLINT: nobody will hear of it
}

void Pending::State::keep_unfinished() {
  for (const StartedWork& started : works_) {
    if (!is_on_device(started)) continue;
    if (started.work->isCompleted() && !started.work->exception()) continue;
    unfinished_->add(started.work, operation_, describe_tensor(subject_));
  }
}

void Pending::State::keep_in_thread() {
  Works works;
  std::ranges::copy_if(works_, std::back_inserter(works), needs_waiter);
  waiter_ = std::make_shared<Waiter>(std::move(works));
  Waiter::start(waiter_);
}

bool Pending::State::is_done() {
  if (is_over_) return true;
  for (const StartedWork& started : works_) {
    if (waiter_ && needs_waiter(started)) continue;
    if (started.work->isCompleted()) continue;
    if (needs_waiter(started)) keep_in_thread();
    return false;
  }
  return !waiter_ || waiter_->has_ended();
}

// Nobody joins the thread: an engine may know no way to end its wait before the deadline.
void Pending::State::Waiter::start(const std::shared_ptr<Waiter>& waiter) {
  std::thread([waiter] { waiter->run(); }).detach();
}

void Pending::State::Waiter::run() noexcept {
  const NoSigpipe no_sigpipe;
  std::exception_ptr problem;
  try {
    for (const StartedWork& started : works) started.work->wait();
  } catch (...) {
    problem = std::current_exception();
  }
  const MutexLock lock(mutex);
  error = problem;
  is_over = true;
  changed.notify_all();
}

bool Pending::State::Waiter::has_ended() {
  const MutexLock lock(mutex);
  return is_over;
}

// It ends at the engine's own deadline.
void Pending::State::Waiter::wait() {
  shm::neighbours::Looks looks;
  const MutexLock lock(mutex);
  while (!is_over) {
    changed.wait_until(mutex, std::min(looks.next(nullptr), Clock::now() + kLookInterval));
    const MutexUnlock unlock(mutex);
    looks.look(nullptr, true, Clock::now());
  }
  if (error) std::rethrow_exception(error);
}

void Pending::State::wait(Limit limit) {
  if (!is_over_) {
    if (limit && *limit <= kLongestLimit) {
      const auto ends = Clock::now() + std::max(*limit, std::chrono::milliseconds(0));
      // What passes only the caller's own limit goes on. What takes longer than the engine allows
      // is waited for as without one, which finds out why.
      if (!is_done_before(std::min(ends, timeout_at_)) && Clock::now() < timeout_at_) {
        throw_late(*limit);
      }
    }
    try {
      wait_for_works();
      keep_unfinished();
      const at::NoGradGuard no_grad;
      if (finish_) result_ = finish_();
    } catch (...) {
      error_ = std::current_exception();
    }
    is_over_ = true;
    finish_ = nullptr;
  }
  if (error_) {
    rethrow_translated(error_, world_.members(), world_.rank(), operation_,
                       describe_tensor(subject_));
  }
}

// Well or not.
bool Pending::State::is_done_before(Clock::time_point deadline) {
  shm::neighbours::Looks looks;
  std::chrono::nanoseconds pause = kShortestPause;
  while (!is_done()) {
    const auto left = deadline - Clock::now();
    if (left.count() <= 0) return false;
    if (are_ours_) {
      sleep_in_works(std::chrono::ceil<std::chrono::milliseconds>(left));
    } else {
      if (looks.look(nullptr, true, Clock::now())) continue;
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::nanoseconds>(2 * pause, kLongestPause);
    }
  }
  return true;
}

// Work of lockstep's engines moves on in waits, which end at a limit without ending the work.
void Pending::State::sleep_in_works(std::chrono::milliseconds limit) const {
  try {
    const auto next = std::ranges::find_if(
        works_, [](const StartedWork& started) { return !started.work->isCompleted(); });
    if (next != works_.end()) next->work->wait(limit);
  } catch (...) {  // NOLINT: if it has failed, the work knows why
  }
}

void Pending::State::wait_for_works() {
  // This thread may have to move other worlds on meanwhile, as lockstep's own engines do.
  const bool has_others = shm::neighbours::num_busy() > 0;
  if (!waiter_ && has_others && std::ranges::any_of(works_, needs_waiter)) keep_in_thread();
  if (waiter_) waiter_->wait();
  for (const StartedWork& started : works_) {
    if (waiter_ && needs_waiter(started)) continue;
    started.work->wait();
    // On a device that has only ordered streams, whatever has become of the operation.
    const auto error = is_on_device(started) ? started.work->exception() : nullptr;
    if (error) std::rethrow_exception(error);
  }
}

at::Tensor Pending::State::result() {
  wait(std::nullopt);
  return result_;
}

void Pending::State::throw_late(std::chrono::milliseconds limit) const {
  throw TimeoutError(
      {.rank = world_.global_rank(), .operation = operation_},
      text::format("{} of {} was not done after {:.3f} s, the limit that was given to this wait.\n"
                   "It goes on: wait for it again.",
                   operation_, describe_tensor(subject_),
                   std::chrono::duration<double>(limit).count()));
}

bool Pending::is_done() const { return state_->is_done(); }
void Pending::wait() const { state_->wait(std::nullopt); }
void Pending::wait(std::chrono::milliseconds limit) const { state_->wait(limit); }
at::Tensor Pending::result() const { return state_->result(); }

// Outside of NoGradGuard, so that the parts may be changed in place where gradients are recorded.
std::vector<at::Tensor> Pending::results() const {
  const at::Tensor all = result();
  if (lengths_.empty()) return {all};
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < lengths_.size(); ++i) {
    parts.push_back(all[static_cast<std::int64_t>(i)].narrow(0, 0, lengths_[i]));
  }
  return parts;
}

}  // namespace lockstep
