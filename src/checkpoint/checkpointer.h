// Checkpointer's inside: who writes what, what is being written, and what was added.
//
// A group is the ranks that see the same folder: all of them, or those of a host. Every group has a
// whole checkpoint; its first rank, the leader, begins and commits it. Threading: the caller's
// thread, and while a checkpoint is written in the background, `writer`, which has `writing` to
// itself.
#pragma once

#include <lockstep/checkpoint.h>

#include <atomic>
#include <csignal>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "archive/folder.h"
#include "base/gauges.h"
#include "checkpoint/parts.h"

namespace lockstep {

// All ranks' texts, by rank.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

struct Checkpointer::Impl {
  Impl(const std::string& folder, World its_world, const CheckpointOptions& its_options);
  ~Impl();

  // Who writes what. Collective.
  void settle();
  void settle_if_changed();

  bool is_leader() const { return group.front() == world.rank(); }
  bool is_on_one_host() const;
  void watch_signals();
  // Collective. Throws MismatchError on all ranks: some parts' calls are collective.
  void check_same_parts(const char* operation) const;

  // saving.cpp
  struct Saving {
    CheckpointName name;
    std::string key = {};  // of its exchanges by the store
    struct File {
      std::string name;
      std::vector<NamedTensor> tensors;
    };
    std::vector<File> files = {};  // that this rank writes
    std::string unfinished = {};   // the group's folder until it is committed
    std::string state = {};
    std::string failure = {};  // of this rank, before it could write
  };
  int num_writers() const;
  std::string take_snapshot(std::int64_t step, Snapshot& snapshot);
  void gather_slices(Snapshot& snapshot) const;
  Saving begin(std::int64_t step);
  void write(const Saving& saving, const Exchange& exchange) const;
  void start_writer(Saving saving);
  void agree_on_tensors(Snapshot& snapshot, const std::vector<std::int64_t>& hashes,
                        std::int64_t step) const;
  void copy_tensors(Saving& saving);
  void wait();

  // loading.cpp
  std::optional<CheckpointName> find_newest(std::vector<std::string>& skipped) const;
  Loaded load(const std::string& its_path, bool can_all_read, int reader,
              const LoadOptions& options);

  // Constant after construction.
  World world;
  CheckpointOptions options;
  std::string path;
  int uncaught = std::uncaught_exceptions();
  const std::shared_ptr<Gauges> gauges = Gauges::of_process();  // for who looks at the job

  // Constant as long as the ranks are the same.
  std::vector<int> group;                    // ranks, ascending
  std::unique_ptr<CheckpointFolder> folder;  // the leader's
  int settled_in = -1;                       // the generation that they are of

  std::vector<Part> parts;
  std::vector<DistributedDataParallel*> ddps;
  std::int64_t next_number = 0;
  std::vector<std::pair<int, struct sigaction>> signals;  // with what they did before
  // DDP has it, too, as either may end first.
  std::shared_ptr<std::atomic<std::uint64_t>> signal_bits =
      std::make_shared<std::atomic<std::uint64_t>>(0);

  std::vector<at::Tensor>
      copies;  // of what is written in the background; kept, as fresh memory is slow
  std::thread writer;
  std::exception_ptr writer_failure;
  std::atomic<bool> is_cancelled = false;
};

// What went wrong on a rank, for all to know.
std::string failure_text(const std::exception_ptr& failure, int rank);

// As a text for other ranks: bytes that are not UTF-8 do no harm.
std::string to_text(const Json& json);

}  // namespace lockstep
