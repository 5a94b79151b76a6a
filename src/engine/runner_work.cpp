#include "engine/runner_work.h"

namespace lockstep {

bool RunnerWork::isCompleted() {
  const bool is_over = look();
  if (is_over) complete_future();
  return is_over;
}

bool RunnerWork::look() {
  const MutexLock lock(work_mutex_);
  if (is_over_) return true;
  try {
    while (next_ < requests_.size()) {
      if (!runner_->poll(*requests_[next_])) return false;
      ++next_;
    }
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
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

bool RunnerWork::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  {
    const MutexLock lock(work_mutex_);
    if (!is_over_) {
      try {
        for (; next_ < requests_.size(); ++next_) {
          if (timeout == kNoTimeout) {
            runner_->wait(*requests_[next_]);
          } else {
            runner_->wait(*requests_[next_], timeout);
          }
        }
        end(nullptr);
      } catch (...) {
        end(std::current_exception());
      }
    }
    error = error_;
  }
  complete_future();
  if (error) std::rethrow_exception(error);
  return true;
}

// The rank on the other side of a point-to-point message.
int RunnerWork::sourceRank() const {
  const auto* message = dynamic_cast<const collective::MessageRequest*>(requests_.front().get());
  return message == nullptr ? c10d::Work::sourceRank() : message->message.peer;
}

// Without the mutex, which whoever waits has.
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
  if (is_over) {
    complete_future();
  } else if (const auto driver = driver_.lock()) {
    driver->drive(c10::intrusive_ptr<RunnerWork>::reclaim_copy(this));
  } else {
    isCompleted();  // without an engine nothing moves any more
  }
  return future;
}

void RunnerWork::end(std::exception_ptr error) {
  error_ = std::move(error);
  if (!error_ && after_) {
    try {
      after_();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  is_over_ = true;
  after_ = nullptr;
  finish(error_);  // c10d::Work's own record of it
}

// Without the mutex: what callers hang on the future runs in here, and may ask this work.
void RunnerWork::complete_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    const MutexLock lock(work_mutex_);
    if (!future_ || has_completed_future_) return;
    has_completed_future_ = true;
    future = future_;
    error = error_;
  }
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(tensors_));
  }
}

FutureDriver::~FutureDriver() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void FutureDriver::drive(c10::intrusive_ptr<RunnerWork> work) {
  const MutexLock lock(mutex_);
  works_.push_back(std::move(work));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void FutureDriver::run() {
  const MutexLock lock(mutex_);
  while (true) {
    while (!is_ending_ && works_.empty()) changed_.wait(mutex_);
    if (is_ending_) return;
    const auto work = works_.front();
    works_.pop_front();
    const MutexUnlock unlock(mutex_);
    try {
      work->wait(kNoTimeout);
    } catch (...) {  // NOLINT: it is in the future and in the work
    }
  }
}

}  // namespace lockstep
