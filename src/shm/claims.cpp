#include "shm/claims.h"

#include <algorithm>

namespace lockstep::shm {

std::size_t Claims::bytes_for(int num_ranks) {
  return sizeof(Shared) + static_cast<std::size_t>(num_ranks) * sizeof(OfRank);
}

Claims::Claims(std::byte* memory, int rank, int num_ranks)
    : shared_(reinterpret_cast<Shared*>(memory)),
      ranks_(reinterpret_cast<OfRank*>(memory + sizeof(Shared))),
      rank_(rank),
      num_ranks_(num_ranks) {}

std::size_t Claims::first_of(std::uint64_t update, int rank) const {
  const std::uint64_t all = shared_->num_pieces[update % 2].load(std::memory_order_relaxed);
  return all * static_cast<std::size_t>(rank) / static_cast<std::size_t>(num_ranks_);
}

void Claims::begin(std::uint64_t update, std::size_t num_pieces) {
  shared_->num_pieces[update % 2].store(num_pieces);
  for (int rank = 0; rank < num_ranks_; ++rank) ranks_[rank].num_claimed[update % 2].store(0);
}

bool Claims::decide(std::uint64_t update, bool happens) {
  std::uint64_t known = shared_->decision.load();
  while (known < 2 * update) {
    const std::uint64_t mine = 2 * update + (happens ? 1 : 0);
    if (shared_->decision.compare_exchange_weak(known, mine)) return happens;
  }
  return known != 2 * update;
}

std::optional<std::size_t> Claims::next(std::uint64_t update, int lane) {
  std::atomic<bool>& is_writing = ranks_[rank_].is_writing[lane];
  // Set before a piece is claimed: who dies in between is thought to have torn one.
  is_writing.store(true);
  const bool is_closed = shared_->closed.load() == update;
  for (int i = is_closed ? num_ranks_ : 0; i < num_ranks_; ++i) {
    const int owner = (rank_ + i) % num_ranks_;
    const std::size_t first = first_of(update, owner);
    const std::size_t count = first_of(update, owner + 1) - first;
    std::atomic<std::uint64_t>& claimed = ranks_[owner].num_claimed[update % 2];
    if (claimed.load(std::memory_order_relaxed) >= count) continue;
    const std::uint64_t mine = claimed.fetch_add(1);
    if (mine < count) return first + mine;
  }
  is_writing.store(false);
  return std::nullopt;
}

bool Claims::is_writing(int rank) const {
  return std::ranges::any_of(ranks_[rank].is_writing,
                             [](const std::atomic<bool>& one) { return one.load(); });
}

std::size_t Claims::num_claimed(std::uint64_t update) const {
  std::size_t sum = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    sum += std::min<std::size_t>(ranks_[rank].num_claimed[update % 2].load(),
                                 first_of(update, rank + 1) - first_of(update, rank));
  }
  return sum;
}

}  // namespace lockstep::shm
