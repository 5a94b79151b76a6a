#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/data.h>
#include <lockstep/error.h>
#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  Files() {
    std::string name = testing::TempDir() + "lockstep-data-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~Files() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  std::string write_gz(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ + "/" + name;
    gzFile file = ::gzopen(path.c_str(), "wb");
    ::gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    ::gzclose(file);
    return path;
  }

  std::string folder_;
};

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was refused";
}

using namespace std::string_literals;
const std::string kBytes = "\0\0\x08\x02\0\0\0\x02\0\0\0\x03\x01\x02\x03\x04\x05\x06"s;

TEST_F(Files, IdxIsReadPackedOrNot) {
  const at::Tensor expected = at::arange(1, 7, at::TensorOptions(at::kByte)).view({2, 3});
  EXPECT_TRUE(at::equal(read_idx(write("plain", kBytes)), expected));
  EXPECT_TRUE(at::equal(read_idx(write_gz("packed.gz", kBytes)), expected));
  const std::string shorts = "\0\0\x0B\x01\0\0\0\x02\x01\x02\xFF\xFE"s;
  EXPECT_TRUE(at::equal(read_idx(write("shorts", shorts)),
                        at::tensor({258, -2}, at::TensorOptions(at::kShort))));
  const std::string floats = "\0\0\x0D\x01\0\0\0\x01\x3F\xC0\0\0"s;
  EXPECT_TRUE(at::equal(read_idx(write("floats", floats)), at::tensor({1.5F})));
}

TEST_F(Files, ABadIdxFileIsNamedWithTheReason) {
  EXPECT_TRUE(has(refusal([&] { read_idx(folder_ + "/none"); }), "/none"));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not in the IDX format"},
      {"hello world", "not in the IDX format"},
      {"\0\0\x07\x01\0\0\0\x01x"s, "no type 0x7"},
      {kBytes.substr(0, 10), "ends in its header"},
      {kBytes.substr(0, kBytes.size() - 2), "is truncated: it has 4 bytes of 6"},
      {kBytes + "x", "goes on behind its 6 bytes"},
      {"\0\0\x08\x03\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFFx"s, "larger than memory"},
      {"\0\0\x08\x02\0\xFF\xFF\xFF\0\xFF\xFF\xFFx"s, "is truncated"}};
  for (const auto& [bytes, part] : cases) {
    const std::string path = write("bad", bytes);
    EXPECT_TRUE(has(refusal([&] { read_idx(path); }), part)) << part;
    EXPECT_TRUE(has(refusal([&] { read_idx(path); }), "/bad")) << part;
  }
  // A packed file that was cut.
  const std::string whole = write_gz("whole.gz", kBytes + std::string(5000, 'x'));
  fs::resize_file(whole, fs::file_size(whole) - 5);
  EXPECT_NE(refusal([&] { read_idx(whole); }), "nothing was refused");
}

TEST_F(Files, TensorsAreMapped) {
  const std::string path = write("numbers", "....abcdefgh");
  at::Tensor mapped = map_tensor(path, at::kByte, {2, 4}, 4);
  EXPECT_EQ(mapped[1][0].item<int>(), 'e');
  mapped[1][0] = 0;  // private
  EXPECT_EQ(map_tensor(path, at::kByte, {12})[8].item<int>(), 'e');
  EXPECT_EQ(map_tensor(path, at::kFloat, {2}, 4).numel(), 2);
  EXPECT_EQ(map_tensor(path, at::kFloat, {0, 5}).numel(), 0);
  EXPECT_TRUE(has(refusal([&] { map_tensor(path, at::kFloat, {4}); }), "16 bytes"));
  EXPECT_TRUE(has(refusal([&] { map_tensor(path, at::kFloat, {1}, 2); }), "byte 2"));
  EXPECT_TRUE(has(refusal([&] { map_tensor(path, at::kByte, {1}, 99); }), "byte 99"));
  EXPECT_TRUE(has(refusal([&] { map_tensor(path, at::kByte, {-1}); }), "sizes"));
  EXPECT_TRUE(has(refusal([&] { map_tensor(path, at::kByte, {INT64_MAX, INT64_MAX}); }), "sizes"));
  EXPECT_TRUE(has(refusal([&] { map_tensor(folder_, at::kByte, {1}); }), "is not a file"));
}

TEST_F(Files, ATextIsASequenceOfTokens) {
  const TextFile text(write("text", "abcabcabd"), 4);
  EXPECT_EQ(text.vocabulary(), "abcd");
  EXPECT_EQ(text.size(), 2U);
  EXPECT_EQ(text.decode(text.get(0).data), "abca");
  EXPECT_EQ(text.decode(text.get(0).target), "bcab");
  EXPECT_EQ(text.decode(text.get(1).data), "bcab");
  EXPECT_EQ(text.decode(text.get(1).target), "cabd");
  EXPECT_TRUE(has(refusal([&] { text.get(2); }), "Sample 2"));
  EXPECT_TRUE(has(refusal([&] { text.decode(at::tensor({9})); }), "token 9"));
  EXPECT_TRUE(has(refusal([&] { TextFile(write("short", "abcd"), 4); }), "has 4 characters"));
  EXPECT_TRUE(has(refusal([&] { TextFile(folder_ + "/none", 4); }), "/none"));
}

TEST(FashionMnist, IsThere) {
  const FashionMnist test(false);
  EXPECT_EQ(test.size(), 10000U);
  EXPECT_EQ(test.data().sizes(), (std::vector<std::int64_t>{10000, 1, 28, 28}));
  EXPECT_NEAR(test.data().mean().item<float>(), 0, 0.02);
  EXPECT_NEAR(test.data().std().item<float>(), 1, 0.02);
  EXPECT_EQ(at::bincount(test.targets()).min().item<std::int64_t>(), 1000);
}

// Takes different times, so that threads would mix the order up.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::size_t size, std::size_t bad = SIZE_MAX) : size_(size), bad_(bad) {}
  std::size_t size() const override { return size_; }
  Sample get(std::size_t index) const override {
    std::this_thread::sleep_for(std::chrono::microseconds(index * 7919 % 300));
    if (index == bad_) throw std::runtime_error("the disk is broken\nand more");
    const auto number = at::full({2}, static_cast<double>(index));
    return {number, number.sum()};
  }

 private:
  std::size_t size_;
  std::size_t bad_;
};

std::vector<std::vector<std::size_t>> epoch_of(Loader& loader) {
  std::vector<std::vector<std::size_t>> batches;
  for (const Batch& batch : loader) {
    batches.push_back(batch.indices);
    for (std::size_t i = 0; i < batch.indices.size(); ++i) {
      EXPECT_EQ(batch.data[static_cast<std::int64_t>(i)][1].item<double>(),
                static_cast<double>(batch.indices[i]));
    }
  }
  return batches;
}

TEST(Loader, TheOrderDoesNotDependOnThreads) {
  const auto dataset = std::make_shared<Numbers>(101);
  std::vector<std::vector<std::vector<std::size_t>>> epochs;
  for (const int threads : {0, 1, 2, 5}) {
    for (const int ahead : {1, 3}) {
      Loader loader(dataset, DistributedSampler(101, 1, 2, {.seed = 2}),
                    {.batch_size = 7, .threads = threads, .ahead = ahead});
      for (std::size_t epoch = 0; epoch < 2; ++epoch) {
        auto batches = epoch_of(loader);
        EXPECT_EQ(batches.size(), 8U);
        EXPECT_EQ(batches.back().size(), 2U);
        if (epochs.size() <= epoch) epochs.push_back(batches);
        EXPECT_EQ(batches, epochs[epoch]) << threads << " threads, " << ahead << " ahead";
      }
    }
  }
  EXPECT_NE(epochs[0], epochs[1]);
}

TEST(Loader, EvaluationSeesEverySampleOnce) {
  std::vector<int> counts(23, 0);
  for (int rank = 0; rank < 3; ++rank) {
    Loader loader(std::make_shared<Numbers>(23), EvalSampler(23, rank, 3),
                  {.batch_size = 4, .threads = 2});
    for (const auto& batch : epoch_of(loader)) {
      for (const std::size_t index : batch) ++counts[index];
    }
  }
  EXPECT_EQ(counts, std::vector<int>(23, 1));
}

TEST(Loader, ABadSampleIsNamedAndTheRestGoesOn) {
  for (const int threads : {0, 3}) {
    Loader loader(std::make_shared<Numbers>(40, 17),
                  DistributedSampler(40, 0, 1, {.order = SampleOrder::kSequential}),
                  {.batch_size = 4, .threads = threads});
    int good = 0;
    std::string said;
    while (true) {
      try {
        if (!loader.next()) break;
        ++good;
      } catch (const UsageError& error) {
        said = error.message();
        EXPECT_EQ(good, 4);  // where the batch would have been
      }
    }
    EXPECT_EQ(good, 9);
    EXPECT_TRUE(has(said, "Sample 17 cannot be had: the disk is broken\n")) << said;
  }
}

TEST(Loader, AResumeDoesNotRepeatABadBatch) {
  const auto dataset = std::make_shared<Numbers>(40, 17);
  const auto make = [&] {
    return Loader(dataset, DistributedSampler(40, 0, 1, {.order = SampleOrder::kSequential}),
                  {.batch_size = 4});
  };
  Loader first = make();
  for (int i = 0; i < 4; ++i) first.next();
  EXPECT_THROW(first.next(), UsageError);
  Loader second = make();
  second.load_state(first.state());
  EXPECT_EQ(second.next()->indices.front(), 20);
}

// What is left of an epoch may be less than a batch.
TEST(Loader, MayBeMadeAtTheEndOfAnEpoch) {
  const auto dataset = std::make_shared<Numbers>(10);
  DistributedSampler sampler(10, 0, 1);
  sampler.load_state({.seed = 0, .epoch = 1, .consumed = 8});
  Loader loader(dataset, sampler, {.batch_size = 4});
  EXPECT_EQ(loader.next()->indices.size(), 2);
  EXPECT_TRUE(has(refusal([&] { Loader(dataset, EvalSampler(11, 0, 1)); }), "draws from 11"));
}

TEST(Loader, SamplesThatDifferAreNamed) {
  class Ragged : public Dataset {
    std::size_t size() const override { return 4; }
    Sample get(std::size_t index) const override {
      return {at::zeros({index == 2 ? 3 : 2}), at::zeros({})};
    }
  };
  Loader loader(std::make_shared<Ragged>(),
                DistributedSampler(4, 0, 1, {.order = SampleOrder::kSequential}),
                {.batch_size = 4});
  EXPECT_TRUE(
      has(refusal([&] { loader.next(); }),
          "The data of sample 2 is Float [3], that of sample 0 in the same batch Float [2]"));
}

// What is prepared is not what was used.
TEST(Loader, ResumesAfterWhatWasHandedOut) {
  const auto dataset = std::make_shared<Numbers>(50);
  const auto make = [&] {
    return Loader(dataset, DistributedSampler(50, 0, 1),
                  {.batch_size = 5, .threads = 2, .ahead = 4});
  };
  Loader whole = make();
  const auto expected = epoch_of(whole);
  Loader first = make();
  std::vector<std::vector<std::size_t>> got;
  for (int i = 0; i < 3; ++i) got.push_back(first.next()->indices);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const SamplerState state = first.state();
  EXPECT_EQ(state.consumed, 15);
  Loader second = make();
  second.load_state(state);
  for (const Batch& batch : second) got.push_back(batch.indices);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(second.state().consumed, 50);
}

// Threads that draw ahead for an epoch that was left do not touch the one that is set.
TEST(Loader, AnEpochThatIsSetAfterABreakIsTheNextOne) {
  for (int round = 0; round < 10; ++round) {
    DistributedSampler sampler(100, 0, 1);
    Loader loader(std::make_shared<Numbers>(100), sampler,
                  {.batch_size = 3, .threads = 3, .ahead = 5});
    for (const Batch& batch : loader) {
      if (batch.indices.size() == 3) break;
    }
    sampler.set_epoch(7);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::vector<std::size_t> first;
    for (const Batch& batch : loader) {
      if (first.empty()) sampler.set_epoch(9);  // does not disturb the one that has begun
      first.insert(first.end(), batch.indices.begin(), batch.indices.end());
    }
    EXPECT_EQ(loader.state().epoch, 9);
    DistributedSampler expected(100, 0, 1);
    expected.set_epoch(7);
    EXPECT_EQ(first, *expected.next(100)) << round;
    EXPECT_EQ(loader.next()->indices, (expected.set_epoch(9), *expected.next(3)));
  }
}

#ifndef LOCKSTEP_SANITIZED  // it reserves more memory than the limit
TEST(Loader, ThreadsThatCannotBeStartedAreAnError) {
  EXPECT_TRUE(all_passed(run_ranks(1, [](int) {
    Loader loader(std::make_shared<Numbers>(100), DistributedSampler(100, 0, 1),
                  {.batch_size = 3, .threads = 64});
    long num_pages = 0;
    std::ifstream("/proc/self/statm") >> num_pages;
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
    rlimit limit = before;  // the stacks of a few threads fit
    limit.rlim_cur = static_cast<rlim_t>(num_pages * ::sysconf(_SC_PAGESIZE) + (40L << 20));
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    const std::string text = refusal([&] { loader.next(); });
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
    EXPECT_TRUE(has(text, "Of 64 threads of a loader")) << text;
    EXPECT_FALSE(has(text, "loader 0 could be started")) << text;
    EXPECT_EQ(loader.next()->indices.size(), 3U);
  })));
}
#endif

TEST(Loader, MayBeLeftInTheMiddle) {
  for (int round = 0; round < 20; ++round) {
    Loader loader(std::make_shared<Numbers>(100), DistributedSampler(100, 0, 1),
                  {.batch_size = 3, .threads = 3, .ahead = 5});
    for (const Batch& batch : loader) {
      if (batch.indices.front() % 3 == 0) break;
    }
    EXPECT_GE(loader.waiting_ms(), 0);
  }
}

TEST(Loader, BadOptionsAreNamed) {
  const auto dataset = std::make_shared<Numbers>(10);
  const auto make = [&](const LoaderOptions& options) {
    return refusal([&] { Loader(dataset, DistributedSampler(10, 0, 2), options); });
  };
  EXPECT_TRUE(has(make({.batch_size = 0}), "batch_size 0"));
  EXPECT_TRUE(has(make({.batch_size = 6}), "A batch has 6 samples, but this rank has only 5"));
  EXPECT_TRUE(has(make({.batch_size = 1, .threads = -1}), "threads -1"));
  EXPECT_TRUE(has(refusal([&] { Loader(dataset, DistributedSampler(11, 0, 1)); }), "from 11"));
  EXPECT_TRUE(has(refusal([&] { Loader(nullptr, DistributedSampler(11, 0, 1)); }), "no data set"));
  EXPECT_TRUE(has(refusal([] { TensorDataset(at::zeros({3}), at::zeros({4})); }), "[3]"));
}

}  // namespace
}  // namespace lockstep::test
