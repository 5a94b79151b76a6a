// Ranks as threads of this process, so that TSan sees all of them.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shm/group.h"

namespace lockstep::shm {

class ThreadExchange {
 public:
  explicit ThreadExchange(int size) : texts_(static_cast<std::size_t>(size)) {}

  Exchange for_rank(int rank) {
    return [this, rank](const std::string& mine) {
      std::unique_lock lock(mutex_);
      const int round = round_;
      texts_[static_cast<std::size_t>(rank)] = mine;
      if (++arrived_ == texts_.size()) {
        arrived_ = 0;
        ++round_;
        result_ = texts_;
        changed_.notify_all();
      }
      changed_.wait(lock, [&] { return round_ != round; });
      return result_;
    };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
  std::vector<std::string> result_;
  std::size_t arrived_ = 0;
  int round_ = 0;
};

// Runs `body` on `size` ranks.
inline void run_threads(int size, const std::function<void(Group&)>& body,
                        GroupOptions options = {}) {
  ThreadExchange exchange(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions mine = options;
      mine.rank = rank;
      mine.size = size;
      // Shared, as engines share theirs: only such groups are neighbours.
      const auto group = std::make_shared<Group>(mine, exchange.for_rank(rank));
      body(*group);
      group->leave();
      exchange.for_rank(rank)("left");  // threads share one mapping: nobody unmaps it before
    });
  }
}

}  // namespace lockstep::shm
