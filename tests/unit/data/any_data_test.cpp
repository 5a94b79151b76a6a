// Samples and batches of a program's own types, augmentation, LibTorch's data sets, devices.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <lockstep/data.h>
#include <lockstep/error.h>
#include <torch/data.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "support/has.h"

namespace lockstep::test {
namespace {

template <typename Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was refused";
}

const SamplerOptions kInOrder{.order = SampleOrder::kSequential};

struct Sentence {
  std::string text;
  at::Tensor tokens;
};
// Takes different times, so that threads would mix the order up.
struct Corpus {
  std::size_t num_sentences;
  std::size_t size() const { return num_sentences; }
  Sentence get(std::size_t index) const {
    std::this_thread::sleep_for(std::chrono::microseconds(index * 7919 % 300));
    if (index == 31) throw std::runtime_error("no such sentence\nand more");
    const auto length = static_cast<std::int64_t>(1 + index % 5);
    return {"text " + std::to_string(index),
            at::full({length}, static_cast<std::int64_t>(index), at::TensorOptions(at::kLong))};
  }
};
struct Sentences {
  std::vector<std::string> texts;
  Padded tokens;
  std::unique_ptr<int> only_moved = {};
  void each_tensor(const std::function<void(at::Tensor&)>& visit) {
    for (at::Tensor* one : {&tokens.data, &tokens.lengths, &tokens.mask}) visit(*one);
  }
};
Sentences collate(std::vector<Sentence> samples) {
  Sentences batch;
  std::vector<at::Tensor> tokens;
  for (Sentence& one : samples) {
    if (one.text == "text 22") throw std::runtime_error("22 does not fit\nat all");
    batch.texts.push_back(std::move(one.text));
    tokens.push_back(one.tokens);
  }
  batch.tokens = pad(tokens, -1);
  return batch;
}

TEST(AnyData, BatchesOfOwnTypesDoNotDependOnThreads) {
  std::vector<std::vector<std::string>> expected;
  for (const int threads : {0, 1, 4}) {
    BasicLoader<Sentences> loader(std::make_shared<Corpus>(Corpus{20}),
                                  DistributedSampler(20, 0, 1), collate,
                                  {.batch_size = 6, .threads = threads});
    std::vector<std::vector<std::string>> got;
    for (const Sentences& batch : loader) {
      got.push_back(batch.texts);
      EXPECT_EQ(batch.tokens.lengths.size(0), static_cast<std::int64_t>(batch.texts.size()));
      EXPECT_EQ(batch.tokens.mask.sum().item<std::int64_t>(),
                batch.tokens.lengths.sum().item<std::int64_t>());
      EXPECT_TRUE(at::equal(batch.tokens.data.ge(0), batch.tokens.mask));
    }
    ASSERT_EQ(got.size(), 4U);
    if (expected.empty()) expected = got;
    EXPECT_EQ(got, expected) << threads;
  }
}

TEST(AnyData, WhatCannotBeCollatedIsNamedAndTheRestGoesOn) {
  for (const int threads : {0, 2}) {
    BasicLoader<Sentences> loader(std::make_shared<Corpus>(Corpus{40}),
                                  DistributedSampler(40, 0, 1, kInOrder), collate,
                                  {.batch_size = 10, .threads = threads});
    EXPECT_EQ(loader.next()->texts.front(), "text 0");
    EXPECT_EQ(loader.next()->texts.front(), "text 10");
    EXPECT_TRUE(has(refused([&] { loader.next(); }),
                    "The batch of samples 20, 21, 22, 23, 24, 25, 26, 27 and 2 more in epoch 0 "
                    "cannot be collated: 22 does not fit\n"));
    EXPECT_TRUE(
        has(refused([&] { loader.next(); }), "Sample 31 cannot be had: no such sentence\n"));
    EXPECT_FALSE(loader.next());
    EXPECT_EQ(loader.state().consumed, 40);
  }
}

TEST(AnyData, PadSaysWhatDoesNotFit) {
  EXPECT_TRUE(has(refused([] { pad({}); }), "no sequences"));
  EXPECT_TRUE(has(refused([] {
                    pad({at::zeros({2, 3}), at::zeros({4, 2})});
                  }),
                  "Sequence 1 is Float [4, 2], the first one is Float [2, 3]"));
  EXPECT_TRUE(has(refused([] { pad({at::zeros({2}), at::Tensor()}); }), "Sequence 1 is nothing"));
  EXPECT_TRUE(has(refused([] { pad({at::zeros({})}); }), "Sequence 0"));
  EXPECT_TRUE(has(refused([] { pad({at::Tensor()}); }), "Sequence 0 is nothing"));
  const Padded two = pad({at::ones({0, 2}), at::ones({3, 2})}, 7);
  EXPECT_EQ(two.data.sizes(), (std::vector<std::int64_t>{2, 3, 2}));
  EXPECT_TRUE(two.data[0].eq(7).all().item<bool>());
  EXPECT_TRUE(two.data[1].eq(1).all().item<bool>());
}

TEST(AnyData, ACollateFunctionMaySeeEpochAndIndices) {
  using Info = std::pair<std::int64_t, std::vector<std::size_t>>;
  BasicLoader<Info> loader(std::make_shared<Corpus>(Corpus{6}),
                           DistributedSampler(6, 0, 1, kInOrder),
                           [](const std::vector<Sentence>&, const BatchInfo& info) {
                             return Info(info.epoch.number, info.indices);
                           },
                           {.batch_size = 4});
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    EXPECT_EQ(*loader.next(), Info(epoch, {0, 1, 2, 3}));
    EXPECT_EQ(*loader.next(), Info(epoch, {4, 5}));
    EXPECT_FALSE(loader.next());
  }
}

// Samples with a random number of their own.
class Noisy : public AugmentedDataset {
 public:
  using AugmentedDataset::get;
  std::size_t size() const override { return 24; }
  Sample get(std::size_t index, const Epoch& epoch) const override {
    return {at::rand({3}, epoch.generator(index)), at::full({}, static_cast<double>(index))};
  }
};

using Noise = std::map<std::pair<std::int64_t, std::size_t>, std::vector<float>>;

void add_to(Noise& noise, const Batch& batch, std::int64_t epoch) {
  for (std::size_t i = 0; i < batch.indices.size(); ++i) {
    const at::Tensor row = batch.data[static_cast<std::int64_t>(i)].contiguous();
    const auto* const first = row.const_data_ptr<float>();
    const auto [at, is_new] =
        noise.try_emplace({epoch, batch.indices[i]}, std::vector<float>(first, first + 3));
    EXPECT_EQ(at->second, std::vector<float>(first, first + 3));
  }
}

Noise noise_of(int num_ranks, int threads) {
  Noise noise;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::shared_ptr<const Dataset> data = std::make_shared<Noisy>();  // the type is forgotten
    Loader loader(data, DistributedSampler(24, rank, num_ranks, {.seed = 5}),
                  {.batch_size = 5, .threads = threads});
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      for (const Batch& batch : loader) add_to(noise, batch, epoch);
    }
  }
  return noise;
}

TEST(AnyData, AugmentationFollowsFromIndexAndEpochAlone) {
  const Noise one = noise_of(1, 0);
  EXPECT_EQ(one.size(), 3U * 24);
  std::set<std::vector<float>> different;
  for (const auto& [key, value] : one) different.insert(value);
  EXPECT_EQ(different.size(), one.size());  // between samples and between epochs
  for (const int num_ranks : {1, 2, 3}) {
    for (const int threads : {1, 3}) EXPECT_EQ(noise_of(num_ranks, threads), one);
  }
}

TEST(AnyData, AugmentationGoesOnExactlyAfterAResume) {
  const Noise whole = noise_of(1, 0);
  const auto make = [](int rank, int num_ranks) {
    return Loader(std::make_shared<Noisy>(), DistributedSampler(24, rank, num_ranks, {.seed = 5}),
                  {.batch_size = 5, .threads = 2});
  };
  Loader first = make(0, 1);
  Noise noise;
  for (int i = 0; i < 7; ++i) {  // 5 in the first epoch, its end, 1 in the second
    if (const auto batch = first.next()) add_to(noise, *batch, first.state().epoch);
  }
  EXPECT_EQ(first.state().epoch, 1);
  for (int rank = 0; rank < 2; ++rank) {
    Loader second = make(rank, 2);
    second.load_state(first.state());
    for (std::int64_t epoch = 1; epoch < 3; ++epoch) {
      for (const Batch& batch : second) add_to(noise, batch, epoch);
    }
  }
  EXPECT_EQ(noise, whole);
}

// A collate function of one's own, and a pointer that has forgotten the type.
TEST(AnyData, AugmentationIsNotLostBehindABaseClass) {
  const std::shared_ptr<const Dataset> data = std::make_shared<Noisy>();
  BasicLoader<std::vector<at::Tensor>> loader(
      data, DistributedSampler(24, 0, 1, kInOrder),
      [](const std::vector<Sample>& samples) {
        return std::vector<at::Tensor>{samples.front().data};
      },
      {.batch_size = 24});
  const at::Tensor first = loader.next()->front();
  EXPECT_FALSE(loader.next());
  EXPECT_FALSE(at::equal(first, loader.next()->front()));
}

// Resuming elsewhere depends on it.
TEST(AnyData, SeedsNeverChange) {
  const Epoch epoch{.number = 3, .seed = 7};
  EXPECT_EQ(epoch.seed_of(0), 6878802597506052319U);
  EXPECT_EQ(epoch.seed_of(1'000'000'000'000), 4753356977253304515U);
  EXPECT_NE(epoch.seed_of(1), (Epoch{.number = 4, .seed = 7}.seed_of(1)));
  EXPECT_NE(epoch.seed_of(1), (Epoch{.number = 3, .seed = 8}.seed_of(1)));
}

TEST(AnyData, TheLastBatchIsDroppedIfAsked) {
  const auto data = std::make_shared<TensorDataset>(at::arange(23), at::arange(23));
  const auto make = [&] {
    return Loader(data, DistributedSampler(23, 0, 2), {.batch_size = 5, .drop_last = true});
  };
  Loader loader = make();
  for (int epoch = 0; epoch < 2; ++epoch) {
    int count = 0;
    for (const Batch& batch : loader) {
      EXPECT_EQ(batch.indices.size(), 5U);
      ++count;
    }
    EXPECT_EQ(count, 2);  // 12 samples on each rank
    EXPECT_EQ(loader.state().epoch, epoch);
  }
  // After a resume what would be dropped is not an epoch of its own.
  Loader again = make();
  again.load_state(loader.state());
  EXPECT_EQ(again.next()->indices.size(), 5U);
  EXPECT_EQ(again.state().epoch, 2);
}

// With turns of several batches: half a turn is not begun.
TEST(AnyData, ATurnIsDroppedWhole) {
  const auto data = std::make_shared<TensorDataset>(at::arange(26), at::arange(26));
  for (const bool drops_last : {false, true}) {
    const auto make = [&] {
      return Loader(data, DistributedSampler(26, 0, 2, {.batches_per_turn = 2}),
                    {.batch_size = 4, .drop_last = drops_last});
    };
    Loader loader = make();
    std::vector<std::size_t> sizes;
    for (const Batch& batch : loader) sizes.push_back(batch.indices.size());
    using Sizes = std::vector<std::size_t>;  // of 13 samples
    EXPECT_EQ(sizes, drops_last ? (Sizes{4, 4}) : (Sizes{4, 4, 4, 1}));
    Loader again = make();
    again.load_state(loader.state());
    EXPECT_EQ(again.next()->indices.size(), 4U);
    EXPECT_EQ(again.state().epoch, 1);
  }
}

struct Squares : torch::data::Dataset<Squares> {
  torch::data::Example<> get(std::size_t index) override {
    if (index == 9) throw std::runtime_error("nine is missing");
    const auto number = torch::full({1}, static_cast<double>(index));
    return {number, number * number};
  }
  std::optional<std::size_t> size() const override { return 10; }
};

TEST(AnyData, LibTorchsDataSetsAreLoaded) {
  const auto check = [](const auto& data) {
    Loader loader(data, DistributedSampler(10, 0, 1, kInOrder), {.batch_size = 3, .threads = 2});
    for (std::size_t i = 0; i < 9; i += 3) {
      const auto batch = loader.next();
      EXPECT_EQ(batch->indices, (std::vector<std::size_t>{i, i + 1, i + 2}));
      EXPECT_EQ(batch->data.sizes(), (std::vector<std::int64_t>{3, 1}));
      EXPECT_TRUE(at::equal(batch->data * batch->data, batch->target));
    }
    EXPECT_TRUE(has(refused([&] { loader.next(); }),
                    "The batch of samples 9 in epoch 0 cannot be collated: nine is missing\n"));
  };
  check(from_torch(Squares()));
  check(from_torch(Squares().map(torch::data::transforms::Stack<>())));
}

// Threads do not share LibTorch's data set, whose get() is not const.
TEST(AnyData, EachThreadHasACopyOfLibTorchsDataSet) {
  struct Busy : torch::data::Dataset<Busy, int> {
    int uses = 0;
    int get(std::size_t index) override {
      EXPECT_EQ(++uses, 1);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      --uses;
      return static_cast<int>(index);
    }
    std::optional<std::size_t> size() const override { return 64; }
  };
  BasicLoader<std::vector<int>> loader(from_torch(Busy()), DistributedSampler(64, 0, 1, kInOrder),
                                       {.batch_size = 4, .threads = 4});
  int count = 0;
  for (const std::vector<int>& batch : loader) {
    EXPECT_EQ(batch.front(), count);
    count += 4;
  }
  EXPECT_EQ(count, 64);
}

// The only device besides the CPU that is everywhere. On real ones memory is pinned first.
TEST(AnyData, BatchesGoToADevice) {
  const auto data = std::make_shared<TensorDataset>(at::ones({8, 2}), at::ones({8}));
  for (const c10::DeviceType type : {at::kMeta, at::kCPU}) {
    Loader loader(data, DistributedSampler(8, 0, 1), {.batch_size = 4, .device = type});
    for (const Batch& batch : loader) {
      EXPECT_EQ(batch.data.device().type(), type);
      EXPECT_EQ(batch.target.device().type(), type);
    }
  }
  BasicLoader<Sentences> own(std::make_shared<Corpus>(Corpus{8}), DistributedSampler(8, 0, 1),
                             collate, {.batch_size = 4, .device = at::kMeta});
  EXPECT_TRUE(own.next()->tokens.mask.is_meta());
}

TEST(AnyData, ADeviceThatCannotBeUsedIsNamed) {
  const auto data = std::make_shared<TensorDataset>(at::ones({8, 2}), at::ones({8}));
  const DistributedSampler sampler(8, 0, 1);
  const c10::Device none(at::kXLA, 3);
  EXPECT_TRUE(has(refused([&] { Loader(data, sampler, {.batch_size = 4, .device = none}); }),
                  "Batches are to go to xla:3, which cannot be used here: "));
  const auto make_texts = [](const std::vector<Sentence>&) { return std::string(); };
  EXPECT_TRUE(has(refused([&] {
                    BasicLoader<std::string>(std::make_shared<Corpus>(Corpus{8}), sampler,
                                             make_texts, {.batch_size = 4, .device = at::kMeta});
                  }),
                  "does not know their tensors"));
}

// A data set that makes batches itself, and fails in its own way.
TEST(AnyData, WhatCannotBeLoadedIsNamed) {
  struct Lists {
    std::size_t size() const { return 6; }
    std::vector<std::size_t> load(const BatchInfo& info) const {
      if (info.indices.front() == 2) throw std::runtime_error("the disk is full\nof it");
      if (info.indices.front() == 4)
        throw UsageError({.operation = "mine"}, "Four is bad.\nFix it.");
      return info.indices;
    }
  };
  struct Tensors : TensorDataset {
    using TensorDataset::TensorDataset;
    Batch get_batch(const std::vector<std::size_t>& indices) const override {
      if (indices.front() == 2) throw std::runtime_error("the disk is full\nof it");
      return TensorDataset::get_batch(indices);
    }
  };
  // One for each loader: copies share their epoch.
  const auto sampler = [] { return DistributedSampler(6, 0, 1, kInOrder); };
  for (const int threads : {0, 2}) {
    const LoaderOptions how{.batch_size = 2, .threads = threads};
    BasicLoader<std::vector<std::size_t>> lists(std::make_shared<Lists>(), sampler(), how);
    EXPECT_EQ(lists.next()->size(), 2U);
    EXPECT_TRUE(has(refused([&] { lists.next(); }),
                    "The batch of samples 2, 3 in epoch 0 cannot be loaded: the disk is full\n"));
    EXPECT_EQ(refused([&] { lists.next(); }), "Four is bad.\nFix it.");
    EXPECT_FALSE(lists.next());
    Loader tensors(std::make_shared<Tensors>(at::ones({6, 1}), at::ones({6})), sampler(), how);
    tensors.next();
    EXPECT_TRUE(has(refused([&] { tensors.next(); }), "samples 2, 3 in epoch 0 cannot be loaded"));
  }
}

// Without threads of its own a loader runs the data set in the caller's, and in none of its modes.
TEST(AnyData, BatchesDoNotDependOnTheModesOfTheCaller) {
  struct Products : Dataset {
    std::size_t size() const override { return 4; }
    Sample get(std::size_t) const override {
      EXPECT_FALSE(at::GradMode::is_enabled());
      return {at::mm(at::ones({2, 2}), at::full({2, 2}, 1.001)), at::ones({})};
    }
  };
  const auto first_of = [](int threads) {
    Loader loader(std::make_shared<Products>(), DistributedSampler(4, 0, 1),
                  {.batch_size = 2, .threads = threads});
    return loader.next()->data;
  };
  const at::Tensor expected = first_of(1);
  {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto off =
        c10::make_scope_exit([] { at::autocast::set_autocast_enabled(at::kCPU, false); });
    ASSERT_EQ(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(), at::kBFloat16);
    for (const int threads : {0, 1}) {
      const at::Tensor got = first_of(threads);
      EXPECT_EQ(got.scalar_type(), at::kFloat) << threads;
      EXPECT_TRUE(at::equal(got, expected)) << threads;
    }
    EXPECT_EQ(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(), at::kBFloat16);
  }
  const c10::InferenceMode inference;
  for (const int threads : {0, 1}) {
    const at::Tensor got = first_of(threads);
    EXPECT_FALSE(got.is_inference()) << threads;
    EXPECT_TRUE(at::equal(got, expected)) << threads;
  }
  EXPECT_TRUE(c10::InferenceMode::is_enabled());
}

// LibTorch's generators look at 32 bits of a seed.
TEST(AnyData, GeneratorsDifferByAllBitsOfTheSeed) {
  const Epoch epoch{.number = 0, .seed = 1};
  std::map<std::uint32_t, std::size_t> seen;
  int num_alike = 0;
  for (std::size_t index = 0; index < 400'000; ++index) {
    const auto [at, is_new] = seen.emplace(static_cast<std::uint32_t>(epoch.seed_of(index)), index);
    if (is_new) continue;
    ++num_alike;
    EXPECT_FALSE(at::equal(at::rand({4}, epoch.generator(index)),
                           at::rand({4}, epoch.generator(at->second))))
        << index << " " << at->second;
  }
  EXPECT_GT(num_alike, 0);
  const at::Tensor many = at::rand({100'000}, epoch.generator(0));
  EXPECT_NEAR(many.mean().item<double>(), 0.5, 0.005);
  EXPECT_NEAR(many.var().item<double>(), 1.0 / 12, 0.002);
}

}  // namespace
}  // namespace lockstep::test
