// Pieces: how the operations of a group move: cut into pieces, which are posted, ready, done and
// retired (layout.h).
//
// Invariant: pieces are posted and retired in order, the same on all ranks.
// Threading: guarded by the group's mutex.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "collective/reduce.h"
#include "collective/request.h"
#include "shm/areas.h"
#include "shm/peers.h"

namespace lockstep::shm {

using collective::Operation;
using collective::Simd;

struct PendingOperation : collective::OperationRequest {
  std::uint64_t num_pieces = 0;
  std::uint64_t num_posted = 0;
  std::uint64_t num_done = 0;
  std::uint64_t last_piece = 0;  // the number of the last piece posted
  bool must_be_retired = false;  // others read the caller's own memory: not done until they have
};

class Pieces {
 public:
  Pieces(const Peers& peers, Areas& areas, Simd simd)
      : peers_(peers), areas_(areas), simd_(simd), staging_users_(kStagingPieces, 0) {}

  // Begins an operation and posts what there is room for.
  std::shared_ptr<PendingOperation> add(Operation operation);

  // Moves all operations on; without `is_waiting`, does no more than this rank's share.
  // Returns whether anything moved. Throws MismatchError.
  bool progress(bool is_waiting);

  bool is_done(PendingOperation& request);
  bool is_idle() const { return waiting_.empty() && active_.empty(); }  // nothing here to be done
  void clear();

  // The number of the oldest piece that is not retired, or of the next one.
  std::uint64_t oldest() const {
    return active_.empty() ? num_posted_ + 1 : active_.front().number;
  }
  // The piece that ends the request.
  std::uint64_t last_of(const PendingOperation& request) const {
    return request.num_posted == 0 ? num_posted_ + 1 : request.last_piece;
  }
  collective::Activity oldest_activity() const;
  bool has_posted(int peer, std::uint64_t number) const {
    return peers_.control(peer).retired.load() >= number ||
           peers_.slot(peer, number).posted.load() == number;
  }

 private:
  struct Piece {
    std::shared_ptr<PendingOperation> request;
    std::uint64_t number = 0;
    std::size_t first = 0;  // element of each part
    std::size_t count = 0;
    int num_seen = 0;  // ranks below this have posted
    bool is_ready = false;
    bool is_claimed = false;  // reduced by chunks, for all ranks at once
    bool is_done = false;
    std::size_t num_chunks = 0;
    std::size_t chunk_elements = 0;
    std::uint64_t my_claims = 0;  // chunks that need no second look

    const Operation& operation() const { return request->operation; }
  };

  Slot& slot(int peer, const Piece& piece) const { return peers_.slot(peer, piece.number); }
  std::size_t elements_per_piece(const Operation& operation) const;
  int num_input_parts(const Operation& operation) const;

  bool post_next();
  bool advance(Piece& piece, bool is_waiting);
  bool have_all_posted(Piece& piece) const;
  void make_ready(Piece& piece);
  void compare_records(const Piece& piece) const;
  void pull(const Piece& piece);
  bool reduce_chunks(Piece& piece, bool is_waiting);
  void reduce_chunk(const Piece& piece, std::size_t chunk);
  void take_result(const Piece& piece);
  void finish(Piece& piece) const;
  void retire();
  std::uint64_t min_retired();

  // inputs.cpp: where the input of a piece is.
  bool place_input(const Piece& piece, Slot& mine);
  void copy_input(const Piece& piece, std::byte* target) const;
  std::byte* input_of(int peer, const Piece& piece, int part);

  // Constant after construction.
  const Peers& peers_;
  Areas& areas_;
  const Simd simd_;

  std::deque<std::shared_ptr<PendingOperation>> waiting_;  // with pieces that are not posted
  std::deque<Piece> active_;                               // posted and not retired, in order
  std::deque<std::shared_ptr<PendingOperation>> lent_;     // retired here; others may read from it
  std::uint64_t num_posted_ = 0;
  std::uint64_t num_retired_ = 0;
  std::uint64_t min_retired_ = 0;  // a lower bound of all ranks'
  std::uint64_t num_staged_ = 0;
  std::array<std::uint64_t, kSmallBuffers> small_users_{};  // the piece that last used each
  std::vector<std::uint64_t> staging_users_;                // the piece that last used each place
};

}  // namespace lockstep::shm
