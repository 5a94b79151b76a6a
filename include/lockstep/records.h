// Records: data that is read in order, from files or from wherever a program likes.
//
// An epoch goes through all shards once. Several are read at the same time (interleave), and what
// makes samples of records, the loader's collate function, runs on its threads. Batches are the
// same whatever the number of threads, and a run that resumes reads again up to where it was.
// Threading: open(), and readers of different shards, are called by several threads at once.
#pragma once

#include <lockstep/dataset.h>
#include <lockstep/export.h>
#include <lockstep/world.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// Shards, each a sequence of records. Records are copyable.
template <typename Record>
class IterableDataset {
 public:
  using RecordType = Record;
  // The next record of a shard; nothing at its end.
  using Reader = std::function<std::optional<Record>()>;

  virtual ~IterableDataset() = default;
  virtual std::size_t num_shards() const = 0;
  virtual std::string shard_name(std::size_t shard) const = 0;  // for errors
  // The same records in the same order in each call.
  virtual Reader open(std::size_t shard) const = 0;
};

enum class RecordFormat {
  kLines,  // of a text, without their ends
  // As write_records() writes: the 8 bytes "records1", then of each record the number of its bytes,
  // 8 bytes little-endian, and the bytes.
  kSized,
};

// Files of records, a shard each, compressed by gzip or not.
class LOCKSTEP_API RecordFiles : public IterableDataset<std::string> {
 public:
  // Throws: UsageError if there are none, SystemError that names a file which cannot be read.
  explicit RecordFiles(std::vector<std::string> paths, RecordFormat format = RecordFormat::kLines);
  // Collective: if a rank cannot read one of the files, all ranks throw. So do they with a
  // MismatchError if the names of the files differ; their folders may.
  RecordFiles(std::vector<std::string> paths, const World& world,
              RecordFormat format = RecordFormat::kLines);

  std::size_t num_shards() const override { return paths_.size(); }
  std::string shard_name(std::size_t shard) const override { return paths_.at(shard); }
  Reader open(std::size_t shard) const override;

 private:
  std::vector<std::string> paths_;
  RecordFormat format_;
};

// Writes a file for RecordFormat::kSized. Throws: SystemError.
LOCKSTEP_API void write_records(const std::string& path, const std::vector<std::string>& records);

// How records are dealt out to ranks.
enum class ShardBy {
  // Each rank reads all shards and keeps every size-th record: all ranks have equally many, and a
  // run resumes with any number of ranks.
  kRecord,
  // Each shard is read by one rank: for data that is too large to be read by all. Ranks may have
  // different numbers of records (ddp.join() is for that), and a run resumes in the middle of an
  // epoch only with as many ranks as before.
  kShard,
};

struct StreamOptions {
  ShardBy by = ShardBy::kRecord;
  // In each epoch shards come in another order, and the next record is drawn from so many that are
  // held in memory. 0: everything in the order in which it is stored.
  std::size_t shuffle = 0;
  // So many shards give a record each in turn, and are read at the same time if the loader has more
  // threads than one: as many again read, at most one for each of these shards. The order depends
  // on this number, not on threads. 1: one shard after the other; 0: that, or 4 with shuffle.
  std::size_t interleave = 0;
  std::uint64_t seed = 0;
  // With kRecord: the last records, if they do not suffice for all ranks, are left out. False, for
  // evaluation: every record is read once, and ranks may differ by one.
  bool is_even = true;
};

// For a loader of an IterableDataset.
class LOCKSTEP_API StreamSampler {
 public:
  explicit StreamSampler(const World& world, const StreamOptions& options = {});
  StreamSampler(int rank, int num_ranks, const StreamOptions& options = {});

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const StreamOptions& options() const { return options_; }

 private:
  int rank_;
  int num_ranks_;
  StreamOptions options_;
};

}  // namespace lockstep
