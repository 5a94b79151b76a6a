#include "shm/pieces.h"

#include <lockstep/error.h>

#include <algorithm>
#include <cstring>

#include "base/text.h"

namespace lockstep::shm {
namespace {

using collective::kMaxRanks;
using collective::size_of;

// Chunks are claimed whole: large enough that claiming costs nothing, small enough that a rank that
// has come late finds something to do, and at least one for each rank.
constexpr std::size_t kChunkBytes = 128 << 10;

// Above this and with more than two ranks, reducing everything on every rank costs more than a
// second synchronisation and a copy.
constexpr std::size_t kPullBytes = 16 << 10;

// Whether others read this rank's input: of a reduce, nobody reads the root's.
bool gives_input(const Operation& operation, int rank) {
  const bool is_own = operation.kind == Kind::kReduce && operation.root == rank;
  return !operation.input.is_empty() && !is_own;
}

}  // namespace

int Pieces::num_input_parts(const Operation& operation) const {
  switch (operation.kind) {
    case Kind::kScatter:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      return peers_.size;
    default:
      return 1;
  }
}

// The same on all ranks: it depends on nothing but the operation. Whole cache lines.
std::size_t Pieces::elements_per_piece(const Operation& operation) const {
  const std::size_t element = size_of(operation.type);
  const std::size_t per_part = kPieceBytes / static_cast<std::size_t>(num_input_parts(operation));
  return std::max<std::size_t>(per_part / kLine * kLine / element, 1);
}

std::uint64_t Pieces::min_retired() {
  std::uint64_t least = num_retired_;
  for (int peer = 0; peer < peers_.size; ++peer) {
    if (peer == peers_.rank) continue;
    least = std::min(least, peers_.control(peer).retired.load());
  }
  return min_retired_ = least;
}

std::shared_ptr<PendingOperation> Pieces::add(Operation operation) {
  auto request = std::make_shared<PendingOperation>();
  const std::size_t per_piece = elements_per_piece(operation);
  request->num_pieces = std::max<std::uint64_t>((operation.count + per_piece - 1) / per_piece, 1);
  request->operation = std::move(operation);
  waiting_.push_back(request);
  while (post_next()) {
  }
  return request;
}

bool Pieces::is_done(PendingOperation& request) {
  if (request.is_done) return true;
  if (request.num_done < request.num_pieces) return false;
  if (request.must_be_retired && min_retired_ < request.last_piece &&
      min_retired() < request.last_piece) {
    return false;
  }
  return request.is_done = true;
}

void Pieces::clear() {
  waiting_.clear();
  active_.clear();
  lent_.clear();
}

collective::Activity Pieces::oldest_activity() const {
  if (active_.empty()) return {"room", "room for an operation"};
  return active_.front().operation().activity();
}

bool Pieces::progress(bool is_waiting) {
  bool has_moved = false;
  while (post_next()) has_moved = true;
  for (Piece& piece : active_) {
    if (!piece.is_done && advance(piece, is_waiting)) has_moved = true;
  }
  if (!active_.empty() && active_.front().is_done) retire();
  while (!lent_.empty() && lent_.front()->last_piece <= min_retired_) lent_.pop_front();
  return has_moved;
}

// Posts one piece if there is one, a slot for it, and room for its input.
bool Pieces::post_next() {
  if (waiting_.empty()) return false;
  const std::uint64_t number = num_posted_ + 1;
  if (number > kSlots && min_retired_ < number - kSlots && min_retired() < number - kSlots) {
    return false;
  }
  const std::shared_ptr<PendingOperation> request = waiting_.front();
  const Operation& operation = request->operation;
  const std::uint64_t index = request->num_posted;
  Piece piece;
  piece.request = request;
  piece.number = number;
  piece.first = index * elements_per_piece(operation);
  piece.count = std::min(elements_per_piece(operation), operation.count - piece.first);
  Slot& mine = slot(peers_.rank, piece);
  mine.record = {.signature = operation.signature(),
                 .piece = static_cast<std::uint32_t>(index),
                 .place = kNowhere,
                 .offset = 0,
                 .factor = operation.factor};
  if (gives_input(operation, peers_.rank) && !place_input(piece, mine)) {
    return false;  // no room yet
  }
  if (peers_.rank == 0) {
    mine.claimed.store(0, std::memory_order_relaxed);
    mine.num_done.store(0, std::memory_order_relaxed);
  }
  mine.retired = num_retired_;
  mine.posted.store(number);  // sequentially consistent: see doorbell.h
  num_posted_ = number;
  peers_.ring_all();
  request->last_piece = number;
  if (++request->num_posted == request->num_pieces) waiting_.pop_front();
  active_.push_back(std::move(piece));
  return true;
}

bool Pieces::have_all_posted(Piece& piece) const {
  while (piece.num_seen < peers_.size &&
         slot(piece.num_seen, piece).posted.load() == piece.number) {
    ++piece.num_seen;
  }
  return piece.num_seen == peers_.size;
}

bool Pieces::advance(Piece& piece, bool is_waiting) {
  if (!piece.is_ready) {
    if (!have_all_posted(piece)) return false;
    make_ready(piece);
  }
  if (piece.is_claimed) return reduce_chunks(piece, is_waiting);
  pull(piece);
  finish(piece);
  return true;
}

// All records must agree. All ranks name the same two: rank 0 and the first that differs from it.
void Pieces::compare_records(const Piece& piece) const {
  const Record& first = slot(0, piece).record;
  for (int peer = 1; peer < peers_.size; ++peer) {
    const Record& other = slot(peer, piece).record;
    if (std::memcmp(&first, &other, offsetof(Record, place)) == 0) continue;
    collective::throw_mismatch(peers_.my_global_rank(), piece.number, peers_.global_rank(0),
                               first.signature, peers_.global_rank(peer), other.signature);
  }
}

// All records are there. They decide how an all-reduce is done; what is reduced once is claimed
// whatever its size, so that each element is written by one rank.
void Pieces::make_ready(Piece& piece) {
  compare_records(piece);
  std::uint64_t least_retired = num_retired_;
  for (int peer = 0; peer < peers_.size; ++peer) {
    least_retired = std::min(least_retired, slot(peer, piece).retired);
  }
  piece.is_ready = true;
  min_retired_ = std::max(min_retired_, least_retired);
  const Operation& operation = piece.operation();
  const bool is_once = operation.kind == Kind::kReduceOnce && piece.count != 0;
  if (operation.kind != Kind::kAllReduce && !is_once) return;
  const std::size_t element = size_of(operation.type);
  const std::size_t bytes = piece.count * element;
  bool is_claimed = is_once || (peers_.size > 2 && bytes > kPullBytes);
  for (int peer = 0; peer < peers_.size; ++peer) {
    is_claimed |= slot(peer, piece).record.place < kFirstThatIsNoArea;
  }
  if (!is_claimed) return;
  piece.is_claimed = true;
  const std::size_t wanted = std::clamp<std::size_t>(
      bytes / kChunkBytes, static_cast<std::size_t>(peers_.size), kMaxChunks);
  const std::size_t chunk_bytes = ((bytes + wanted - 1) / wanted + kLine - 1) / kLine * kLine;
  piece.chunk_elements = chunk_bytes / element;
  piece.num_chunks = (piece.count + piece.chunk_elements - 1) / piece.chunk_elements;
}

// Takes from the others what this rank needs.
void Pieces::pull(const Piece& piece) {
  const Operation& operation = piece.operation();
  if (operation.output.is_empty() || piece.count == 0) return;
  const std::size_t element = size_of(operation.type);
  const auto output = [&](int part) { return operation.output.part(part) + piece.first * element; };
  const auto copy = [&](int from, int input_part, int output_part) {
    const std::size_t count = operation.output.count_from(output_part, piece.first, piece.count);
    const std::byte* source = input_of(from, piece, input_part);
    if (count != 0 && source != output(output_part)) {
      std::memcpy(output(output_part), source, count * element);
    }
  };
  switch (operation.kind) {
    case Kind::kBroadcast:
      return copy(operation.root, 0, 0);
    case Kind::kScatter:
      return copy(operation.root, peers_.rank, 0);
    case Kind::kAllToAll:
      for (int peer = 0; peer < peers_.size; ++peer) copy(peer, peers_.rank, peer);
      return;
    case Kind::kAllGather:
    case Kind::kGather:
      for (int peer = 0; peer < peers_.size; ++peer) copy(peer, 0, peer);
      return;
    default:
      break;  // the reductions
  }
  const void* inputs[kMaxRanks];
  double factors[kMaxRanks];
  const int part = operation.kind == Kind::kReduceScatter ? peers_.rank : 0;
  for (int peer = 0; peer < peers_.size; ++peer) {
    // Its own is where the caller has it: a copy, if there is one, is for the others.
    inputs[peer] = peer == peers_.rank ? operation.input.part(part) + piece.first * element
                                       : input_of(peer, piece, part);
    factors[peer] = slot(peer, piece).record.factor;
  }
  void* outputs[] = {output(0)};
  collective::reduce({.type = operation.type,
                      .reduction = operation.reduction,
                      .num_inputs = peers_.size,
                      .inputs = inputs,
                      .factors = factors,
                      .num_outputs = 1,
                      .outputs = outputs,
                      .count = piece.count,
                      .average_over = operation.average_over},
                     simd_);
}

// Reduces chunks for all ranks at once. A rank that computes takes only its share, so that the one
// that is behind is not given more to do; a rank that waits takes what it finds.
bool Pieces::reduce_chunks(Piece& piece, bool is_waiting) {
  Slot& shared = slot(0, piece);
  const auto num_ranks = static_cast<std::size_t>(peers_.size);
  const std::size_t per_rank = (piece.num_chunks + num_ranks - 1) / num_ranks;
  bool has_moved = false;
  for (std::size_t i = 0; i < per_rank * num_ranks; ++i) {
    // Its own first: rank r begins with chunk r, and steps by the number of ranks.
    const std::size_t chunk = (i % per_rank) * num_ranks +
                              (i / per_rank + static_cast<std::size_t>(peers_.rank)) % num_ranks;
    if (i >= per_rank && !is_waiting) break;
    if (chunk >= piece.num_chunks) continue;
    const std::uint64_t bit = std::uint64_t{1} << chunk;
    if ((piece.my_claims & bit) != 0) continue;
    piece.my_claims |= bit;
    if ((shared.claimed.load(std::memory_order_relaxed) & bit) != 0 ||
        (shared.claimed.fetch_or(bit, std::memory_order_relaxed) & bit) != 0) {
      continue;
    }
    reduce_chunk(piece, chunk);
    if (shared.num_done.fetch_add(1) + 1 == piece.num_chunks) peers_.ring_all();
    has_moved = true;
  }
  // Acquires what all the others have reduced, and that they have read this rank's input.
  if (shared.num_done.load() != piece.num_chunks) return has_moved;
  if (piece.operation().kind != Kind::kReduceOnce) take_result(piece);
  finish(piece);
  return true;
}

// What was reduced in place, if that is not where the caller wants it.
void Pieces::take_result(const Piece& piece) {
  const std::size_t element = size_of(piece.operation().type);
  std::byte* result = input_of(peers_.rank, piece, 0);
  std::byte* output = piece.operation().output.base + piece.first * element;
  if (result != output) std::memcpy(output, result, piece.count * element);
}

void Pieces::reduce_chunk(const Piece& piece, std::size_t chunk) {
  const Operation& operation = piece.operation();
  const std::size_t first = chunk * piece.chunk_elements;
  const void* inputs[kMaxRanks];
  void* outputs[kMaxRanks];
  double factors[kMaxRanks];
  const std::size_t element = size_of(operation.type);
  for (int peer = 0; peer < peers_.size; ++peer) {
    outputs[peer] = input_of(peer, piece, 0) + first * element;
    inputs[peer] = outputs[peer];
    factors[peer] = slot(peer, piece).record.factor;
  }
  const bool is_once = operation.kind == Kind::kReduceOnce;
  if (is_once) outputs[0] = operation.output.base + (piece.first + first) * element;
  collective::reduce({.type = operation.type,
                      .reduction = operation.reduction,
                      .num_inputs = peers_.size,
                      .inputs = inputs,
                      .factors = factors,
                      .num_outputs = is_once ? 1 : peers_.size,
                      .outputs = outputs,
                      .count = std::min(piece.chunk_elements, piece.count - first),
                      .average_over = operation.average_over},
                     simd_);
}

void Pieces::finish(Piece& piece) const {
  piece.is_done = true;
  PendingOperation& request = *piece.request;
  ++request.num_done;
  request.must_be_retired |=
      !piece.is_claimed && slot(peers_.rank, piece).record.place < kFirstThatIsNoArea;
}

// Pieces are retired in order, so that one number says it all.
void Pieces::retire() {
  while (!active_.empty() && active_.front().is_done) {
    num_retired_ = active_.front().number;
    auto& request = active_.front().request;
    if (request->must_be_retired && (lent_.empty() || lent_.back() != request)) {
      lent_.push_back(std::move(request));
    }
    active_.pop_front();
  }
  peers_.self().retired.store(num_retired_);
  peers_.ring_all();
}

}  // namespace lockstep::shm
