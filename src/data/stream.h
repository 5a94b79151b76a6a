// RecordStream: the records of one rank in one epoch, in the order in which they are handed out.
//
// The order is a function of the shards, the options and the epoch alone. To begin in the middle of
// an epoch, what comes before is read and thrown away: exact also with a shuffle buffer. Reading
// itself, by several threads, is that of ShardLanes.
// Threading: belongs to one thread at a time.
#pragma once

#include <lockstep/loader_source.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/lanes.h"

namespace lockstep {

class RecordStream {
 public:
  // `consumed`: records of this epoch that were used before, by all ranks together. `threads` of
  // its own read, if they are more than one.
  RecordStream(const detail::LoaderSource& source, const StreamSampler& sampler, const Epoch& epoch,
               std::int64_t consumed, std::size_t batch_size, int threads);

  // A batch; nothing at the end. Throws: what reading throws, or UsageError that names shard and
  // record.
  std::optional<detail::Draw> next();

 private:
  std::optional<NumberedRecord> shuffle();  // out of the buffer
  std::optional<NumberedRecord> deal();     // to this rank

  // Constant after construction.
  StreamSampler sampler_;
  Epoch epoch_;
  std::size_t batch_size_;

  std::unique_ptr<ShardLanes> lanes_;
  std::int64_t to_skip_;  // before the first record is dealt
  std::vector<NumberedRecord> buffer_;
  std::size_t num_shuffled_ = 0;
  bool is_over_ = false;
};

}  // namespace lockstep
