// Journal: what pieces of shared memory were before they were updated, so that a rank that dies in
// the middle of one tears nothing: another puts back what was there, and does it again.
//
// Every lane (a thread of a rank) has room for one piece. Order: save() copies and then says so,
// set_done() says that the piece is done and then that the copy is old. So whenever a lane dies,
// its piece is done, or untouched, or what it was is here. Threading: each lane on its own; repairs
// by one rank, while no other writes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep::shm {

class Journal {
 public:
  struct Run {  // of memory
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  using Runs = std::vector<Run>;

  struct Size {
    int num_ranks = 1;
    int num_lanes = 1;
    std::size_t num_pieces = 0;
    std::size_t piece_bytes = 0;  // at most
    bool operator==(const Size&) const = default;
  };
  static std::size_t bytes_for(const Size& size);

  // `memory` is zero at first, or is in use by other ranks.
  Journal(std::byte* memory, int rank, const Size& size);
  const Size& size() const { return size_; }

  void save(int lane, std::uint64_t update, std::size_t piece, const Runs& runs);
  void set_done(int lane, std::uint64_t update, std::size_t piece);
  bool is_done(std::uint64_t update, std::size_t piece) const {
    return done_[piece].load() == update;
  }
  bool are_done(std::uint64_t update, std::size_t num_pieces) const;

  // Puts back what a rank had begun to change in a piece; then `again` may be done on `lane`, which
  // has saved the piece for itself.
  void repair(int lane, std::uint64_t update, std::size_t piece, const Runs& runs,
              const std::function<bool(int rank)>& is_lost, const std::function<void()>& again);

 private:
  struct alignas(64) Entry {
    std::atomic<std::uint64_t> tag;  // update and piece, as below; 0: none
  };
  static std::uint64_t tag_of(std::uint64_t update, std::size_t piece) {
    return update << 32 | (piece + 1);
  }
  Entry& entry(int rank, int lane) const;

  std::atomic<std::uint64_t>* done_;  // by piece: the update that it had last
  std::byte* entries_;
  std::size_t entry_bytes_;
  int rank_;
  Size size_;
};

}  // namespace lockstep::shm
