// Areas: memory that is handed out for operations without copies, and the peers' areas as far as
// this rank has met them.
//
// Freed memory is kept for the next allocation, because peers may have it mapped. What ranks are
// about to take counts together (Control::claimed_bytes), so that all of them find room or one says
// that there is none.
// Threading: memory() is guarded by the group's mutex, the rest by one of its own: memory is
// released wherever its last owner goes, which may be an operation that the group has just ended.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "shm/peers.h"

namespace lockstep::shm {

// The memory of a rank cannot be attached: that rank is gone, or else there is an `error`.
struct Unreachable {
  int peer = 0;
  std::exception_ptr error;
};

class Areas {
 public:
  explicit Areas(const Peers& peers)
      : peers_(peers), attached_(static_cast<std::size_t>(peers.size)) {}

  // Throws UsageError if there are too many, SystemError if there is no room.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* memory) noexcept;

  // Where memory is that lies in an area of this rank's own.
  struct Place {
    std::uint32_t index = 0;
    std::uint64_t offset = 0;
  };
  std::optional<Place> find(const std::byte* begin, std::size_t bytes);

  // The memory of a rank's area, in this process. Throws Unreachable.
  std::byte* memory(int peer, std::uint32_t index);

  // Takes memory that this rank's segment has reserved. Throws SystemError if there is no room.
  void take_reserved(std::size_t offset, std::size_t bytes);

 private:
  struct OwnArea {
    Segment segment;
    bool is_free;
  };

  template <typename Take>
  auto claiming(std::size_t bytes, const Take& take) const LOCKSTEP_REQUIRES(mutex_);

  const Peers& peers_;
  Mutex mutex_;
  std::vector<OwnArea> own_ LOCKSTEP_GUARDED_BY(mutex_);    // by index
  std::vector<std::map<std::uint32_t, Segment>> attached_;  // by rank
};

}  // namespace lockstep::shm
