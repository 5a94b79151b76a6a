// Claims: a list of pieces of work that the ranks of a host share out, and a record of who writes
// which one, in memory that outlives a rank.
//
// Every rank begins with a part of the list of its own, and then takes from the others' parts, so
// that a late rank holds up nobody. A piece has one writer. A rank that dies in the middle of one
// leaves its record: what it wrote is torn. Threading: each lane (a thread of a rank) on its own;
// begin() while nobody claims.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace lockstep::shm {

class Claims {
 public:
  static constexpr int kLanes = 64;  // of a rank
  static std::size_t bytes_for(int num_ranks);

  // `memory` is zero at first, or is in use by other ranks.
  Claims(std::byte* memory, int rank, int num_ranks);

  // Updates have numbers that grow by one, from 1. What is known of the one before stays.
  // One rank, before the others hear of it.
  void begin(std::uint64_t update, std::size_t num_pieces);
  // Whether an update happens is decided once for all ranks, by who comes first: one that goes on,
  // or one that gives up because it has lost another.
  bool start(std::uint64_t update) { return decide(update, true); }      // whether it happens
  bool give_up(std::uint64_t update) { return !decide(update, false); }  // whether it does not
  // The next piece for this lane, which has finished the one before. Nothing: all are claimed, or
  // the update is closed.
  std::optional<std::size_t> next(std::uint64_t update, int lane);
  // Nobody claims any more. Who has claimed before still says that it writes.
  void close(std::uint64_t update) { shared_->closed.store(update); }

  // Whether a lane of that rank writes, or has died while it did.
  bool is_writing(int rank) const;
  std::size_t num_claimed(std::uint64_t update) const;
  // From now on all ranks know whether what the pieces are about is torn.
  void set_torn(bool is_torn = true) { shared_->is_torn.store(is_torn); }
  bool is_torn() const { return shared_->is_torn.load(); }

 private:
  struct alignas(64) Shared {
    std::atomic<std::uint64_t> num_pieces[2];  // of even and odd updates
    std::atomic<std::uint64_t> decision;       // 2 * update, and 1 if it happens
    std::atomic<std::uint64_t> closed;         // the update that is
    std::atomic<bool> is_torn;
  };
  struct alignas(64) OfRank {
    std::atomic<std::uint64_t> num_claimed[2];  // of its part, in even and odd updates
    std::atomic<bool> is_writing[kLanes];
  };

  std::size_t first_of(std::uint64_t update, int rank) const;
  bool decide(std::uint64_t update, bool happens);

  Shared* shared_;
  OfRank* ranks_;
  int rank_;
  int num_ranks_;
};

}  // namespace lockstep::shm
