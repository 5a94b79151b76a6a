// Operation: a collective on raw memory, whatever moves the bytes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/purpose.h"
#include "collective/types.h"

namespace lockstep::collective {

enum class Kind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kReduceOnce,
};
const char* name_of(Kind kind);

// What a rank is doing, for errors.
struct Activity {
  std::string operation;  // "all_reduce"
  std::string text;       // "all_reduce of f32[1000], 4000 bytes"
};

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

// What must be equal on all ranks. They send it to each other as it lies in memory: no gaps.
struct Signature {
  std::uint64_t count = 0;  // elements of one part
  std::int32_t root = 0;
  Kind kind = Kind::kBarrier;
  DataType type = DataType::kBytes;
  Reduction reduction = Reduction::kNone;
  Purpose purpose = Purpose::kNone;

  bool operator==(const Signature&) const = default;
  Activity activity() const;
};

// By kind, `input` has 1 part, or one per rank for kScatter (at the root), kReduceScatter and
// kAllToAll; `output` has 1 part, or one per rank for kAllGather, kGather (at the root) and
// kAllToAll. What a rank neither gives nor takes is empty.
//
// kReduceOnce is an all-reduce whose result exists once: `output` is memory that all ranks of a
// host map, on each rank at its own address, and every element of it is written by one rank alone.
// When it is done, on any rank, all of the output is written and no input is read any more. Nobody
// writes to the output before all ranks have started the operation, so that what is there can be
// read until then. After a failure other ranks may go on writing for a moment.
struct Operation {
  Kind kind = Kind::kBarrier;
  DataType type = DataType::kBytes;
  Reduction reduction = Reduction::kNone;
  int root = 0;
  double factor = 1;      // of Reduction::kScaledSum
  int average_over = 0;   // what Reduction::kAverage divides by; 0: the number of ranks
  std::size_t count = 0;  // elements of one part, the same on all ranks
  Purpose purpose = current_purpose();
  Parts input = {};
  Parts output = {};
  const Operation* part_of = nullptr;      // the operation that this one is a step of
  std::shared_ptr<const void> owner = {};  // of the memory, for as long as it is used
  std::chrono::milliseconds timeout{0};    // of waits for other ranks; 0: the runner's

  Signature signature() const {
    return {.count = count,
            .root = root,
            .kind = kind,
            .type = type,
            .reduction = reduction,
            .purpose = purpose};
  }
  // What a caller asked for.
  Activity activity() const {
    return (part_of == nullptr ? *this : *part_of).signature().activity();
  }
  std::string text() const { return activity().text; }
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds usual) const {
    const auto own = (part_of == nullptr ? *this : *part_of).timeout;
    return own.count() > 0 ? own : usual;
  }
};

class Runner;

// Throws UsageError if the operation cannot be, on this runner.
void check(const Operation& operation, const Runner& runner);

// Throws MismatchError: two ranks, by their global ranks, are at different operations. `rank`
// throws it.
[[noreturn]] void throw_mismatch(int rank, std::uint64_t number, int first,
                                 const Signature& of_first, int other, const Signature& of_other);

}  // namespace lockstep::collective
