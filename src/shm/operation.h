// What a caller asks of a group of ranks, and what becomes of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shm/layout.h"

namespace lockstep::shm {

// Memory in equal parts: one behind the other, or anywhere.
struct Parts {
  std::byte* base = nullptr;
  std::size_t stride = 0;                // bytes from part to part
  std::vector<std::byte*> list = {};     // if not empty: each part's own place
  std::vector<std::size_t> counts = {};  // if not empty: elements of each part (uneven kAllToAll)

  bool is_empty() const { return base == nullptr && list.empty(); }
  std::byte* part(int index) const {
    return list.empty() ? base + static_cast<std::size_t>(index) * stride
                        : list[static_cast<std::size_t>(index)];
  }
  // How many of `count` elements from `first` on a part has: uneven parts end where they end.
  std::size_t count_from(int index, std::size_t first, std::size_t count) const {
    if (counts.empty()) return count;
    const std::size_t whole = counts[static_cast<std::size_t>(index)];
    return whole <= first ? 0 : std::min(count, whole - first);
  }
};

// A collective on raw memory. By kind, `input` has 1 part, or one per rank for kScatter (at the
// root), kReduceScatter and kAllToAll; `output` has 1 part, or one per rank for kAllGather, kGather
// (at the root) and kAllToAll. What a rank neither gives nor takes is empty.
struct Operation {
  Kind kind = Kind::kBarrier;
  DataType type = DataType::kBytes;
  Reduction reduction = Reduction::kNone;
  int root = 0;
  double factor = 1;      // of Reduction::kScaledSum
  std::size_t count = 0;  // elements of one part, the same on all ranks
  Parts input = {};
  Parts output = {};
  const Operation* part_of = nullptr;      // the operation that this one is a step of
  std::shared_ptr<const void> owner = {};  // of the memory, for as long as it is used

  // What a caller asked for: "all_reduce of f32[1000], 4000 bytes"
  std::string text() const;
};

// An operation under way. Belongs to its group, which moves it on; see Group::poll and wait.
struct Request {
  Operation operation;
  std::uint64_t num_pieces = 0;
  std::uint64_t num_posted = 0;
  std::uint64_t num_done = 0;
  std::uint64_t last_piece = 0;  // the number of the last piece posted
  bool must_be_retired = false;  // others read the caller's own memory: not done until they have
  bool is_done = false;

  // A message from one rank to another, instead of an operation.
  bool is_mail = false;
  bool is_send = false;
  int peer = 0;  // kAnyRank: whoever sends; after that, who it was
  int tag = 0;
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  std::size_t bytes_moved = 0;
  bool is_abandoned = false;  // nobody waits for it any more
};

constexpr int kAnyRank = -1;

// Throws UsageError on `rank` if the operation cannot be, in a world of `size`.
void check(const Operation& operation, int rank, int size);

// Throws MismatchError: two ranks, by their names, are at different operations. `rank` throws it.
[[noreturn]] void throw_mismatch(int rank, std::uint64_t number, int first,
                                 const Operation& of_first, int other, const Operation& of_other);

}  // namespace lockstep::shm
