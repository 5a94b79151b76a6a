// ShardLanes: the records of several shards in turn, read at the same time.
//
// Of n lanes, lane j reads the shards j, j + n, j + 2 n, ... one after the other. Lanes give a
// record each in turn, and one that has come to its end is left out. So the order depends on the
// number of lanes and on nothing else. Each lane is read ahead by one thread, as far as there is
// room; without threads, and with one lane, a record is read when it is asked for.
// Threading: next() is called by one thread at a time. A lane belongs to its thread, what it has
// read is guarded by mutex_.
#pragma once

#include <lockstep/loader_source.h>

#include <any>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <thread>
#include <variant>
#include <vector>

#include "base/mutex.h"

namespace lockstep {

struct NumberedRecord {
  std::size_t index;  // of its shard, and its place there
  std::any record;
};

class ShardLanes {
 public:
  // `room`: records that may be ready in all lanes; those that are read quickly may be more. `rank`
  // is for errors.
  // Throws: SystemError if a thread cannot be started.
  ShardLanes(const detail::LoaderSource& source, const std::vector<std::size_t>& shards,
             std::size_t num_lanes, int threads, std::size_t room, int rank);
  ~ShardLanes();
  ShardLanes(const ShardLanes&) = delete;
  ShardLanes& operator=(const ShardLanes&) = delete;

  // Nothing at the end of all shards. Throws: what reading throws, or UsageError that names shard
  // and record; then nothing comes any more.
  std::optional<NumberedRecord> next();

 private:
  struct Lane {
    std::vector<std::size_t> shards;
    std::size_t num_opened = 0;
    std::size_t place = 0;  // in the shard that is open
    std::function<std::any()> reader = {};
  };
  using Item = std::variant<NumberedRecord, std::exception_ptr>;
  struct Queue {
    std::deque<Item> items = {};
    std::size_t last_block = 0;  // how many were read at once
    bool is_over = false;        // nothing comes behind the last item
  };

  std::optional<NumberedRecord> read(Lane& lane) const;
  std::optional<NumberedRecord> take(std::size_t lane);
  void work(std::size_t thread);
  std::optional<std::size_t> wait_for_room(std::size_t thread);
  bool read_block(std::size_t lane, std::vector<Item>& block);
  std::size_t room_in(const Queue& queue) const;
  void stop();

  // Constant after construction.
  const detail::LoaderSource& source_;
  const std::size_t room_;  // in a lane
  const int rank_;
  std::vector<std::thread> threads_;
  std::size_t num_threads_ = 0;

  std::vector<Lane> lanes_;         // each its thread's, or next()'s
  std::vector<std::size_t> turns_;  // lanes that go on
  std::size_t turn_ = 0;            // whose it is

  Mutex mutex_;
  Condition has_more_;  // a queue
  Condition has_room_;
  std::vector<Queue> queues_ LOCKSTEP_GUARDED_BY(mutex_);  // by lane
  bool is_stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
