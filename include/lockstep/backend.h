// Engines: what moves bytes between ranks. Each is a c10d::Backend, chosen by name from one table.
//
// Programs rarely need this header: World::join() chooses an engine, world.backend() is it.
#pragma once

#include <lockstep/export.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

// One process of a world, as all ranks know it.
struct Member {
  int rank = 0;  // in the world that was joined; what errors call it, also in a part of that world
  std::string host = {};  // its name, for people
  std::string host_id =
      {};  // equal if and only if two members can share memory and see each other's pids
  std::string network_id = {};  // equal if and only if two members have one loopback interface
  int pid = 0;
  std::uint64_t start_time = 0;  // with pid: the process, even after the pid is used again
  int local_rank = 0;            // among the ranks of its host in the world that was joined
  int num_gpus = 0;              // of CUDA, that it sees
  // The accelerators that it sees: their type as LibTorch names it, such as "cuda" (empty: none),
  // how many, and a text that is the same for ranks of one host if they see the same ones.
  std::string device_type = {};
  int num_devices = 0;
  std::string visible_devices = {};
  // Which of them is its own. It has none if ranks of its host that see the same ones have them
  // all: then this is num_devices or more.
  int device_index = 0;
  // Its memory that says what it waits for (src/shm/board.h); -1 if there is none.
  int page_fd = -1;
  std::uint64_t page_inode = 0;
  std::uint64_t page_address = 0;
};

namespace shm {
class BoardChannel;
}

// What an engine is given to connect the ranks of a world.
struct EngineContext {
  int rank = 0;                                 // this one's place in `members`
  std::vector<Member> members;                  // by rank in this world
  c10::intrusive_ptr<c10d::Store> store;        // the engine's own part of the world's store
  std::chrono::milliseconds connect_timeout{};  // until the ranks are connected
  std::chrono::milliseconds timeout{};          // of every operation after that
  std::string master_address;                   // a host that all hosts reach; empty if not needed
  std::shared_ptr<const void> communicator;     // of join_mpi (lockstep/mpi.h)
  std::string launcher;                         // what started the ranks, such as "OpenMPI"
  // Where the engine says what its ranks wait for, so that mismatches across engines are found.
  std::shared_ptr<shm::BoardChannel> channel;
  // In an elastic job: whether a rank of it is known to be lost, so that waits look for it at once.
  // Cheap, and called from any thread.
  std::function<bool()> has_ended;

  int size() const { return static_cast<int>(members.size()); }
  // What errors call this rank.
  int global_rank() const {
    return members.empty() ? rank : members[static_cast<std::size_t>(rank)].rank;
  }
  LOCKSTEP_API bool is_one_host() const;
  LOCKSTEP_API bool is_one_network() const;  // all members have one loopback interface
};

struct EngineInfo {
  std::string name;
  std::string unavailable;  // why it cannot be used in this build; empty if it can
};

// All engines that lockstep knows, in the order in which `auto` prefers them. "hierarchical" is
// also known as "hierarchical:gloo" and "hierarchical:mpi", by what connects the hosts.
LOCKSTEP_API std::vector<EngineInfo> engines();

// Connects all ranks; collective.
// Throws: UsageError if there is no engine of that name in this build, or what the engine throws.
LOCKSTEP_API c10::intrusive_ptr<c10d::Backend> make_engine(const std::string& name,
                                                           const EngineContext& context);

}  // namespace lockstep
