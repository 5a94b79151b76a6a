// Work of a TensorEngine: one or several operations that a caller waits for as one.
//
// It moves on in isCompleted() and wait(), on the caller's thread. Only futures that a caller asks
// for are completed by a thread, which is started with the first of them.
// Threading: any thread may call.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"
#include "collective/runner.h"

namespace lockstep {

class RunnerWork;

// Completes the futures that callers asked for. Its thread never throws: what goes wrong is
// stored in the future.
class FutureDriver {
 public:
  ~FutureDriver();
  void drive(c10::intrusive_ptr<RunnerWork> work);

 private:
  void run();

  Mutex mutex_;
  Condition changed_;
  std::deque<c10::intrusive_ptr<RunnerWork>> works_ LOCKSTEP_GUARDED_BY(mutex_);
  bool is_ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // started under mutex_
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
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  bool look() LOCKSTEP_EXCLUDES(work_mutex_);
  void end(std::exception_ptr error) LOCKSTEP_REQUIRES(work_mutex_);
  void complete_future() LOCKSTEP_EXCLUDES(work_mutex_);

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
