// Where the input of a piece is, for the rank that gives it and for those that take it; and the
// memory that is handed out for operations without copies.

#include <fmt/format.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cstring>

#include "shm/group.h"

namespace lockstep::shm {
namespace {

// Whether peers may read the caller's own memory: not if this rank writes there meanwhile.
bool may_be_read_in_place(const Operation& operation) {
  return operation.kind != Kind::kAllToAll && operation.input.list.empty();
}

}  // namespace

// A tiny input goes with the record, a small one to a small buffer, which takes less time than a
// second synchronisation. A larger one is read in place if it is in an area, else it is copied to
// the staging memory. False if there is no room yet.
bool Group::place_input(const Operation& operation, Piece& piece, Slot& mine) {
  Record& record = mine.record;
  const std::size_t element = size_of(operation.type);
  const auto num_parts = static_cast<std::size_t>(num_input_parts(operation));
  const std::size_t bytes = piece.count * element * num_parts;
  if (bytes <= kTinyBytes) {
    record.place = kInSlot;
    copy_input(operation, piece, mine.payload);
    return true;
  }
  if (bytes <= kSmallBytes) {
    // The first that is free, so that the same few stay in the cache.
    const auto is_free = [&](std::uint64_t user) { return user <= min_retired_; };
    auto free = std::ranges::find_if(small_users_, is_free);
    if (free == small_users_.end()) {
      min_retired();
      free = std::ranges::find_if(small_users_, is_free);
    }
    if (free == small_users_.end()) return false;
    *free = piece.number;
    record.place = kSmallBuffer;
    record.offset = static_cast<std::uint64_t>(free - small_users_.begin()) * kSmallBytes;
    copy_input(operation, piece, control(rank()).small_buffers[0].data() + record.offset);
    return true;
  }
  if (may_be_read_in_place(operation) && !own_areas_.empty()) {
    const std::byte* begin = operation.input.base;
    const std::size_t whole = operation.count * element * num_parts;
    for (const OwnArea& area : own_areas_) {
      if (begin < area.segment.data() ||
          begin + whole > area.segment.data() + area.segment.size()) {
        continue;
      }
      record.place = area.index;
      record.offset =
          static_cast<std::uint64_t>(begin - area.segment.data()) + piece.first * element;
      return true;
    }
  }
  std::uint64_t& user = staging_users_[num_staged_ % kStagingPieces];
  if (user > min_retired_ && user > min_retired()) return false;
  user = piece.number;
  record.place = kStaging;
  record.offset = num_staged_++ % kStagingPieces * kPieceBytes;
  copy_input(operation, piece, input_of(rank(), piece, 0));
  return true;
}

// The parts one behind the other; of uneven ones, what there is.
void Group::copy_input(const Operation& operation, const Piece& piece, std::byte* target) const {
  const std::size_t element = size_of(operation.type);
  for (int part = 0; part < num_input_parts(operation); ++part) {
    const std::size_t count = operation.input.count_from(part, piece.first, piece.count);
    if (count != 0) {
      std::memcpy(target, operation.input.part(part) + piece.first * element, count * element);
    }
    target += piece.count * element;
  }
}

// Where a rank's input of this piece is, in this process. In an area the parts lie as in the
// operation; elsewhere they are packed.
std::byte* Group::input_of(int peer, const Piece& piece, int part) {
  Slot& theirs = slot(peer, piece.number);
  const Record& record = theirs.record;
  const std::size_t element = size_of(record.type);
  const auto index = static_cast<std::size_t>(part);
  const std::size_t packed = index * piece.count * element;
  if (record.place == kInSlot) return theirs.payload + packed;
  if (record.place == kSmallBuffer) {
    return control(peer).small_buffers[0].data() + record.offset + packed;
  }
  if (record.place == kStaging) {
    return segments_[static_cast<std::size_t>(peer)].data() + kStagingOffset + record.offset +
           packed;
  }
  return attach_area(peer, record.place) + record.offset + index * record.total * element;
}

std::byte* Group::attach_area(int peer, std::uint32_t index) {
  if (peer == rank()) {
    for (const OwnArea& area : own_areas_) {
      if (area.index == index) return area.segment.data();
    }
  }
  auto& known = peer_areas_[static_cast<std::size_t>(peer)];
  auto found = known.find(index);
  if (found == known.end()) {
    const Area& area = control(peer).areas[index];
    found = known
                .emplace(index, Segment::attach({processes_[static_cast<std::size_t>(peer)],
                                                 area.fd, area.bytes, area.address}))
                .first;
  }
  return found->second.data();
}

std::byte* Group::allocate(std::size_t bytes) {
  bytes = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  const std::lock_guard lock(mutex_);
  OwnArea* best = nullptr;
  for (OwnArea& area : own_areas_) {
    const bool fits =
        area.is_free && area.segment.size() >= bytes && area.segment.size() <= 2 * bytes;
    if (fits && (best == nullptr || area.segment.size() < best->segment.size())) best = &area;
  }
  if (best == nullptr) {
    if (own_areas_.size() == kMaxAreas) {
      throw UsageError({.rank = name(rank()), .operation = "allocate"},
                       fmt::format("There are {} pieces of shared memory already.\n"
                                   "Allocate fewer and larger ones.",
                                   kMaxAreas));
    }
    const auto index = static_cast<std::uint32_t>(own_areas_.size());
    own_areas_.push_back({Segment::create(bytes), index, false});
    best = &own_areas_.back();
    const SegmentName name = best->segment.name();
    self().areas[index] = {name.fd, name.bytes, name.address};
  }
  best->is_free = false;
  return best->segment.data();
}

void Group::release(std::byte* memory) noexcept {
  const std::lock_guard lock(mutex_);
  for (OwnArea& area : own_areas_) {
    if (area.segment.data() == memory) area.is_free = true;
  }
}

}  // namespace lockstep::shm
