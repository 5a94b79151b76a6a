// Hierarchy: runs operations for the ranks of several hosts, by shared memory inside each host and
// messages between them (steps.h).
//
// Invariant: operations run in the order started, one at a time. The first failure ends it: all
// that is under way or comes later throws it. Before a caller hears of it, nothing touches the
// operation's memory any more, and the other ranks have been told.
// Threading: any thread may call. One thread runs the operations and sleeps while it waits; callers
// that wait check for ranks that are gone, and interrupt it. A message is waited for by the
// caller's thread, or, if the caller only looks at it, by one of the workers: an engine's own
// message may tell that it is done to whoever waits for it, and to nobody else. Callers that wait
// move the groups of other worlds on (shm/neighbours.h).
#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <thread>

#include "base/gauges.h"
#include "base/mutex.h"
#include "collective/runner.h"
#include "engine/hierarchical/layout.h"
#include "engine/hierarchical/steps.h"
#include "engine/hierarchical/wire.h"
#include "engine/workers.h"
#include "shm/board.h"

namespace lockstep {

class Hierarchy final : public collective::Runner {
 public:
  // `engine` connects all ranks of the context, and sends and receives.
  Hierarchy(const EngineContext& context, std::shared_ptr<shm::Group> local, Backend engine);
  ~Hierarchy() override;
  Hierarchy(const Hierarchy&) = delete;
  Hierarchy& operator=(const Hierarchy&) = delete;

  int rank() const override { return layout_.rank; }
  int size() const override { return layout_.num_ranks(); }
  int global_rank(int peer) const override { return layout_.global_rank(peer); }

  bool sums_in_tree() const override { return layout_.sums_in_tree(); }

  std::shared_ptr<collective::Request> start(collective::Operation operation) override;
  std::shared_ptr<collective::MessageRequest> start(collective::Message message) override;
  bool poll(const collective::Request& request) override;
  bool wait_until(const collective::Request& request, TimePoint until) override;
  void leave() noexcept override;

 private:
  using Activity = collective::Activity;
  using Task = collective::OperationRequest;
  struct MessageTask : collective::MessageRequest, std::enable_shared_from_this<MessageTask> {
    Parcel parcel = {};                                // to or from another rank
    std::shared_ptr<collective::MessageRequest> self;  // to or from this one
    bool has_waiter = false;                           // a thread waits for the parcel
  };

  void run() LOCKSTEP_EXCLUDES(mutex_);
  void run_next() LOCKSTEP_REQUIRES(mutex_);
  void fail(std::exception_ptr error) LOCKSTEP_REQUIRES(mutex_);
  std::exception_ptr first_cause(std::exception_ptr error, const Activity& activity)
      LOCKSTEP_EXCLUDES(mutex_);
  void throw_what_others_know(const Activity& activity);
  void interrupt(std::exception_ptr cause) LOCKSTEP_REQUIRES(mutex_);
  // `since_end`: how long it is known that a rank is lost.
  void check_wait(const collective::Request& request, std::chrono::steady_clock::duration waited,
                  std::chrono::steady_clock::duration since_end, shm::BoardWait& board_wait)
      LOCKSTEP_EXCLUDES(mutex_);
  void show_wait(GaugeWait& wait, const collective::Request& request, TimePoint since)
      LOCKSTEP_EXCLUDES(mutex_);
  void check_peers(const Activity& activity);
  void throw_if_failed() const LOCKSTEP_REQUIRES(mutex_);
  std::exception_ptr why_left() const LOCKSTEP_REQUIRES(mutex_);
  void check(const collective::Message& message) const;
  bool take_waiter(MessageTask& task) LOCKSTEP_EXCLUDES(mutex_);
  void wait_by_worker(MessageTask& task) LOCKSTEP_EXCLUDES(mutex_);
  void wait_for(MessageTask& task, std::chrono::milliseconds timeout) LOCKSTEP_EXCLUDES(mutex_);
  bool wait_for_self(MessageTask& task, TimePoint until) LOCKSTEP_EXCLUDES(mutex_);

  // Constant after construction.
  const std::chrono::milliseconds timeout_;
  const HostLayout layout_;
  const std::shared_ptr<shm::Group> local_;
  const std::shared_ptr<shm::BoardChannel> channel_;  // may be none
  const std::function<bool()> has_ended_;             // a rank is lost; may be none
  Wire wire_;
  const std::shared_ptr<Gauges> gauges_ = Gauges::of_process();  // for who looks at the job

  Mutex mutex_;
  Condition changed_;
  std::deque<std::shared_ptr<Task>> queue_ LOCKSTEP_GUARDED_BY(mutex_);  // the first one runs
  std::uint64_t num_started_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::exception_ptr cause_ LOCKSTEP_GUARDED_BY(mutex_);    // why the thread was interrupted
  std::exception_ptr failure_ LOCKSTEP_GUARDED_BY(mutex_);  // what every call throws
  bool is_ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;

  std::shared_ptr<HostSteps> steps_;  // the thread's own
  std::thread thread_;                // the last two: they use all of these
  Workers workers_;
};

}  // namespace lockstep
