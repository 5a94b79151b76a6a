#include "shm/areas.h"

#include <lockstep/error.h>

#include <algorithm>

#include "base/cause.h"
#include "base/text.h"

namespace lockstep::shm {

// What `take` does with the options it is given, for `bytes`. Claimed first and looked at then: of
// two ranks that allocate at once, one at least counts both.
template <typename Take>
auto Areas::claiming(std::size_t bytes, const Take& take) const {
  struct Claim {
    std::atomic<std::uint64_t>& left;
    ~Claim() { left.store(0); }
  } claim{peers_.self().claimed_bytes};
  claim.left.store(bytes);
  try {
    return take(
        SegmentOptions{.system_root = peers_.system_root,
                       .claimed_by_others = [&] { return peers_.claimed_by_others(); },
                       .on_taken = [&](std::size_t taken) { claim.left.fetch_sub(taken); }});
  } catch (const Error&) {
    const int rank = peers_.my_global_rank();
    throw_cause(cause_of(std::current_exception(), rank),
                {.rank = rank, .operation = "shared memory"});
  }
}

std::byte* Areas::allocate(std::size_t bytes) {
  bytes = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  const MutexLock lock(mutex_);
  OwnArea* best = nullptr;
  for (OwnArea& area : own_) {
    const bool fits =
        area.is_free && area.segment.size() >= bytes && area.segment.size() <= 2 * bytes;
    if (fits && (best == nullptr || area.segment.size() < best->segment.size())) best = &area;
  }
  if (best == nullptr) {
    if (own_.size() == kMaxAreas) {
      throw UsageError({.rank = peers_.my_global_rank(), .operation = "allocate"},
                       text::format("There are {} pieces of shared memory already.\n"
                                    "Allocate fewer and larger ones.",
                                    kMaxAreas));
    }
    const auto create = [&](const SegmentOptions& options) {
      return Segment::create(bytes, options);
    };
    best = &own_.emplace_back(OwnArea{claiming(bytes, create), false});
    const SegmentName name = best->segment.name();
    peers_.self().areas[own_.size() - 1] = {name.fd, name.inode, name.bytes, name.address};
  }
  best->is_free = false;
  return best->segment.data();
}

void Areas::release(std::byte* memory) noexcept {
  const MutexLock lock(mutex_);
  for (OwnArea& area : own_) {
    if (area.segment.data() == memory) area.is_free = true;
  }
}

std::optional<Areas::Place> Areas::find(const std::byte* begin, std::size_t bytes) {
  const MutexLock lock(mutex_);
  for (std::size_t index = 0; index < own_.size(); ++index) {
    const Segment& segment = own_[index].segment;
    if (begin < segment.data() || begin + bytes > segment.data() + segment.size()) continue;
    return Place{static_cast<std::uint32_t>(index),
                 static_cast<std::uint64_t>(begin - segment.data())};
  }
  return std::nullopt;
}

std::byte* Areas::memory(int peer, std::uint32_t index) {
  if (peer == peers_.rank) {
    const MutexLock lock(mutex_);
    return own_[index].segment.data();
  }
  auto& known = attached_[static_cast<std::size_t>(peer)];
  auto found = known.find(index);
  if (found == known.end()) {
    const Area& area = peers_.control(peer).areas[index];
    try {
      found = known
                  .emplace(index, Segment::attach({peers_.process(peer), area.fd, area.inode,
                                                   area.bytes, area.address}))
                  .first;
    } catch (const Error&) {
      throw Unreachable{peer, std::current_exception()};
    }
  }
  return found->second.data();
}

void Areas::take_reserved(std::size_t offset, std::size_t bytes) {
  const MutexLock lock(mutex_);
  claiming(bytes, [&](const SegmentOptions& options) {
    peers_.segments[static_cast<std::size_t>(peers_.rank)].take(offset, bytes, options);
  });
}

}  // namespace lockstep::shm
