// Hierarchy: runs operations for the ranks of several hosts, by shared memory inside each host and
// messages between them (host_steps.h).
//
// Invariant: operations run in the order started, one at a time. The first failure ends it: all
// that is under way or comes later throws it. Before a caller hears of it, nothing touches the
// operation's memory any more, and the other ranks have been told.
// Threading: any thread may call. One thread runs the operations and sleeps while it waits; callers
// that wait look around for ranks that are gone, and interrupt it.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/host_layout.h"
#include "backend/host_steps.h"
#include "backend/wire.h"
#include "shm/runner.h"

namespace lockstep {

class Hierarchy final : public shm::Runner {
 public:
  // `engine` connects all ranks of the context, and sends and receives.
  Hierarchy(const EngineContext& context, std::shared_ptr<shm::Group> local, Backend engine);
  ~Hierarchy() override;
  Hierarchy(const Hierarchy&) = delete;
  Hierarchy& operator=(const Hierarchy&) = delete;

  int rank() const override { return layout_.rank; }
  int size() const override { return layout_.num_ranks(); }

  std::shared_ptr<shm::Request> start(shm::Operation operation) override;
  bool poll(const shm::Request& request) override;
  void wait(const shm::Request& request, std::chrono::milliseconds timeout) override;
  void wait(const shm::Request& request) override { wait(request, timeout_); }
  std::shared_ptr<shm::Request> send(const std::byte* memory, std::size_t bytes, int peer,
                                     int tag) override;
  std::shared_ptr<shm::Request> receive(std::byte* memory, std::size_t bytes, int peer,
                                        int tag) override;

 private:
  struct Task : shm::Request {
    Parcel parcel = {};                // of mail between hosts
    std::shared_ptr<Request> at_home;  // mail to itself
  };

  void run();
  void run_next(std::unique_lock<std::mutex>& lock);
  void fail(std::unique_lock<std::mutex>& lock, std::exception_ptr error);
  std::exception_ptr first_cause(std::exception_ptr error, const std::string& what);
  void throw_what_others_know(const std::string& what);
  void interrupt(std::exception_ptr cause);
  void look_around(const shm::Request& request, bool is_late);
  void throw_if_failed() const;
  void check_mail(const char* operation, int peer, int least, int tag) const;
  void wait_for_mail(Task& task, std::chrono::milliseconds timeout);

  // Constant after construction.
  const std::chrono::milliseconds timeout_;
  const HostLayout layout_;
  const std::shared_ptr<shm::Group> local_;
  Wire wire_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_;  // the first one runs
  std::uint64_t num_started_ = 0;
  std::exception_ptr cause_;    // why the thread was interrupted
  std::exception_ptr failure_;  // what every call throws
  bool is_ending_ = false;

  std::shared_ptr<HostSteps> steps_;  // the thread's own
  std::thread thread_;                // last: it uses all of these
};

}  // namespace lockstep
