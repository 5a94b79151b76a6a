// Notice: memory of the launcher that the ranks of an elastic job read in every step: which
// generation is wanted. Reading it costs a load; the launcher alone writes.
//
// Memory order: a rank that sees the number asks its launcher, which has decided before it wrote.
#pragma once

#include <atomic>

#include "base/posix.h"

namespace lockstep {

inline constexpr const char* kNoticeVariable = "LOCKSTEP_ELASTIC";  // the number of its descriptor

// The launcher's. Throws SystemError.
Fd make_notice();
void write_notice(int fd, int generation);

// A rank's. It stays mapped as long as the process lives.
class Notice {
 public:
  explicit Notice(int fd);  // throws SystemError
  int wanted() const { return wanted_->load(std::memory_order_relaxed); }

 private:
  const std::atomic<int>* wanted_;
};

}  // namespace lockstep
