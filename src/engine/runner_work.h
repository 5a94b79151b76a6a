// Work of a TensorEngine: one or several operations that a caller waits for as one.
//
// It moves on in isCompleted() and wait(), on the caller's thread. Only futures that a caller asks
// for are completed by threads, which are started with the first of them.
// Threading: any thread may call, also while another waits.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"
#include "collective/runner.h"
#include "engine/workers.h"

namespace lockstep {

class RunnerWork;

// Completes the futures that callers asked for. Its threads never throw: what goes wrong is
// stored in the future. Operations end in the order started, so one thread at a time waits for all
// of them; a message may end before earlier ones and has a thread to itself. Callbacks may wait for
// other futures, and may run at the same time as those of others. All futures are complete when it
// ends: the engine has left by then, which ends all waits.
class FutureDriver {
 public:
  void drive(c10::intrusive_ptr<RunnerWork> work);

 private:
  // Outlives the driver where a callback destroys that.
  struct Queue {
    Mutex mutex;
    std::deque<c10::intrusive_ptr<RunnerWork>> works LOCKSTEP_GUARDED_BY(mutex);
    bool has_thread LOCKSTEP_GUARDED_BY(mutex) = false;
  };
  void run(const std::shared_ptr<Queue>& queue);
  bool hand_over(const std::shared_ptr<Queue>& queue) LOCKSTEP_REQUIRES(queue->mutex);
  static void complete(RunnerWork& work, std::exception_ptr error) noexcept;

  const std::shared_ptr<Queue> operations_ = std::make_shared<Queue>();
  Workers workers_;
};

class RunnerWork : public c10d::Work {
 public:
  // `tensors` are kept alive and are the result; `after` runs once all operations are done.
  RunnerWork(std::shared_ptr<collective::Runner> runner, std::weak_ptr<FutureDriver> driver,
             c10d::OpType type, int rank, std::vector<at::Tensor> tensors,
             std::vector<std::shared_ptr<collective::Request>> requests,
             std::function<void()> after)
      : c10d::Work(rank, type),
        runner_(std::move(runner)),
        driver_(std::move(driver)),
        tensors_(std::move(tensors)),
        requests_(std::move(requests)),
        after_(std::move(after)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Without a limit, what takes longer than the operation's timeout is the end of the engine. With
  // one, this throws TimeoutError at the limit, and the work goes on.
  bool wait(std::chrono::milliseconds limit) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  bool is_message() const;
  // For receives of one runner that nobody waits for any more: as Runner::cancel.
  static bool cancel(const std::vector<RunnerWork*>& works);

 private:
  friend class FutureDriver;
  struct Waited {
    const collective::Request* late = nullptr;  // the first that is not done
    std::exception_ptr error = {};
  };

  Waited wait_for_requests(collective::Runner::TimePoint until);
  bool are_requests_done() LOCKSTEP_EXCLUDES(work_mutex_);
  std::exception_ptr end(std::exception_ptr error) LOCKSTEP_EXCLUDES(work_mutex_);
  [[noreturn]] void throw_not_done(const collective::Request& request,
                                   std::chrono::milliseconds limit) const;

  // Constant after construction.
  const std::shared_ptr<collective::Runner> runner_;
  const std::weak_ptr<FutureDriver> driver_;  // goes with the engine
  const std::vector<at::Tensor> tensors_;
  const std::vector<std::shared_ptr<collective::Request>> requests_;

  mutable Mutex work_mutex_;
  // The first request that is not known to be done.
  std::size_t next_ LOCKSTEP_GUARDED_BY(work_mutex_) = 0;
  std::function<void()> after_ LOCKSTEP_GUARDED_BY(work_mutex_);
  bool is_over_ LOCKSTEP_GUARDED_BY(work_mutex_) = false;
  std::exception_ptr error_ LOCKSTEP_GUARDED_BY(work_mutex_);
  c10::intrusive_ptr<c10::ivalue::Future> future_ LOCKSTEP_GUARDED_BY(work_mutex_);
  bool has_completed_future_ LOCKSTEP_GUARDED_BY(work_mutex_) = false;
};

}  // namespace lockstep
