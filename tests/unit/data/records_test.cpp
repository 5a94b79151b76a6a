// Files of records: formats, dealing out to ranks, shuffling, resuming, and what can be wrong.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/data.h>
#include <lockstep/error.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "support/has.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

template <typename Call>
std::string said(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was said";
}

class Records : public testing::Test {
 protected:
  Records() {
    std::string name = testing::TempDir() + "lockstep-records-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~Records() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  // Shards of 5, 6, 7, ... lines "shard.line".
  std::shared_ptr<RecordFiles> make_files(int count) const {
    Texts paths;
    for (int shard = 0; shard < count; ++shard) {
      std::string text;
      for (int line = 0; line < 5 + shard; ++line) {
        text += std::to_string(shard) + "." + std::to_string(line) + "\n";
      }
      paths.push_back(write("part" + std::to_string(shard), text));
    }
    return std::make_shared<RecordFiles>(paths);
  }

  std::string folder_;
};

Texts read_all(const RecordFiles& files, std::size_t shard = 0) {
  Texts all;
  const auto read = files.open(shard);
  while (auto record = read()) all.push_back(std::move(*record));
  return all;
}

using TextLoader = BasicLoader<Texts>;
const auto kAsIs = [](Texts records) { return records; };

TextLoader make_loader(const std::shared_ptr<RecordFiles>& files, int rank, int num_ranks,
                       const StreamOptions& options, const LoaderOptions& how = {.batch_size = 4}) {
  return {files, StreamSampler(rank, num_ranks, options), kAsIs, how};
}

Texts epoch_of(TextLoader& loader) {
  Texts all;
  for (const Texts& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

TEST_F(Records, FormatsAreReadPackedOrNot) {
  EXPECT_EQ(read_all(RecordFiles({write("lines", "one\n\ntwo\nlast")})),
            (Texts{"one", "", "two", "last"}));
  EXPECT_EQ(read_all(RecordFiles({write("nothing", "")})), Texts());
  const std::string long_line(200'000, 'x');
  EXPECT_EQ(read_all(RecordFiles({write("long", "a\n" + long_line + "\nb\n")})),
            (Texts{"a", long_line, "b"}));
  const Texts records = {"a\nb", "", std::string(3'000'000, 'y'), std::string("\0z", 2)};
  const std::string path = folder_ + "/sized";
  write_records(path, records);
  EXPECT_EQ(read_all(RecordFiles({path}, RecordFormat::kSized)), records);
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  gzFile packed = ::gzopen((path + ".gz").c_str(), "wb");
  ::gzwrite(packed, bytes.data(), static_cast<unsigned>(bytes.size()));
  ::gzclose(packed);
  EXPECT_EQ(read_all(RecordFiles({path + ".gz"}, RecordFormat::kSized)), records);
  fs::resize_file(path + ".gz", fs::file_size(path + ".gz") - 9);
  EXPECT_TRUE(
      has(said([&] { read_all(RecordFiles({path + ".gz"}, RecordFormat::kSized)); }), "sized.gz"));
}

// Little-endian, these sizes begin with the bytes of a gzip file.
TEST_F(Records, OfAnySizeAreReadWhereTheyComeFirst) {
  for (const std::size_t size : {35615, 559903}) {
    const Texts records = {std::string(size, 'x'), "second"};
    const std::string path = folder_ + "/" + std::to_string(size);
    write_records(path, records);
    EXPECT_EQ(read_all(RecordFiles({path}, RecordFormat::kSized)), records);
  }
}

TEST_F(Records, ABadFileIsNamedWithTheReason) {
  EXPECT_TRUE(has(said([&] { RecordFiles({write("one", "a"), folder_ + "/none"}); }), "/none"));
  EXPECT_TRUE(has(said([&] { RecordFiles({folder_}); }), "is not a file"));
  EXPECT_TRUE(has(said([] { RecordFiles(Texts{}, RecordFormat::kLines); }), "no files"));
  const std::string path = folder_ + "/bad";
  write_records(path, {"first", "second"});
  const auto read = [&] { read_all(RecordFiles({path}, RecordFormat::kSized)); };
  fs::resize_file(path, fs::file_size(path) - 2);
  EXPECT_TRUE(has(said(read), "/bad: record 1 is truncated: it has 4 bytes of 6"));
  fs::resize_file(path, 8 + 8 + 5 + 3);
  EXPECT_TRUE(has(said(read), "/bad: record 1 is truncated in its size"));
  write("bad", "records1" + std::string(8, '\x7f') + "x");
  EXPECT_TRUE(has(said(read), "/bad: record 0 is truncated: it has 1 bytes of"));
  for (const std::string bytes : {"", "records", "a line\nanother line\n"}) {
    write("bad", bytes);
    EXPECT_TRUE(has(said(read), "/bad does not begin with \"records1\""));
  }
  EXPECT_TRUE(has(said([&] { write_records(folder_ + "/no/file", {}); }), "/no/file"));
}

TEST_F(Records, BatchesDoNotDependOnThreads) {
  const auto files = make_files(7);
  std::set<std::vector<Texts>> orders;
  for (const ShardBy by : {ShardBy::kRecord, ShardBy::kShard}) {
    for (const std::size_t interleave : {0, 1, 3, 100}) {
      std::vector<Texts> expected;
      for (const int threads : {0, 1, 2, 8}) {
        TextLoader loader =
            make_loader(files, 1, 2, {.by = by, .shuffle = 8, .interleave = interleave, .seed = 3},
                        {.batch_size = 3, .threads = threads, .ahead = 2});
        std::vector<Texts> got;
        for (int epoch = 0; epoch < 3; ++epoch) {
          for (const Texts& batch : loader) got.push_back(batch);
        }
        if (expected.empty()) expected = got;
        EXPECT_EQ(got, expected) << threads;
      }
      orders.insert(expected);
    }
  }
  EXPECT_EQ(orders.size(), 4U + 2U);  // of the 3 shards of a rank, 3 at most are read at once
}

TEST_F(Records, OfSeveralShardsComeInTurn) {
  const auto files = make_files(3);
  for (const int threads : {0, 3}) {
    TextLoader loader =
        make_loader(files, 0, 1, {.interleave = 2}, {.batch_size = 4, .threads = threads});
    EXPECT_EQ(epoch_of(loader),
              (Texts{"0.0", "1.0", "0.1", "1.1", "0.2", "1.2", "0.3", "1.3", "0.4", "1.4", "2.0",
                     "1.5", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6"}));
  }
}

// SlowNumbers of a program's own, a shard after the other, and how they are read.
struct SlowNumbers : IterableDataset<std::size_t> {
  std::size_t shards = 8;
  std::size_t in_each = 50;
  std::chrono::milliseconds time = {};  // that each takes
  mutable std::atomic<std::size_t> num_read = 0;
  mutable std::atomic<int> num_reading = 0;
  mutable std::atomic<int> most_reading = 0;

  std::size_t num_shards() const override { return shards; }
  std::string shard_name(std::size_t shard) const override { return std::to_string(shard); }
  Reader open(std::size_t shard) const override {
    return [this, shard, i = std::size_t{0}]() mutable -> std::optional<std::size_t> {
      if (i == in_each) return std::nullopt;
      const int reading = ++num_reading;
      for (int most = most_reading; most < reading;) {
        if (most_reading.compare_exchange_weak(most, reading)) break;
      }
      EXPECT_FALSE(at::GradMode::is_enabled());
      std::this_thread::sleep_for(time);
      --num_reading;
      ++num_read;
      return shard * in_each + i++;
    };
  }
};

using SlowLoader = BasicLoader<std::vector<std::size_t>>;
const auto kSameNumbers = [](std::vector<std::size_t> records) { return records; };

TEST_F(Records, AreReadByAllThreadsAtOnce) {
  std::vector<std::size_t> expected;
  double ms_of_one = 0;
  for (const int threads : {1, 4}) {
    const auto numbers = std::make_shared<SlowNumbers>();
    numbers->time = std::chrono::milliseconds(1);
    SlowLoader loader(numbers, StreamSampler(0, 1, {.shuffle = 16}), kSameNumbers,
                      {.batch_size = 20, .threads = threads});
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::size_t> got;
    for (const auto& batch : loader) got.insert(got.end(), batch.begin(), batch.end());
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    RecordProperty("ms_of_" + std::to_string(threads), std::to_string(ms.count()));
    EXPECT_EQ(numbers->most_reading, threads);
    if (threads == 1) {
      expected = got;
      ms_of_one = ms.count();
    } else {
      EXPECT_LT(ms.count(), 0.6 * ms_of_one);
    }
    EXPECT_EQ(got, expected);
    EXPECT_EQ(std::set<std::size_t>(got.begin(), got.end()).size(), 400U);
  }
}

// Whatever there is, and whoever does not come for it.
TEST_F(Records, AreNotReadFarAhead) {
  const auto numbers = std::make_shared<SlowNumbers>();
  numbers->in_each = std::size_t{1} << 40;
  const auto expect_fewer_than = [&](std::size_t limit, std::chrono::milliseconds time) {
    numbers->time = time;
    numbers->num_read = 0;
    SlowLoader loader(numbers, StreamSampler(0, 1, {.interleave = 8}), kSameNumbers,
                      {.batch_size = 16, .threads = 4, .ahead = 1});
    loader.next();
    std::size_t before = 0;
    for (int quiet = 0; quiet < 10 && before < limit;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      quiet = std::exchange(before, numbers->num_read.load()) == numbers->num_read ? quiet + 1 : 0;
    }
    EXPECT_LT(numbers->num_read, limit);
  };
  expect_fewer_than(2 * 16 + 8 * 4, std::chrono::milliseconds(2));
  expect_fewer_than(2 * 16 + 8 * 1024, std::chrono::milliseconds(0));
}

TEST_F(Records, RanksShareAnEpoch) {
  const auto files = make_files(5);  // 35 records
  Texts all;
  for (std::size_t shard = 0; shard < 5; ++shard) {
    for (const std::string& one : read_all(*files, shard)) all.push_back(one);
  }
  std::ranges::sort(all);
  for (const std::size_t shuffle : {0, 1, 6, 100}) {
    for (const int num_ranks : {1, 2, 3}) {
      for (const bool is_by_shard : {false, true}) {
        const StreamOptions options{.by = is_by_shard ? ShardBy::kShard : ShardBy::kRecord,
                                    .shuffle = shuffle};
        const StreamOptions uneven{.by = options.by, .shuffle = shuffle, .is_even = false};
        Texts even_records, records;
        std::set<std::size_t> counts;
        for (int rank = 0; rank < num_ranks; ++rank) {
          TextLoader even = make_loader(files, rank, num_ranks, options);
          TextLoader each = make_loader(files, rank, num_ranks, uneven);
          const Texts mine = epoch_of(even);
          counts.insert(mine.size());
          even_records.insert(even_records.end(), mine.begin(), mine.end());
          const Texts more = epoch_of(each);
          records.insert(records.end(), more.begin(), more.end());
        }
        std::ranges::sort(records);
        EXPECT_EQ(records, all);  // every record once
        if (is_by_shard) continue;
        EXPECT_EQ(counts.size(), 1U);  // equally many on all ranks
        EXPECT_EQ(even_records.size(), 35U / num_ranks * num_ranks);
        EXPECT_EQ(std::set<std::string>(even_records.begin(), even_records.end()).size(),
                  even_records.size());
      }
    }
  }
}

TEST_F(Records, AreInOrderOrShuffledOtherwiseInEachEpoch) {
  const auto files = make_files(4);
  TextLoader in_order = make_loader(files, 0, 1, {});
  const Texts stored = epoch_of(in_order);
  EXPECT_EQ(stored.front(), "0.0");
  EXPECT_EQ(stored.back(), "3.7");
  EXPECT_EQ(epoch_of(in_order), stored);
  TextLoader shuffled = make_loader(files, 0, 1, {.shuffle = 10});
  std::set<Texts> orders = {stored};
  for (int epoch = 0; epoch < 4; ++epoch) orders.insert(epoch_of(shuffled));
  EXPECT_EQ(orders.size(), 5U);
}

// After any batch, with a shuffle buffer, in another process with other threads.
TEST_F(Records, AResumeIsExact) {
  const auto files = make_files(4);
  for (const ShardBy by : {ShardBy::kRecord, ShardBy::kShard}) {
    const StreamOptions options{.by = by, .shuffle = 7, .seed = 2};  // 4 shards at once, or 2
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<std::optional<Texts>> whole;
      std::vector<SamplerState> states;
      TextLoader loader = make_loader(files, rank, 2, options, {.batch_size = 3, .threads = 3});
      for (int i = 0; i < 15; ++i) {
        states.push_back(loader.state());
        whole.push_back(loader.next());
      }
      EXPECT_GE(states.back().epoch, 1);
      for (std::size_t from = 0; from < states.size(); ++from) {
        TextLoader again = make_loader(files, rank, 2, options, {.batch_size = 3, .threads = 1});
        again.load_state(states[from]);
        for (std::size_t i = from; i < whole.size(); ++i) {
          EXPECT_EQ(again.next(), whole[i]) << from << " " << i;
        }
      }
    }
  }
}

TEST_F(Records, AResumeByRecordMayHaveOtherRanks) {
  const auto files = make_files(4);  // 26 records
  const StreamOptions options{.shuffle = 5};
  TextLoader whole = make_loader(files, 0, 1, options);
  const Texts expected = epoch_of(whole);
  std::set<std::string> got;
  SamplerState state;
  for (int rank = 0; rank < 3; ++rank) {
    TextLoader loader = make_loader(files, rank, 3, options);
    const auto batch = loader.next();
    got.insert(batch->begin(), batch->end());
    state = loader.state();
  }
  EXPECT_EQ(state.consumed, 12);
  EXPECT_EQ(got, std::set<std::string>(expected.begin(), expected.begin() + 12));
  for (int rank = 0; rank < 2; ++rank) {
    TextLoader loader = make_loader(files, rank, 2, options);
    loader.load_state(state);
    for (const std::string& one : epoch_of(loader)) EXPECT_TRUE(got.insert(one).second) << one;
  }
  EXPECT_EQ(got.size(), 26U);
}

TEST_F(Records, AStateThatDoesNotFitIsRefused) {
  const auto files = make_files(4);
  const StreamOptions by_shard{.by = ShardBy::kShard};
  TextLoader two = make_loader(files, 0, 2, by_shard);
  two.next();
  const SamplerState state = two.state();
  TextLoader four = make_loader(files, 0, 4, by_shard);
  EXPECT_TRUE(has(said([&] { four.load_state(state); }), "one of 2 ranks, this loader reads"));
  TextLoader any = make_loader(files, 0, 2, {});
  EXPECT_TRUE(has(said([&] { any.load_state(state); }), "any number of ranks"));
  EXPECT_TRUE(has(said([&] { DistributedSampler(100, 0, 1).load_state(state); }), "in order"));
  while (two.next()) continue;
  four.load_state(two.state());  // between epochs
  EXPECT_EQ(four.state().epoch, 1);
  EXPECT_TRUE(
      has(said([&] { any.load_state({.seed = 0, .epoch = -1, .consumed = 0}); }), "epoch -1"));
  TextLoader three = make_loader(make_files(3), 0, 2, {});
  three.next();
  EXPECT_TRUE(has(said([&] { any.load_state(three.state()); }), "of 3 shards, this loader has 4"));
  while (three.next()) continue;
  any.load_state(three.state());
  EXPECT_EQ(any.state().num_shards, 4);
}

// A state of another kind fits nothing, wherever it is.
TEST_F(Records, AStateOfAnotherKindIsRefused) {
  const auto data = std::make_shared<TensorDataset>(at::ones({8, 1}), at::ones({8}));
  TextLoader records = make_loader(make_files(2), 0, 1, {});
  Loader samples(data, DistributedSampler(8, 0, 1), {.batch_size = 2});
  Loader evaluation(data, EvalSampler(8, 0, 1), {.batch_size = 2});
  for (int i = 0; i < 2; ++i) {
    const SamplerState of_records = records.state();
    const SamplerState of_samples = samples.state();
    const SamplerState of_evaluation = evaluation.state();
    EXPECT_TRUE(has(said([&] { samples.load_state(of_records); }), "shards in order"));
    EXPECT_TRUE(has(said([&] { samples.load_state(of_evaluation); }), "for evaluation"));
    EXPECT_TRUE(has(said([&] { records.load_state(of_samples); }), "that of a sampler"));
    EXPECT_TRUE(has(said([&] { records.load_state(of_evaluation); }), "that of a sampler"));
    EXPECT_TRUE(has(said([&] { evaluation.load_state(of_records); }), "is for evaluation"));
    evaluation.load_state(of_evaluation);
    records.next();
    samples.next();
    evaluation.next();
  }
  EXPECT_TRUE(has(said([&] { evaluation.load_state(samples.state()); }), "is for evaluation"));
  evaluation.load_state({});  // as version 0.1 has saved it
}

TEST_F(Records, AShardThatCannotBeReadIsNamedAndTriedAgain) {
  const auto files = make_files(3);
  for (const int threads : {0, 2}) {
    TextLoader loader = make_loader(files, 0, 1, {}, {.batch_size = 5, .threads = threads});
    fs::rename(folder_ + "/part1", folder_ + "/away");
    EXPECT_EQ(loader.next()->back(), "0.4");
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(has(said([&] { loader.next(); }), "/part1"));
    EXPECT_EQ(loader.state().consumed, 5);
    fs::rename(folder_ + "/away", folder_ + "/part1");
    EXPECT_EQ(loader.next()->front(), "1.0");
  }
}

// Also while others read: what comes before is handed out, and the error is where it was.
TEST_F(Records, AShardOfSeveralThatCannotBeReadIsTriedAgain) {
  const auto files = make_files(4);
  for (const int threads : {0, 2, 3}) {
    TextLoader loader =
        make_loader(files, 0, 1, {.interleave = 3}, {.batch_size = 4, .threads = threads});
    fs::rename(folder_ + "/part3", folder_ + "/away");
    Texts got;
    for (int i = 0; i < 3; ++i) {
      const auto batch = loader.next();
      got.insert(got.end(), batch->begin(), batch->end());
    }
    EXPECT_EQ(got.back(), "2.3");
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(has(said([&] { loader.next(); }), "/part3"));
    EXPECT_EQ(loader.state().consumed, 12);
    fs::rename(folder_ + "/away", folder_ + "/part3");
    EXPECT_EQ(*loader.next(), (Texts{"0.4", "1.4", "2.4", "3.0"}));
  }
}

TEST_F(Records, WhatCannotBeIsNamed) {
  const auto files = make_files(3);
  const auto make = [&](int num_ranks, const StreamOptions& options, const LoaderOptions& how) {
    return said([&] { make_loader(files, num_ranks - 1, num_ranks, options, how).next(); });
  };
  EXPECT_TRUE(has(make(4, {.by = ShardBy::kShard}, {}), "There are 3 shards for 4 ranks"));
  EXPECT_TRUE(has(make(1, {}, {.batch_size = 0}), "batch_size 0"));
  EXPECT_TRUE(has(make(1, {}, {.batch_size = 50, .drop_last = true}), "An epoch has no batch"));
  EXPECT_TRUE(has(said([] { StreamSampler(2, 2); }), "Rank 2 of 2"));
  EXPECT_TRUE(
      has(said([] { TextLoader(std::shared_ptr<RecordFiles>(), StreamSampler(0, 1), kAsIs); }),
          "no data set"));
}

// Data of the program's own, whose errors do not say where they are.
TEST_F(Records, AreOfAnyTypeAndFromAnywhere) {
  struct Counting : IterableDataset<std::pair<int, int>> {
    std::size_t num_shards() const override { return 3; }
    std::string shard_name(std::size_t shard) const override {
      return "sensor " + std::to_string(shard);
    }
    Reader open(std::size_t shard) const override {
      return
          [shard = static_cast<int>(shard), i = 0]() mutable -> std::optional<std::pair<int, int>> {
            if (shard == 2 && i == 3) throw std::runtime_error("the cable is broken\nor so");
            return i < 4 ? std::optional(std::pair(shard, i++)) : std::nullopt;
          };
    }
  };
  BasicLoader<std::vector<std::size_t>> loader(
      std::make_shared<Counting>(), StreamSampler(0, 1),
      [](const std::vector<std::pair<int, int>>& records, const BatchInfo& info) {
        for (std::size_t i = 0; i < records.size(); ++i) {
          EXPECT_EQ(info.indices[i] >> 40, static_cast<std::size_t>(records[i].first));
          EXPECT_EQ(info.indices[i] & 0xff, static_cast<std::size_t>(records[i].second));
        }
        return info.indices;
      },
      {.batch_size = 4});
  EXPECT_EQ(loader.next()->size(), 4U);
  EXPECT_EQ(loader.next()->size(), 4U);
  EXPECT_TRUE(has(said([&] { loader.next(); }),
                  "Record 3 of sensor 2 cannot be read: the cable is broken\n"));
}

TEST_F(Records, ThatCannotBeCollatedAreNamedByShardAndPlace) {
  TextLoader loader(make_files(2), StreamSampler(0, 1),
                    [](const Texts&) -> Texts { throw std::runtime_error("never"); },
                    {.batch_size = 9});
  EXPECT_TRUE(has(said([&] { loader.next(); }),
                  "The batch of records 0, 1, 2, 3, 4 of " + folder_ + "/part0, 0, 1, 2 of " +
                      folder_ + "/part1 and 1 more in epoch 0 cannot be collated: never\n"));
  EXPECT_TRUE(has(said([&] { loader.next(); }),
                  "The batch of records 4, 5 of " + folder_ + "/part1 in epoch 0 cannot"));
}

// A slow disk holds up nothing that is ready.
TEST_F(Records, BatchesAreHandedOutWhileOthersAreRead) {
  struct Slow : IterableDataset<int> {
    std::atomic<bool>* is_taken;
    std::atomic<bool>* was_late;
    std::size_t num_shards() const override { return 1; }
    std::string shard_name(std::size_t) const override { return "slow"; }
    Reader open(std::size_t) const override {
      return [this, i = 0]() mutable -> std::optional<int> {
        for (int ms = 0; i == 8 && !*is_taken && !*was_late; ++ms) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          if (ms == 5000) *was_late = true;
        }
        return i < 12 ? std::optional(i++) : std::nullopt;
      };
    }
  };
  std::atomic<bool> is_taken = false, was_late = false;
  const auto slow = std::make_shared<Slow>();
  slow->is_taken = &is_taken;
  slow->was_late = &was_late;
  BasicLoader<std::vector<int>> loader(slow, StreamSampler(0, 1),
                                       [](std::vector<int> records) { return records; },
                                       {.batch_size = 4, .threads = 2, .ahead = 4});
  EXPECT_EQ(loader.next()->front(), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(loader.next()->front(), 4);
  is_taken = true;
  EXPECT_EQ(loader.next()->front(), 8);
  EXPECT_FALSE(was_late);
}

// Where ranks may have different numbers of records, one without any goes on with the others.
TEST_F(Records, AnEpochWithoutRecordsIsEmpty) {
  const auto two = std::make_shared<RecordFiles>(Texts{write("one", "a\n"), write("none", "")});
  const auto check = [&](const StreamOptions& options, const LoaderOptions& how) {
    TextLoader loader = make_loader(two, 1, 2, options, how);
    for (int epoch = 1; epoch < 4; ++epoch) {
      EXPECT_EQ(epoch_of(loader), Texts());
      EXPECT_EQ(loader.state().epoch, epoch);
      EXPECT_EQ(loader.state().consumed, 0);
    }
  };
  check({.by = ShardBy::kShard}, {.batch_size = 4});
  check({.is_even = false}, {.batch_size = 4});
  check({.is_even = false}, {.batch_size = 4, .drop_last = true});
  // It is said once, and a program that does not wait for the others does not go on for ever.
  TextLoader endless = make_loader(two, 1, 2, {.by = ShardBy::kShard}, {.threads = 0});
  testing::internal::CaptureStderr();
  const std::string error = said([&] {
    for (int epoch = 0; epoch < 2000; ++epoch) endless.next();
  });
  const std::string output = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(has(error, "1000 epochs in a row have no batch for this rank")) << error;
  const auto first = output.find("an epoch has no batch for this rank");
  EXPECT_NE(first, std::string::npos) << output;
  EXPECT_EQ(output.find("an epoch has no batch", first + 1), std::string::npos) << output;
  // The first rank has as many as any other: none.
  const auto none = std::make_shared<RecordFiles>(Texts{write("none", "")});
  TextLoader nobody = make_loader(none, 0, 2, {.is_even = false});
  EXPECT_TRUE(has(said([&] { nobody.next(); }), "An epoch has no batch"));
  // All ranks have as many: none.
  TextLoader even = make_loader(two, 1, 2, {});
  EXPECT_TRUE(has(said([&] { even.next(); }), "An epoch has no batch"));
}

}  // namespace
}  // namespace lockstep::test
