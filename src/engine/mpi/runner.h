// MpiRunner: operations on raw memory for all ranks of an MPI communicator.
//
// A thread of its own runs the operations one after another, in the order in which they were
// started, by messages between pairs of ranks (plan.h). It only ever begins messages and looks
// at them, so that it keeps deadlines, and sleeps between looks. Before its bytes every message has
// a header that says what the sender is doing: the first that differs is an error on all ranks.
// The first failure is the end: it is kept, told to the others (notices.h), and thrown by every
// later call. Threading: any thread may call.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "collective/runner.h"
#include "engine/mpi/notices.h"
#include "engine/mpi/traffic.h"
#include "shm/board.h"

namespace lockstep {

class MpiRunner final : public collective::Runner {
 public:
  // `traffic` connects the ranks of the context, in their order.
  MpiRunner(const EngineContext& context, std::unique_ptr<MpiTraffic> traffic);
  ~MpiRunner() override;
  MpiRunner(const MpiRunner&) = delete;
  MpiRunner& operator=(const MpiRunner&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int global_rank(int peer) const override { return notices_.global_rank(peer); }
  bool needs_largest_part() const override { return false; }

  std::shared_ptr<collective::Request> start(collective::Operation operation) override;
  std::shared_ptr<collective::MessageRequest> start(collective::Message message) override;
  bool poll(const collective::Request& request) override;
  bool wait_until(const collective::Request& request, TimePoint until) override;
  void leave() noexcept override;
  bool abandon(collective::Request& request) override;

 private:
  using Activity = collective::Activity;
  using Operation = collective::Operation;
  using OperationPtr = std::shared_ptr<MpiOperation>;
  using Clock = std::chrono::steady_clock;
  struct Ended {};  // thrown in the thread when the engine ends under an operation

  void check_peer(int peer, const Activity& activity, Clock::duration waited);
  void throw_if_failed() const LOCKSTEP_REQUIRES(mutex_);
  [[noreturn]] void throw_failure() LOCKSTEP_REQUIRES(mutex_);
  void fail(const std::exception_ptr& error) LOCKSTEP_EXCLUDES(mutex_);
  void stop(const std::exception_ptr& reason) noexcept LOCKSTEP_EXCLUDES(mutex_);
  Activity activity_of(const collective::Message& message) const {
    return message.activity(notices_.global_rank(message.peer));
  }

  // In the thread.
  void work();
  OperationPtr next() LOCKSTEP_EXCLUDES(mutex_);
  void post_messages() LOCKSTEP_EXCLUDES(mutex_);
  std::exception_ptr error_of(const MpiProblem& problem) const;
  void finish(const OperationPtr& request) LOCKSTEP_EXCLUDES(mutex_);
  void deliver_messages() LOCKSTEP_EXCLUDES(mutex_);
  void end() LOCKSTEP_EXCLUDES(mutex_);

  // One operation, in the thread (pieces.cpp).
  void run(const OperationPtr& request);
  void run_piece(const Operation& operation, std::size_t first, std::size_t count);
  void exchange(const Operation& operation, const MpiPlan& plan);
  void compare(const Operation& operation, const MpiPlan& plan);
  void reduce(const Operation& operation, const MpiPlan& plan);
  void finish_transfers(const Operation& operation);
  [[noreturn]] void time_out(const Operation& operation);

  // Constant after construction.
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const int largest_tag_;
  const std::shared_ptr<shm::BoardChannel> channel_;  // may be none
  MpiNotices notices_;
  std::unique_ptr<mpi::FinalizeHook> hook_;

  // The thread's.
  std::unique_ptr<MpiTraffic> traffic_;
  std::uint64_t number_ = 0;  // of the present operation, from 1

  mutable Mutex mutex_;
  Condition wake_;  // the thread
  Condition done_;  // those who wait
  std::deque<OperationPtr> operations_ LOCKSTEP_GUARDED_BY(mutex_);
  // Not posted yet.
  std::deque<std::shared_ptr<MpiMessage>> messages_ LOCKSTEP_GUARDED_BY(mutex_);
  // Also the reason of a regular end.
  std::exception_ptr failure_ LOCKSTEP_GUARDED_BY(mutex_);
  bool has_failed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  // The thread: nothing uses callers' memory any more.
  bool has_left_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::atomic<bool> is_over_{false};  // with failure_; also read without the lock
  std::thread thread_;
};

}  // namespace lockstep
