// Neighbours: the groups of this process that have started operations.
//
// An operation of a group moves on while somebody waits in that group. A rank may start one in a
// world and then wait in another, on any engine, while its peer waits for the first: so whoever
// waits moves the operations of all groups on, too. Groups are found by a list of the process: the
// worlds that they belong to do not know of each other. A process that is forked begins with an
// empty list: the groups of its parent are not its own.
// Threading: any thread may call. Locks: a group's own, then the list's; of other groups only those
// that are free are taken.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

namespace lockstep::shm {

class Group;

namespace neighbours {

struct List;

// A group's place in the list.
class Place {
 public:
  Place(List& list, std::weak_ptr<Group> group) : list_(list), group_(std::move(group)) {}

  // Whether the group may have operations that are not done. Set by the group alone.
  bool is_busy() const noexcept { return is_busy_.load(std::memory_order_relaxed); }
  void set_busy(bool is_busy) noexcept;
  std::shared_ptr<Group> group() const { return group_.lock(); }
  bool is_free() const { return group_.expired(); }

 private:
  List& list_;
  const std::weak_ptr<Group> group_;
  std::atomic<bool> is_busy_{false};
};

std::shared_ptr<Place> add(std::weak_ptr<Group> group);

// How many groups are busy.
int num_busy() noexcept;
// Whether there are others than this one, which may be none.
inline bool are_others_busy(const Place* own) noexcept {
  return num_busy() > (own != nullptr && own->is_busy() ? 1 : 0);
}

// Moves the operations of all groups but this one on. Returns whether anything moved.
bool move_on_all_but(const Place* own, bool is_waiting);

// When one that waits looks at the others: at once, then ever more rarely while nothing moves. An
// operation that stays open for long (a receive) so costs those beside it next to nothing.
class Looks {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Moves the others on if it is time. Returns whether anything moved.
  bool look(const Place* own, bool is_waiting, TimePoint now);
  // When it is time; never, as far as is known now, if no other is busy.
  TimePoint next(const Place* own) const noexcept {
    return are_others_busy(own) ? next_ : TimePoint::max();
  }

 private:
  std::chrono::nanoseconds pause_{0};
  TimePoint next_{};
};

}  // namespace neighbours
}  // namespace lockstep::shm
