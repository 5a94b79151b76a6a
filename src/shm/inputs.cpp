// Where the input of a piece is, for the rank that gives it and for those that take it.

#include <algorithm>
#include <cstring>

#include "shm/pieces.h"

namespace lockstep::shm {
namespace {

using collective::size_of;

// Whether peers may read the caller's own memory: not if this rank writes there meanwhile.
bool may_be_read_in_place(const Operation& operation) {
  return operation.kind != Kind::kAllToAll && operation.input.list.empty();
}

}  // namespace

// A tiny input goes with the record, a small one to a small buffer, which takes less time than a
// second synchronisation. A larger one is read in place if it is in an area, else it is copied to
// the staging memory. False if there is no room yet.
bool Pieces::place_input(const Piece& piece, Slot& mine) {
  const Operation& operation = piece.operation();
  Record& record = mine.record;
  const std::size_t element = size_of(operation.type);
  const auto num_parts = static_cast<std::size_t>(num_input_parts(operation));
  const std::size_t bytes = piece.count * element * num_parts;
  if (bytes <= kTinyBytes) {
    record.place = kInSlot;
    copy_input(piece, mine.payload);
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
    copy_input(piece, peers_.self().small_buffers[0].data() + record.offset);
    return true;
  }
  if (may_be_read_in_place(operation)) {
    const std::size_t whole = operation.count * element * num_parts;
    if (const auto place = areas_.find(operation.input.base, whole)) {
      record.place = place->index;
      record.offset = place->offset + piece.first * element;
      return true;
    }
  }
  std::uint64_t& user = staging_users_[num_staged_ % kStagingPieces];
  if (user > min_retired_ && user > min_retired()) return false;
  user = piece.number;
  record.place = kStaging;
  record.offset = num_staged_++ % kStagingPieces * kPieceBytes;
  copy_input(piece, input_of(peers_.rank, piece, 0));
  return true;
}

// The parts one behind the other; of uneven ones, what there is.
void Pieces::copy_input(const Piece& piece, std::byte* target) const {
  const Operation& operation = piece.operation();
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
std::byte* Pieces::input_of(int peer, const Piece& piece, int part) {
  Slot& theirs = slot(peer, piece);
  const Record& record = theirs.record;
  const std::size_t element = size_of(record.signature.type);
  const auto index = static_cast<std::size_t>(part);
  const std::size_t packed = index * piece.count * element;
  if (record.place == kInSlot) return theirs.payload + packed;
  if (record.place == kSmallBuffer) {
    return peers_.control(peer).small_buffers[0].data() + record.offset + packed;
  }
  if (record.place == kStaging) return peers_.staging(peer) + record.offset + packed;
  return areas_.memory(peer, record.place) + record.offset +
         index * record.signature.count * element;
}

}  // namespace lockstep::shm
