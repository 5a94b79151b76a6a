// Notice: memory of the launcher that the ranks of an elastic job read: which generation is wanted,
// which there is, and which have ended because a rank was lost. Reading it costs a load; the
// launcher alone writes.
//
// Memory order: a rank that sees a number asks its launcher, which has decided before it wrote.
#pragma once

#include <atomic>

#include "base/posix.h"

namespace lockstep {

inline constexpr const char* kNoticeVariable = "LOCKSTEP_ELASTIC";  // the number of its descriptor

struct NoticeWords {
  int wanted = 0;     // the generation that ranks are to form at the end of a step
  int num_ended = 0;  // generations below this one have lost a rank: none of their steps can end
  int formed = 0;     // the newest generation

  bool operator==(const NoticeWords&) const = default;
};

// The launcher's. Throws SystemError.
Fd make_notice();
void write_notice(int fd, const NoticeWords& words);

// A rank's. It stays mapped as long as the process lives.
class Notice {
 public:
  explicit Notice(int fd);  // throws SystemError
  int wanted() const { return shared_->wanted.load(std::memory_order_relaxed); }
  int formed() const { return shared_->formed.load(std::memory_order_relaxed); }
  bool has_ended(int generation) const {
    return shared_->num_ended.load(std::memory_order_relaxed) > generation;
  }

 private:
  struct Shared {  // NoticeWords, as ranks see them
    std::atomic<int> wanted;
    std::atomic<int> num_ended;
    std::atomic<int> formed;
  };
  static_assert(sizeof(Shared) == sizeof(NoticeWords) && std::atomic<int>::is_always_lock_free);

  const Shared* shared_;
};

}  // namespace lockstep
