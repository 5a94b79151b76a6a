// Request: what a runner was asked for and has not forgotten yet. A runner derives its own kinds,
// with what it needs to move them on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "collective/operation.h"

namespace lockstep::collective {

constexpr int kAnyRank = -1;

// A point-to-point message. Those between two ranks with one tag arrive in the order sent.
struct Message {
  bool is_send = false;
  std::byte* memory = nullptr;  // only read if it is sent
  std::size_t bytes = 0;
  int peer = 0;  // kAnyRank: whoever sends
  int tag = 0;
  std::shared_ptr<const void> owner = {};  // of the memory, for as long as it is used
  std::chrono::milliseconds timeout{0};    // of a wait for it; 0: the runner's

  const char* name() const { return is_send ? "send" : "recv"; }
  // `peer_rank` is what errors call the peer.
  Activity activity(int peer_rank) const;
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds usual) const {
    return timeout.count() > 0 ? timeout : usual;
  }
};

struct Request {
  virtual ~Request() = default;
  bool is_done = false;      // guarded by the runner's lock
  std::uint64_t number = 0;  // of an operation on the board (shm/board.h); 0: it is not there
};

struct OperationRequest : Request {
  Operation operation;
};

struct MessageRequest : Request {
  Message message;  // once it is done, `peer` is the rank on the other side
};

}  // namespace lockstep::collective
