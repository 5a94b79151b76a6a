// MpiRunner: operations on raw memory for all ranks of an MPI communicator.
//
// A thread of its own runs the operations one after another, in the order in which they were
// started, by messages between pairs of ranks (mpi_plan.h). It only ever begins messages and looks
// at them, so that it keeps deadlines, and sleeps between looks. Before its bytes every message has
// a header that says what the sender is doing: the first that differs is an error on all ranks.
// The first failure is the end: it is kept, told to the others (mpi_news.h), and thrown by every
// later call. Threading: any thread may call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/mpi_news.h"
#include "backend/mpi_traffic.h"
#include "shm/runner.h"

namespace lockstep {

class MpiRunner final : public shm::Runner {
 public:
  // `traffic` connects the ranks of the context, in their order.
  MpiRunner(const EngineContext& context, std::unique_ptr<MpiTraffic> traffic);
  ~MpiRunner() override;
  MpiRunner(const MpiRunner&) = delete;
  MpiRunner& operator=(const MpiRunner&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool needs_largest_part() const override { return false; }

  std::shared_ptr<shm::Request> start(shm::Operation operation) override;
  bool poll(const shm::Request& request) override;
  void wait(const shm::Request& request, std::chrono::milliseconds timeout) override;
  void wait(const shm::Request& request) override;
  std::shared_ptr<shm::Request> send(const std::byte* memory, std::size_t bytes, int peer,
                                     int tag) override;
  std::shared_ptr<shm::Request> receive(std::byte* memory, std::size_t bytes, int peer,
                                        int tag) override;
  bool abandon(shm::Request& request) override;

 private:
  using RequestPtr = std::shared_ptr<shm::Request>;
  using Clock = std::chrono::steady_clock;
  struct Ended {};  // thrown in the thread when the engine ends under an operation

  RequestPtr start_mail(shm::Request request);
  void wait_until(const shm::Request& request, Clock::time_point deadline);
  void throw_if_failed() const;
  [[noreturn]] void throw_failure(std::unique_lock<std::mutex>& lock);
  void fail(const std::exception_ptr& error);
  void stop(const std::exception_ptr& reason) noexcept;

  // In the thread.
  void work();
  RequestPtr next();
  void post_mail();
  std::exception_ptr error_of(const MpiProblem& problem) const;
  void finish(const RequestPtr& request);
  void deliver_mail();
  void leave();

  // One operation, in the thread (mpi_pieces.cpp).
  void run(const RequestPtr& request);
  void run_piece(const shm::Operation& operation, std::size_t first, std::size_t count);
  void exchange(const shm::Operation& operation, const MpiPlan& plan);
  void compare(const shm::Operation& operation, const MpiPlan& plan);
  void reduce(const shm::Operation& operation, const MpiPlan& plan);
  void finish_messages(const shm::Operation& operation);
  [[noreturn]] void time_out(const shm::Operation& operation);

  // Constant after construction.
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const int largest_tag_;
  MpiNews news_;
  std::unique_ptr<mpi::FinalizeHook> hook_;

  // The thread's.
  std::unique_ptr<MpiTraffic> traffic_;
  std::uint64_t number_ = 0;  // of the present operation, from 1

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable wake_;  // the thread
  std::condition_variable done_;  // those who wait
  std::deque<RequestPtr> operations_;
  std::deque<RequestPtr> mail_;  // not posted yet
  std::exception_ptr failure_;   // also the reason of a peaceful end
  bool has_failed_ = false;
  std::atomic<bool> is_over_{false};  // with failure_; also read without the lock
  bool has_left_ = false;             // the thread: nothing uses callers' memory any more
  std::thread thread_;
};

}  // namespace lockstep
