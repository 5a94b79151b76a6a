// The store of a world: LibTorch's own stores, opened where the placement says.
//
// On one host no port is opened: the store is a FileStore on a memory file that the launcher made,
// or on a file that loses its name as soon as all ranks have it open, so nothing is left behind.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "world/environment.h"

namespace lockstep {

// Before a store is asked again whether something has come: short beside the time waited so far, so
// that nothing is seen late and nobody asks often for long.
inline std::chrono::milliseconds pause_after(std::chrono::steady_clock::duration waited) {
  using std::chrono::milliseconds;
  return std::clamp(std::chrono::duration_cast<milliseconds>(waited) / 8, milliseconds(1),
                    milliseconds(50));
}

struct OpenStore {
  c10::intrusive_ptr<c10d::Store> store;
  std::string place;                  // for messages: "the file /tmp/...", "10.0.0.1:29500"
  std::function<void()> remove_name;  // called by rank 0 once all ranks have come
};

// Throws: SystemError, TimeoutError if the store's server cannot be reached in time.
OpenStore open_store(const Placement& placement, std::chrono::milliseconds timeout);

// Serves a store at an address of this host, on a port that the system chooses and sets.
OpenStore serve_store(TcpAddress& address, std::chrono::milliseconds timeout);

}  // namespace lockstep
