// Pending: an operation of a World that has been started and may not be done yet.
//
// A handle: copies are the same operation. Wait for it before what it writes is read, and before
// what it reads is changed: only wait() and result() make what it wrote visible. It keeps its world
// and its tensors alive.
//
// Wait for each one. One that is dropped without that is not undone: the other ranks count on it,
// so a collective and a send go on in later calls of this process, and their errors are lost. A
// receive that no message has come for is taken back by the engine shm; with other engines it may
// still take the next message of that rank and tag. Threading: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

class LOCKSTEP_API Pending {
 public:
  // Whether it has ended, well or not. Does not wait.
  bool is_done() const;

  // Returns when it is done, at most after JoinOptions::timeout.
  // Throws what it failed with: PeerLostError, TimeoutError, MismatchError.
  // Of tensors on a GPU it is not the host that waits but the current stream: what is queued there
  // from now on finds the result. What fails later is thrown by the next call of the same world on
  // this rank; what hangs, the engine ends after twice the timeout.
  void wait() const;
  // The same within `limit`. Throws TimeoutError when that has passed: the operation goes on, and
  // may be waited for again. When JoinOptions::timeout has passed since it was started, this waits
  // as wait() does, and what it throws is the end of the operation.
  void wait(std::chrono::milliseconds limit) const;

  // What the call would have returned. Waits for it.
  at::Tensor result() const;
  // Of all_gather_uneven_async: the tensors of all ranks, in the order of ranks; its result() has
  // them stacked, with rows of zeros up to the longest. Of all others: result() alone.
  std::vector<at::Tensor> results() const;

  struct State;  // src/world/pending.h
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  friend class World;
  std::shared_ptr<State> state_;
  std::vector<std::int64_t> lengths_;  // by rank, if they may differ
};

}  // namespace lockstep
