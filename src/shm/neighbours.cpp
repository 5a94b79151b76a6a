#include "shm/neighbours.h"

#include <pthread.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "shm/group.h"

namespace lockstep::shm::neighbours {

struct List {
  Mutex mutex;
  std::vector<std::shared_ptr<Place>> places LOCKSTEP_GUARDED_BY(mutex);
  std::atomic<int> busy{0};
  const List* parents = nullptr;  // of the process that this one was forked from
};

namespace {

constexpr std::chrono::nanoseconds kShortestPause = std::chrono::microseconds(20);
constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(4);

// Never destroyed: threads may wait while the process ends.
std::atomic<List*>& current() {
  static std::atomic<List*> list{[] {
    // In the child another thread may have had the parent's lock, for ever.
    ::pthread_atfork(nullptr, nullptr, [] {
      auto* fresh = new List;
      fresh->parents = current().load();
      current() = fresh;
    });
    return new List;
  }()};
  return list;
}

List& list() { return *current().load(std::memory_order_acquire); }

}  // namespace

void Place::set_busy(bool is_busy) noexcept {
  if (is_busy_.exchange(is_busy, std::memory_order_relaxed) == is_busy) return;
  list_.busy.fetch_add(is_busy ? 1 : -1, std::memory_order_relaxed);
}

std::shared_ptr<Place> add(std::weak_ptr<Group> group) {
  List& all = list();
  auto place = std::make_shared<Place>(all, std::move(group));
  const MutexLock lock(all.mutex);
  std::erase_if(all.places, [](const auto& one) { return one->is_free(); });
  all.places.push_back(place);
  return place;
}

int num_busy() noexcept { return list().busy.load(std::memory_order_relaxed); }

bool move_on_all_but(const Place* own, bool is_waiting) {
  std::vector<std::shared_ptr<Group>> others;  // owned: what they finish may own them
  {
    List& all = list();
    const MutexLock lock(all.mutex);
    for (const auto& place : all.places) {
      if (place.get() == own || !place->is_busy()) continue;
      if (auto other = place->group()) others.push_back(std::move(other));
    }
  }
  bool has_moved = false;
  for (const auto& other : others) has_moved |= other->move_on(is_waiting);
  return has_moved;
}

bool Looks::look(const Place* own, bool is_waiting, TimePoint now) {
  if (now < next(own)) return false;
  const bool has_moved = move_on_all_but(own, is_waiting);
  pause_ = has_moved ? std::chrono::nanoseconds(0)
                     : std::clamp(2 * pause_, kShortestPause, kLongestPause);
  next_ = now + pause_;
  return has_moved;
}

}  // namespace lockstep::shm::neighbours
