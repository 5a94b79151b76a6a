// Runner: what runs operations on raw memory for all ranks of a world. shm::Group does it for the
// ranks of one host, MpiRunner for those of an MPI communicator, Hierarchy for those of several
// hosts.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <span>

#include "collective/request.h"

namespace lockstep::collective {

class Runner {
 public:
  virtual ~Runner() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // What errors call a rank: its rank in the world that was joined, of which this may be a part.
  virtual int global_rank(int peer) const { return peer; }

  // Whether Operation::count of a kAllToAll must be the largest part that any rank gives another.
  virtual bool needs_largest_part() const { return true; }

  // Whether a sum over ranks is the tree of reduce.h over all of them.
  virtual bool sums_in_tree() const { return true; }

  // Whether there is kReduceOnce: only where all ranks can map the same memory.
  virtual bool can_reduce_once() const { return false; }

  // Whether another rank is known to wait in an operation of another runner, perhaps for this rank.
  virtual bool is_needed_elsewhere() { return false; }

  // Begins an operation; memory must stay as it is until it is done.
  // Throws UsageError, or what an earlier operation failed with.
  virtual std::shared_ptr<Request> start(Operation operation) = 0;

  // Begins a message to or from another rank, or this one. It is sent when the memory may be used
  // again, which can be before it is received.
  virtual std::shared_ptr<MessageRequest> start(Message message) = 0;

  // Whether the request is done. Does not wait.
  // Throws the runner's failure, after which every call throws it.
  virtual bool poll(const Request& request) = 0;

  // Returns whether the request is done; false at `until`, which ends nothing. Without `until`, a
  // request that takes longer than its timeout is the runner's failure.
  // Throws TimeoutError, PeerLostError, MismatchError.
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr TimePoint kNoLimit = TimePoint::max();
  virtual bool wait_until(const Request& request, TimePoint until) = 0;
  void wait(const Request& request) { wait_until(request, kNoLimit); }

  // Tells the others that this rank takes no further part, and lets go of all memory. What is under
  // way or comes later throws world_has_ended().
  virtual void leave() noexcept = 0;

  // Takes back receives that no message has come for, so that the next ones find it: all, or none
  // of them. False if it is too late for one, if one is something else, or if this runner cannot.
  virtual bool cancel(std::span<const Request* const>) { return false; }

  // Ends a wait for this request, on any thread, with an exception; its memory stays in use. False
  // if this runner cannot.
  virtual bool abandon(Request&) { return false; }
};

// A UsageError of `rank`.
std::exception_ptr world_has_ended(int rank);
// Of an elastic job: `rank` waits, and somebody is lost. PeerLostError.
[[noreturn]] void throw_ended(const Activity& activity, int rank);

}  // namespace lockstep::collective
