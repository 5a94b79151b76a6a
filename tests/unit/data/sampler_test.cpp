#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <lockstep/sampler.h>
#include <torch/data.h>
#include <torch/serialize.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "data/permutation.h"
#include "support/golden.h"

namespace lockstep {
namespace {

using Indices = std::vector<std::size_t>;

Indices draw(DistributedSampler& sampler, std::size_t batch, std::size_t most = SIZE_MAX) {
  Indices all;
  while (all.size() < most) {
    const auto some = sampler.next(std::min(batch, most - all.size()));
    if (!some) break;
    all.insert(all.end(), some->begin(), some->end());
  }
  return all;
}

// The order of a whole epoch, put together from what the ranks draw.
Indices interleave(const std::vector<Indices>& ranks) {
  Indices all;
  for (std::size_t i = 0; i < ranks.front().size(); ++i) {
    for (const Indices& rank : ranks) all.push_back(rank[i]);
  }
  return all;
}

TEST(Permutation, IsOneForEverySize) {
  for (std::uint64_t size = 1; size < 300; ++size) {
    const Permutation permutation(size, 7, 3);
    std::set<std::uint64_t> seen;
    for (std::uint64_t i = 0; i < size; ++i) seen.insert(permutation(i));
    ASSERT_EQ(seen.size(), size);
    ASSERT_EQ(*seen.rbegin(), size - 1);
  }
}

// The same on every machine, compiler and library: resuming elsewhere depends on it.
TEST(Permutation, NeverChanges) {
  const Permutation small(10, 0, 0);
  Indices order;
  for (std::uint64_t i = 0; i < 10; ++i) order.push_back(small(i));
  EXPECT_EQ(order, (Indices{7, 6, 9, 0, 1, 3, 4, 5, 8, 2}));
  const Permutation large(1'000'000'000, 42, 5);
  EXPECT_EQ((Indices{large(0), large(1), large(999'999'999)}),
            (Indices{545613595, 229574661, 23514519}));
}

// Every sample comes to every place equally often, and neighbours do not stay together.
TEST(Permutation, IsEven) {
  constexpr std::uint64_t kSize = 20;
  constexpr int kEpochs = 20000;
  std::vector<std::vector<int>> counts(kSize, std::vector<int>(kSize, 0));
  int neighbours = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const Permutation permutation(kSize, 1, static_cast<std::uint64_t>(epoch));
    for (std::uint64_t i = 0; i < kSize; ++i) {
      ++counts[i][permutation(i)];
      if (i > 0 && permutation(i) == permutation(i - 1) + 1) ++neighbours;
    }
  }
  double chi2 = 0;
  const double expected = static_cast<double>(kEpochs) / kSize;
  for (const auto& row : counts) {
    for (const int count : row) chi2 += (count - expected) * (count - expected) / expected;
  }
  // 361 degrees of freedom: mean 361, standard deviation 27. Nothing here is random.
  EXPECT_LT(chi2, 361 + 6 * 27);
  // 19 of 380 ordered pairs are neighbours, in each of 19 places: 0.95 an epoch.
  EXPECT_NEAR(static_cast<double>(neighbours) / kEpochs, 0.95, 0.05);
}

TEST(Sampler, CoversEachEpochAtAnySizeAndRankCount) {
  for (const std::size_t size : {1, 2, 7, 64, 100, 1001}) {
    for (const int ranks : {1, 2, 3, 4, 7, 16}) {
      for (const bool drop_last : {false, true}) {
        if (drop_last && size < static_cast<std::size_t>(ranks)) continue;
        std::vector<Indices> drawn;
        for (int rank = 0; rank < ranks; ++rank) {
          DistributedSampler sampler(size, rank, ranks, {.seed = 3, .drop_last = drop_last});
          drawn.push_back(draw(sampler, 5));
          EXPECT_EQ(drawn.back().size(), sampler.samples_per_rank());
          EXPECT_EQ(drawn.back().size(), drawn.front().size());
        }
        const Indices all = interleave(drawn);
        std::map<std::size_t, int> counts;
        for (const std::size_t index : all) ++counts[index];
        EXPECT_LT(counts.rbegin()->first, size);
        if (drop_last) {
          EXPECT_EQ(counts.size(), all.size());
          EXPECT_GT(all.size() + static_cast<std::size_t>(ranks), size);
        } else {
          EXPECT_EQ(counts.size(), size);  // every sample is used
          EXPECT_LT(all.size(), size + static_cast<std::size_t>(ranks));
        }
      }
    }
  }
}

TEST(Sampler, EpochsAdvanceByThemselvesAndDiffer) {
  DistributedSampler sampler(100, 0, 1);
  std::set<Indices> orders;
  for (int epoch = 0; epoch < 10; ++epoch) {
    sampler.reset();
    EXPECT_EQ(sampler.epoch(), epoch);
    orders.insert(draw(sampler, 7));
    EXPECT_FALSE(sampler.next(7));
  }
  EXPECT_EQ(orders.size(), 10U);
  sampler.set_epoch(4);
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 4);
  EXPECT_TRUE(orders.contains(draw(sampler, 100)));
  DistributedSampler other(100, 0, 1, {.seed = 1});
  EXPECT_FALSE(orders.contains(draw(other, 100)));
}

// LibTorch's loader copies its sampler and draws ahead.
TEST(Sampler, WorksInLibTorchsDataLoader) {
  struct Squares : torch::data::Dataset<Squares> {
    torch::data::Example<> get(std::size_t index) override {
      const auto number = torch::full({1}, static_cast<double>(index));
      return {number, number};
    }
    std::optional<std::size_t> size() const override { return 10; }
  };
  DistributedSampler sampler(10, 1, 2);
  auto loader =
      torch::data::make_data_loader(Squares().map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions().batch_size(2).workers(2));
  std::set<std::vector<float>> orders;
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<float> order;
    for (auto& batch : *loader) {
      for (std::int64_t i = 0; i < batch.data.size(0); ++i) {
        order.push_back(batch.data[i].item<float>());
      }
    }
    EXPECT_EQ(order.size(), 5U);
    EXPECT_EQ(sampler.epoch(), epoch);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 4U);
}

// Stop anywhere, go on with any other number of ranks: no sample is lost, none comes twice.
TEST(Sampler, ResumesAtAnyPointWithAnyOtherWorldSize) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const std::size_t size = 1 + random() % 200;
    Indices all;
    SamplerState state{.seed = 9, .epoch = static_cast<std::int64_t>(random() % 5), .consumed = 0};
    while (all.size() < size) {
      const int ranks = 1 + static_cast<int>(random() % 6);
      const std::size_t stop = 1 + random() % 40;
      std::vector<Indices> drawn;
      SamplerState next;
      for (int rank = 0; rank < ranks; ++rank) {
        DistributedSampler sampler(size, rank, ranks);
        sampler.load_state(state);
        sampler.reset();
        const Indices mine = draw(sampler, 1 + random() % 8, stop);
        drawn.push_back(mine);
        next = sampler.state(mine.size());
        EXPECT_EQ(next, sampler.state());
      }
      const Indices some = interleave(drawn);
      all.insert(all.end(), some.begin(), some.end());
      state = next;
    }
    all.resize(size);  // behind this come the first ones again, to make ranks equal
    DistributedSampler whole(size, 0, 1, {.seed = 9});
    whole.set_epoch(state.epoch);
    EXPECT_EQ(all, draw(whole, 10)) << "round " << round;
    DistributedSampler after(size, 0, 1);
    after.load_state(state);
    after.reset();
    EXPECT_EQ(after.epoch(), state.epoch + 1);  // a finished epoch is not begun again
  }
}

World world_of_logical_ranks(int count) {
  return World::join({.engine = "solo",
                      .logical_ranks = count,
                      .rank = 0,
                      .size = 1,
                      .store = c10::make_intrusive<c10d::HashStore>()});
}

TEST(Sampler, LogicalRanksHaveBatchesInTurn) {
  constexpr int kRanks = 3;
  constexpr std::size_t kSamples = 50;  // 17 for each: batches of 4 leave a rest
  const World world = world_of_logical_ranks(kRanks);
  for (const int batches_per_turn : {1, 2}) {
    const SamplerOptions options = {.seed = 5, .batches_per_turn = batches_per_turn};
    DistributedSampler all(kSamples, world, options);
    std::vector<DistributedSampler> each;
    for (int rank = 0; rank < kRanks; ++rank) each.emplace_back(kSamples, rank, kRanks, options);
    for (int epoch = 0; epoch < 2; ++epoch) {
      int num_rounds = 0;
      for (bool has_more = true; has_more; num_rounds += has_more ? 1 : 0) {
        for (DistributedSampler& one : each) {
          for (int batch = 0; batch < batches_per_turn; ++batch) {
            const auto expected = one.next(4);
            has_more = expected.has_value();
            EXPECT_EQ(all.next(4), expected);
            if (!has_more) break;
          }
          if (!has_more) break;
        }
        EXPECT_EQ(all.state(), each.front().state());
      }
      EXPECT_EQ(num_rounds, batches_per_turn == 1 ? 5 : 2);  // of the fifth batch, half a turn
      all.reset();
      for (DistributedSampler& one : each) one.reset();
    }
  }
}

TEST(Sampler, ARestThatIsLeftOutIsNoEpoch) {
  const SamplerOptions options = {.batches_per_turn = 2};
  DistributedSampler sampler(22, 0, 2, options);  // 11 samples: a turn of 8, and a rest of 3
  EXPECT_EQ(draw(sampler, 4).size(), 8U);
  DistributedSampler resumed(22, 0, 2, options);
  resumed.load_state(sampler.state());
  EXPECT_EQ(resumed.next(4), std::nullopt);
  resumed.reset();
  EXPECT_EQ(resumed.epoch(), 1);
  EXPECT_EQ(draw(resumed, 4).size(), 8U);
}

TEST(Sampler, ALoaderThatDrawsAheadSaysWhatWasUsed) {
  DistributedSampler sampler(100, 0, 4);
  sampler.next(20);
  EXPECT_EQ(sampler.state(8).consumed, 32);
  EXPECT_THROW(sampler.state(26), UsageError);
}

TEST(Sampler, SavesAndLoadsInAnArchive) {
  DistributedSampler sampler(50, 0, 2, {.seed = 4});
  sampler.reset();
  draw(sampler, 5, 10);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler other(50, 0, 2);
  other.load(in);
  other.reset();
  EXPECT_EQ(other.state(), sampler.state());
  EXPECT_EQ(draw(other, 5), draw(sampler, 5));
}

TEST(Sampler, PythonsOrderIndexForIndex) {
  const auto golden = test::read_golden("kit_golden.json");
  for (const auto& one : golden.at("samplers")) {
    const bool is_shuffled = one.at("shuffle");
    for (int rank = 0; rank < one.at("ranks"); ++rank) {
      DistributedSampler sampler(
          one.at("size"), rank, one.at("ranks"),
          {.order = is_shuffled ? SampleOrder::kAsPython : SampleOrder::kSequential,
           .seed = one.at("seed"),
           .drop_last = one.at("drop_last")});
      sampler.set_epoch(one.at("epoch"));
      sampler.reset();
      const auto expected = one.at("indices")[static_cast<std::size_t>(rank)].get<Indices>();
      EXPECT_EQ(sampler.samples_per_epoch(), expected.size()) << one.dump();
      EXPECT_EQ(draw(sampler, 3), expected) << one.dump();
    }
  }
}

std::vector<std::int64_t> make_lengths(std::size_t count) {
  std::mt19937 random(3);
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < count; ++i) {
    lengths.push_back(static_cast<std::int64_t>(1 + random() % 500));
  }
  return lengths;
}

// What ranks have to pad if each step is as long as its longest sample, as a part of all.
double padded_part(const std::vector<std::int64_t>& lengths, const SamplerOptions& options) {
  constexpr std::size_t kBatch = 8;
  std::vector<DistributedSampler> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.emplace_back(lengths.size(), rank, 4, options);
  double all = 0;
  double used = 0;
  while (true) {
    std::int64_t longest = 0;
    std::int64_t sum = 0;
    std::size_t count = 0;
    for (DistributedSampler& rank : ranks) {
      const auto batch = rank.next(kBatch);
      if (!batch) return 1 - used / all;
      count += batch->size();
      for (const std::size_t index : *batch) {
        longest = std::max(longest, lengths[index]);
        sum += lengths[index];
      }
    }
    all += static_cast<double>(longest) * static_cast<double>(count);
    used += static_cast<double>(sum);
  }
}

TEST(Sampler, BucketsOfSimilarLengthPadLittle) {
  const auto lengths = make_lengths(5000);
  const SamplerOptions by_length{
      .order = SampleOrder::kByLength, .lengths = lengths, .bucket_size = 32};
  EXPECT_GT(padded_part(lengths, {}), 0.4);
  EXPECT_LT(padded_part(lengths, by_length), 0.04);
  // An epoch is a permutation, and another one than the next.
  DistributedSampler sampler(5000, 0, 1, by_length);
  std::set<Indices> orders;
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.reset();
    const Indices order = draw(sampler, 32);
    EXPECT_EQ(std::set<std::size_t>(order.begin(), order.end()).size(), 5000U);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 3U);
  // Batches do not come in the order of lengths.
  DistributedSampler one(5000, 0, 1, by_length);
  int longer = 0;
  std::int64_t before = 0;
  for (int i = 0; i < 64; ++i) {
    const std::int64_t now = lengths[one.next(32)->front()];
    longer += now > before ? 1 : 0;
    before = now;
  }
  EXPECT_GT(longer, 16);
  EXPECT_LT(longer, 48);
}

TEST(Sampler, BucketsGoOnWithAnyOtherWorldSize) {
  const SamplerOptions options{
      .order = SampleOrder::kByLength, .lengths = make_lengths(301), .bucket_size = 12};
  DistributedSampler whole(301, 0, 1, options);
  const Indices expected = draw(whole, 7);
  std::vector<Indices> drawn;
  SamplerState state;
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler sampler(301, rank, 3, options);
    drawn.push_back(draw(sampler, 4, 20));
    state = sampler.state();
  }
  Indices all = interleave(drawn);
  EXPECT_EQ(state.consumed, 60);
  DistributedSampler rest(301, 0, 1, options);
  rest.load_state(state);
  const Indices others = draw(rest, 9);
  all.insert(all.end(), others.begin(), others.end());
  EXPECT_EQ(all, expected);
}

TEST(Sampler, LengthsThatDoNotFitAreNamed) {
  const auto message = [](std::size_t size, const SamplerOptions& options) -> std::string {
    try {
      DistributedSampler(size, 0, 1, options);
    } catch (const UsageError& error) {
      return error.message();
    }
    return "nothing";
  };
  EXPECT_NE(message(3, {.order = SampleOrder::kByLength, .lengths = {1, 2}})
                .find("2 lengths for 3 samples"),
            std::string::npos);
  EXPECT_NE(message(1, {.order = SampleOrder::kByLength, .lengths = {1}, .bucket_size = 0})
                .find("buckets of 0"),
            std::string::npos);
  EXPECT_EQ(message(1, {.order = SampleOrder::kByLength, .lengths = {1}}), "nothing");
  // A size that is refused is not taken.
  DistributedSampler sampler(3, 0, 1, {.order = SampleOrder::kByLength, .lengths = {1, 2, 3}});
  EXPECT_THROW(sampler.reset(200), UsageError);
  EXPECT_EQ(sampler.num_samples(), 3U);
  sampler.reset();
  EXPECT_EQ(sampler.next(200)->size(), 3U);
}

TEST(Sampler, BadInputIsNamed) {
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const UsageError& error) {
      return error.message();
    }
    return "nothing";
  };
  EXPECT_NE(message([] { DistributedSampler(0, 0, 1); }).find("no samples"), std::string::npos);
  EXPECT_NE(
      message([] { DistributedSampler(3, 0, 4, {.drop_last = true}); }).find("3 samples for 4"),
      std::string::npos);
  EXPECT_NE(message([] { DistributedSampler(3, 4, 4); }).find("Rank 4 of 4"), std::string::npos);
  EXPECT_NE(message([] { DistributedSampler(3, 0, 1).next(0); }).find("batch"), std::string::npos);
  EXPECT_NE(message([] {
              DistributedSampler(3, 0, 1).load_state({.seed = 0, .epoch = 0, .consumed = 4});
            }).find("4 samples consumed"),
            std::string::npos);
  EXPECT_NE(message([] { EvalSampler(3, -1, 1); }).find("Rank -1"), std::string::npos);
}

TEST(EvalSampler, GivesEverySampleExactlyOnce) {
  for (const std::size_t size : {0, 1, 5, 64, 101}) {
    for (const int ranks : {1, 2, 3, 8}) {
      std::vector<int> counts(size, 0);
      for (int rank = 0; rank < ranks; ++rank) {
        EvalSampler sampler(size, rank, ranks);
        for (int pass = 0; pass < 2; ++pass) {
          sampler.reset();
          while (const auto batch = sampler.next(4)) {
            EXPECT_LE(batch->size(), 4U);
            for (const std::size_t index : *batch) ++counts[index];
          }
        }
      }
      EXPECT_TRUE(std::ranges::all_of(counts, [](int count) { return count == 2; }));
    }
  }
}

}  // namespace
}  // namespace lockstep
