// Runner: what runs operations on raw memory for all ranks of a world. Group does it for the ranks
// of one host, MpiRunner for those of an MPI communicator, the hierarchical engine
// (backend/hierarchy.h) for those of several.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "shm/operation.h"

namespace lockstep::shm {

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

  // Whether the request is done. Does not wait.
  // Throws the runner's failure, after which every call throws it.
  virtual bool poll(const Request& request) = 0;

  // Returns when the request is done. Throws TimeoutError, PeerLostError, MismatchError.
  virtual void wait(const Request& request, std::chrono::milliseconds timeout) = 0;
  virtual void wait(const Request& request) = 0;  // as long as an operation may take

  // Messages between two ranks (or to oneself). Those with one tag arrive in the order sent.
  // A message is sent when the memory may be used again, which can be before it is received.
  virtual std::shared_ptr<Request> send(const std::byte* memory, std::size_t bytes, int peer,
                                        int tag) = 0;
  virtual std::shared_ptr<Request> receive(std::byte* memory, std::size_t bytes, int peer,
                                           int tag) = 0;

  // Ends a wait for this message, on any thread, with an exception; its memory stays in use. False
  // if this runner cannot.
  virtual bool abandon(Request&) { return false; }
};

}  // namespace lockstep::shm
