#include "data/stream.h"

#include <utility>

#include "data/permutation.h"

namespace lockstep {
namespace {

// Of StreamOptions::interleave: who shuffles has no order to keep.
constexpr std::size_t kUsualLanes = 4;

}  // namespace

RecordStream::RecordStream(const detail::LoaderSource& source, const StreamSampler& sampler,
                           const Epoch& epoch, std::int64_t consumed, std::size_t batch_size,
                           int threads)
    : sampler_(sampler), epoch_(epoch), batch_size_(batch_size) {
  const StreamOptions& options = sampler.options();
  const bool is_by_shard = options.by == ShardBy::kShard;
  const auto step = static_cast<std::size_t>(is_by_shard ? sampler.num_ranks() : 1);
  const auto first = static_cast<std::size_t>(is_by_shard ? sampler.rank() : 0);
  const Permutation shuffled(source.num_shards, epoch.seed,
                             static_cast<std::uint64_t>(epoch.number));
  std::vector<std::size_t> shards;  // that this rank reads
  for (std::size_t i = first; i < source.num_shards; i += step) {
    shards.push_back(options.shuffle > 0 ? static_cast<std::size_t>(shuffled(i)) : i);
  }
  const std::size_t usual = options.shuffle > 0 ? kUsualLanes : 1;
  lanes_ = std::make_unique<ShardLanes>(source, shards,
                                        options.interleave == 0 ? usual : options.interleave,
                                        threads, batch_size, sampler.rank());
  to_skip_ = is_by_shard ? consumed / sampler.num_ranks() : consumed;
}

std::optional<detail::Draw> RecordStream::next() {
  for (; to_skip_ > 0 && !is_over_; --to_skip_) is_over_ = !shuffle();
  detail::Draw draw{.info = {.indices = {}, .epoch = epoch_}};
  while (draw.records.size() < batch_size_) {
    auto one = deal();
    if (!one) break;
    draw.info.indices.push_back(one->index);
    draw.records.push_back(std::move(one->record));
  }
  if (draw.records.empty()) return std::nullopt;
  return draw;
}

std::optional<NumberedRecord> RecordStream::shuffle() {
  const std::size_t size = sampler_.options().shuffle;
  if (size == 0) return lanes_->next();
  // Each draw is replaced by the next record, as long as there are any.
  while (buffer_.size() < size) {
    auto one = lanes_->next();
    if (!one) break;
    buffer_.push_back(std::move(*one));
  }
  if (buffer_.empty()) return std::nullopt;
  // Not the numbers that samples get.
  const Epoch own{.number = epoch_.number, .seed = ~epoch_.seed};
  std::swap(buffer_[own.seed_of(num_shuffled_++) % buffer_.size()], buffer_.back());
  NumberedRecord drawn = std::move(buffer_.back());
  buffer_.pop_back();
  return drawn;
}

std::optional<NumberedRecord> RecordStream::deal() {
  if (is_over_) return std::nullopt;
  const StreamOptions& options = sampler_.options();
  std::optional<NumberedRecord> mine;
  if (options.by == ShardBy::kShard) {
    mine = shuffle();
  } else {
    // One for each rank.
    for (int rank = 0; rank < sampler_.num_ranks() && !is_over_; ++rank) {
      auto one = shuffle();
      is_over_ = !one;
      if (rank == sampler_.rank()) mine = std::move(one);
    }
    if (is_over_ && options.is_even) return std::nullopt;
  }
  is_over_ = is_over_ || !mine;
  return mine;
}

}  // namespace lockstep
