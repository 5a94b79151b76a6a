#include "engine/runner_work.h"

#include <lockstep/error.h>

#include <system_error>

#include "base/text.h"

namespace lockstep {

using collective::MessageRequest;
using collective::OperationRequest;

bool RunnerWork::isCompleted() {
  std::exception_ptr error;
  try {
    if (!are_requests_done()) return false;
  } catch (...) {
    error = std::current_exception();
  }
  end(std::move(error));
  return true;
}

bool RunnerWork::are_requests_done() {
  const MutexLock lock(work_mutex_);
  while (!is_over_ && next_ < requests_.size()) {
    if (!runner_->poll(*requests_[next_])) return false;
    ++next_;
  }
  return true;
}

bool RunnerWork::isSuccess() const {
  const MutexLock lock(work_mutex_);
  return is_over_ && !error_;
}

std::exception_ptr RunnerWork::exception() const {
  const MutexLock lock(work_mutex_);
  return error_;
}

bool RunnerWork::wait(std::chrono::milliseconds limit) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLongest = std::chrono::hours(24 * 365);  // what is longer is no limit
  const auto until =
      limit <= kNoTimeout || limit > kLongest ? collective::Runner::kNoLimit : Clock::now() + limit;
  const Waited waited = wait_for_requests(until);
  if (waited.late != nullptr) throw_not_done(*waited.late, limit);
  if (const auto error = end(waited.error)) std::rethrow_exception(error);
  return true;
}

RunnerWork::Waited RunnerWork::wait_for_requests(collective::Runner::TimePoint until) {
  try {
    for (const auto& request : requests_) {
      if (!runner_->wait_until(*request, until)) return {.late = request.get()};
    }
  } catch (...) {
    return {.error = std::current_exception()};
  }
  return {};
}

void RunnerWork::throw_not_done(const collective::Request& request,
                                std::chrono::milliseconds limit) const {
  const auto* operation = dynamic_cast<const OperationRequest*>(&request);
  const collective::Activity activity =
      operation != nullptr
          ? operation->operation.activity()
          : collective::Activity{static_cast<const MessageRequest&>(request).message.name(),
                                 static_cast<const MessageRequest&>(request).message.name()};
  throw TimeoutError(
      {.rank = runner_->global_rank(runner_->rank()), .operation = activity.operation},
      text::format("{} was not done after {:.3f} s, the limit that was given to this wait.\n"
                   "It goes on: wait for it again.",
                   activity.text, std::chrono::duration<double>(limit).count()));
}

bool RunnerWork::is_message() const {
  return !requests_.empty() &&
         dynamic_cast<const MessageRequest*>(requests_.front().get()) != nullptr;
}

// The rank on the other side of a point-to-point message.
int RunnerWork::sourceRank() const {
  return is_message() ? static_cast<const MessageRequest&>(*requests_.front()).message.peer
                      : c10d::Work::sourceRank();
}

bool RunnerWork::cancel(const std::vector<RunnerWork*>& works) {
  std::vector<const collective::Request*> requests;
  for (const RunnerWork* work : works) {
    if (!work->is_message() || work->runner_ != works.front()->runner_) return false;
    requests.push_back(work->requests_.front().get());
  }
  return !works.empty() && works.front()->runner_->cancel(requests);
}

void RunnerWork::abort() {
  for (const auto& request : requests_) {
    if (!runner_->abandon(*request)) c10d::Work::abort();  // throws: it is not offered
  }
}

c10::intrusive_ptr<c10::ivalue::Future> RunnerWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool is_over = false;
  {
    const MutexLock lock(work_mutex_);
    if (future_) return future_;
    future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    is_over = is_over_;
  }
  const auto driver = is_over ? nullptr : driver_.lock();
  if (driver) {
    driver->drive(c10::intrusive_ptr<RunnerWork>::reclaim_copy(this));
  } else {
    isCompleted();  // it is over, or was so when the engine ended
  }
  return future;
}

// All requests are done, or one has failed. The first to see it records it; returns what went
// wrong.
std::exception_ptr RunnerWork::end(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const MutexLock lock(work_mutex_);
    if (!is_over_) {
      if (!error && after_) {
        try {
          after_();
        } catch (...) {
          error = std::current_exception();
        }
      }
      error_ = std::move(error);
      is_over_ = true;
      after_ = nullptr;
      finish(error_);  // c10d::Work's own record of it
    }
    error = error_;
    if (!has_completed_future_) future = future_;
    has_completed_future_ = has_completed_future_ || future;
  }
  // Without the mutex: what callers hang on the future runs in here, and may ask this work.
  if (future && error) {
    future->setError(error);
  } else if (future) {
    future->markCompleted(c10::IValue(tensors_));
  }
  return error;
}

// What callbacks throw is theirs: what goes wrong here is in the work and in its future.
void FutureDriver::complete(RunnerWork& work, std::exception_ptr error) noexcept {
  try {
    work.end(std::move(error));
  } catch (...) {  // NOLINT: see above
  }
}

void FutureDriver::drive(c10::intrusive_ptr<RunnerWork> work) {
  if (work->is_message()) {
    return workers_.run(
        [work] { complete(*work, work->wait_for_requests(collective::Runner::kNoLimit).error); });
  }
  const MutexLock lock(operations_->mutex);
  if (!operations_->has_thread) workers_.run([this, queue = operations_] { run(queue); });
  operations_->has_thread = true;
  operations_->works.push_back(std::move(work));
}

// A callback may wait for a later future, so another thread has the queue before callbacks run. It
// may also destroy the driver: after callbacks, only the queue is there.
void FutureDriver::run(const std::shared_ptr<Queue>& queue) {
  bool is_alone = false;  // there can be no more threads
  const MutexLock lock(queue->mutex);
  while (!queue->works.empty()) {
    auto work = std::move(queue->works.front());
    queue->works.pop_front();
    std::exception_ptr error;
    {
      const MutexUnlock unlock(queue->mutex);
      error = work->wait_for_requests(collective::Runner::kNoLimit).error;
    }
    is_alone = is_alone || !hand_over(queue);
    {
      const MutexUnlock unlock(queue->mutex);
      complete(*work, std::move(error));
      work.reset();  // without the lock
    }
    if (!is_alone) return;
  }
  queue->has_thread = false;
}

// Without works, drive() starts the next thread. Returns whether the queue is another's.
bool FutureDriver::hand_over(const std::shared_ptr<Queue>& queue) {
  queue->has_thread = !queue->works.empty();
  try {
    if (queue->has_thread) workers_.run([this, queue] { run(queue); });
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

}  // namespace lockstep
