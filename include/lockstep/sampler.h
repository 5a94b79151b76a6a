// Samplers: which samples each rank reads. For torch::data::make_data_loader, and alone.
//
// An epoch is one order of all samples, the same on all ranks; rank r takes every size-th of it,
// beginning with the r-th. So what is left of an epoch does not depend on how many ranks there are:
// a run resumes exactly at another world size.
// Threading: copies of a sampler share its state, as a data loader's copy and the program's must;
// each call is safe from any thread.
#pragma once

#include <lockstep/export.h>
#include <lockstep/world.h>
#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep {

enum class SampleOrder {
  kShuffled,    // by seed and epoch; the same with every compiler and library, in constant memory
  kAsPython,    // that of Python's DistributedSampler with the same seed, index for index
  kSequential,  // 0, 1, 2, ...
  // Samples of similar length stand together, in an order that differs between epochs: see
  // SamplerOptions::lengths.
  kByLength,
};

struct SamplerOptions {
  SampleOrder order = SampleOrder::kShuffled;
  std::uint64_t seed = 0;
  // All ranks take equally many samples. If these do not come out even, the first samples of the
  // epoch are used again; with drop_last, the last ones are left out.
  bool drop_last = false;
  // Of all samples, for kByLength. Each epoch is shuffled, cut into parts of 64 buckets, and each
  // part is sorted by length, cut into buckets, and these are shuffled. With bucket_size = batch
  // size x ranks, all ranks have batches of about the same length at the same time, and little is
  // padded. The order does not depend on the number of ranks, only on these numbers.
  std::vector<std::int64_t> lengths = {};
  std::size_t bucket_size = 256;
  // With logical ranks and DistributedDataParallel::accumulate(k), k: how many batches one of them
  // is given before the next has its turn. What is left of an epoch for less than a whole turn of
  // all of them is left out.
  int batches_per_turn = 1;
};

// What a state is of.
enum class SamplerKind {
  kSamples,     // a DistributedSampler, alone or in a loader
  kRecords,     // a loader of an IterableDataset
  kEvaluation,  // a loader with an EvalSampler: there is nothing to resume
};

// Where a run is: what resuming needs. Ranks, and their number, play no part in it, unless each
// shard is read by one rank (ShardBy::kShard).
struct SamplerState {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t consumed = 0;   // samples of this epoch, by all ranks together
  std::int64_t num_ranks = 0;  // that it is bound to; 0: any
  // If the state is between two epochs of a loader of records: `consumed` of the first at its end.
  std::int64_t last_consumed = 0;
  SamplerKind kind = SamplerKind::kSamples;
  std::int64_t num_shards = 0;  // of kRecords
  bool operator==(const SamplerState&) const = default;
};

// For training: equally many samples on all ranks, another order in each epoch.
class LOCKSTEP_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // Throws: UsageError if there are no samples, with drop_last fewer than ranks, or another number
  // of lengths.
  DistributedSampler(std::size_t num_samples, const World& world,
                     const SamplerOptions& options = {});
  DistributedSampler(std::size_t num_samples, int rank, int num_ranks,
                     const SamplerOptions& options = {});

  // Begins the next epoch if something of this one was drawn, or nothing is left of it. Data
  // loaders call it in begin(). `num_samples`, if given, is the new size of the data set.
  void reset(std::optional<std::size_t> num_samples = std::nullopt) override;
  // This rank's next samples, at most `batch_size`; nothing at the end of the epoch. The n-th batch
  // has the same size on all ranks. With logical ranks, of which each has its own samples, those
  // that this rank plays have a batch in turn, always of one size.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  std::size_t num_samples() const;  // of the data set
  std::int64_t epoch() const;
  void set_epoch(std::int64_t epoch);  // from its beginning
  // With logical ranks, of each of these.
  std::size_t samples_per_rank() const;   // in what is left of the epoch at its last reset
  std::size_t samples_per_epoch() const;  // of this rank, in a whole one

  // The state after what next() has given out. A data loader draws ahead: then say how many samples
  // of this epoch this rank has really used since the last reset.
  SamplerState state(std::optional<std::size_t> used = std::nullopt) const;
  // Throws: UsageError if it is of another kind, or has used more samples than there are.
  void load_state(const SamplerState& state);
  // After the ranks of the world have changed (lockstep/elastic.h): what is left of the epoch at
  // `state` is dealt out anew. Requires: logical ranks, as many as before.
  void move_to(const World& world, const SamplerState& state);
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class LoaderBase;
  struct State;
  DistributedSampler(std::size_t num_samples, LogicalRanks ranks, int num_ranks,
                     const SamplerOptions& options, int global_rank);

  // For a loader that draws ahead: a sampler of its own for what is left of the epoch, and the
  // number of samples of it that were really used. `pass` tells passes through the data apart: what
  // is used of one that set_epoch(), load_state() or reset() has ended does not count.
  // The next epoch begins if too little is left of this one; `is_whole`: for whole batches.
  std::pair<DistributedSampler, std::int64_t> begin_pass(std::size_t batch_size, bool is_whole);
  void use(std::size_t samples, std::int64_t pass);

  std::shared_ptr<State> state_;
};

// For evaluation: every sample exactly once over all ranks, in order. Ranks may differ by one
// sample.
class LOCKSTEP_API EvalSampler : public torch::data::samplers::Sampler<> {
 public:
  EvalSampler(std::size_t num_samples, const World& world);
  EvalSampler(std::size_t num_samples, int rank, int num_ranks);

  void reset(std::optional<std::size_t> num_samples = std::nullopt) override;
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  std::size_t num_samples() const { return num_samples_; }  // of the data set
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::size_t num_samples_;
  std::size_t rank_;
  std::size_t num_ranks_;
  std::size_t next_;
};

}  // namespace lockstep
