#include "shm/journal.h"

#include <cstring>

namespace lockstep::shm {
namespace {

constexpr std::size_t kAlign = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

std::size_t Journal::bytes_for(const Size& size) {
  const auto lanes =
      static_cast<std::size_t>(size.num_ranks) * static_cast<std::size_t>(size.num_lanes);
  return aligned(size.num_pieces * sizeof(std::atomic<std::uint64_t>)) +
         lanes * (sizeof(Entry) + aligned(size.piece_bytes));
}

Journal::Journal(std::byte* memory, int rank, const Size& size)
    : done_(reinterpret_cast<std::atomic<std::uint64_t>*>(memory)),
      entries_(memory + aligned(size.num_pieces * sizeof(std::atomic<std::uint64_t>))),
      entry_bytes_(sizeof(Entry) + aligned(size.piece_bytes)),
      rank_(rank),
      size_(size) {}

Journal::Entry& Journal::entry(int rank, int lane) const {
  const auto index = static_cast<std::size_t>(rank) * static_cast<std::size_t>(size_.num_lanes) +
                     static_cast<std::size_t>(lane);
  return *reinterpret_cast<Entry*>(entries_ + index * entry_bytes_);
}

void Journal::save(int lane, std::uint64_t update, std::size_t piece, const Runs& runs) {
  Entry& mine = entry(rank_, lane);
  std::byte* to = reinterpret_cast<std::byte*>(&mine) + sizeof(Entry);
  for (const Run& run : runs) {
    std::memcpy(to, run.data, run.bytes);
    to += run.bytes;
  }
  mine.tag.store(tag_of(update, piece));
}

void Journal::set_done(int lane, std::uint64_t update, std::size_t piece) {
  done_[piece].store(update);
  entry(rank_, lane).tag.store(0);
}

bool Journal::are_done(std::uint64_t update, std::size_t num_pieces) const {
  for (std::size_t piece = 0; piece < num_pieces; ++piece) {
    if (!is_done(update, piece)) return false;
  }
  return true;
}

void Journal::repair(int lane, std::uint64_t update, std::size_t piece, const Runs& runs,
                     const std::function<bool(int rank)>& is_lost,
                     const std::function<void()>& again) {
  std::vector<Entry*> old;
  for (int rank = 0; rank < size_.num_ranks; ++rank) {
    if (rank == rank_ || !is_lost(rank)) continue;
    for (int its_lane = 0; its_lane < size_.num_lanes; ++its_lane) {
      Entry& its = entry(rank, its_lane);
      if (its.tag.load() == tag_of(update, piece)) old.push_back(&its);
    }
  }
  // If there are two, one died while it did the other's piece again: both have what it was.
  if (!old.empty()) {
    const std::byte* from = reinterpret_cast<const std::byte*>(old.front()) + sizeof(Entry);
    for (const Run& run : runs) {
      std::memcpy(run.data, from, run.bytes);
      from += run.bytes;
    }
  }
  save(lane, update, piece, runs);
  for (Entry* const one : old) one->tag.store(0);
  again();
  set_done(lane, update, piece);
}

}  // namespace lockstep::shm
