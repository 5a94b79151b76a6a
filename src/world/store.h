// The store of a world: LibTorch's own stores, opened where the placement says.
//
// On one host no port is opened: the store is a FileStore on a memory file that the launcher made,
// or on a file that loses its name as soon as all ranks have it open, so nothing is left behind.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>

#include "world/environment.h"

namespace lockstep {

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
