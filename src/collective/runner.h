// Runner: what runs operations on raw memory for all ranks of a world. shm::Group does it for the
// ranks of one host, MpiRunner for those of an MPI communicator, Hierarchy for those of several
// hosts.
#pragma once

#include <chrono>
#include <memory>

#include "collective/request.h"

namespace lockstep::collective {

class Runner {
 public:
  virtual ~Runner() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Whether Operation::count of a kAllToAll must be the largest part that any rank gives another.
  virtual bool needs_largest_part() const { return true; }

  // Begins an operation; memory must stay as it is until it is done.
  // Throws UsageError, or what an earlier operation failed with.
  virtual std::shared_ptr<Request> start(Operation operation) = 0;

  // Begins a message to or from another rank, or this one. It is sent when the memory may be used
  // again, which can be before it is received.
  virtual std::shared_ptr<MessageRequest> start(Message message) = 0;

  // Whether the request is done. Does not wait.
  // Throws the runner's failure, after which every call throws it.
  virtual bool poll(const Request& request) = 0;

  // Returns when the request is done. Throws TimeoutError, PeerLostError, MismatchError.
  virtual void wait(const Request& request, std::chrono::milliseconds timeout) = 0;
  virtual void wait(const Request& request) = 0;  // as long as an operation may take

  // Ends a wait for this request, on any thread, with an exception; its memory stays in use. False
  // if this runner cannot.
  virtual bool abandon(Request&) { return false; }
};

}  // namespace lockstep::collective
