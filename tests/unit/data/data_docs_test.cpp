// The code of docs/data.md: it compiles here, does what the page says, and is the same in both.

#include <gtest/gtest.h>
#include <lockstep/data.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "support/doc_snippets.h"
#include "support/run_ranks.h"

namespace lockstep::test::docs {
namespace {

// As in a program of its own.
struct Sentence {
  std::string text;
  at::Tensor tokens;
};
struct Sentences {
  std::vector<std::string> texts;
  at::Tensor tokens, lengths, mask;
};

class Corpus {
 public:
  std::size_t size() const { return 1000; }
  Sentence get(std::size_t index) const {
    const auto length = static_cast<std::int64_t>(1 + index % 30);
    return {"sentence " + std::to_string(index), torch::full({length}, 7, torch::kLong)};
  }
};

Sentences collate(std::vector<Sentence> samples) {
  Sentences batch;
  std::vector<at::Tensor> tokens;
  for (Sentence& sample : samples) {
    batch.texts.push_back(std::move(sample.text));
    tokens.push_back(sample.tokens);
  }
  lockstep::Padded padded = lockstep::pad(tokens);
  batch.tokens = padded.data;
  batch.lengths = padded.lengths;
  batch.mask = padded.mask;
  return batch;
}

class Flipped : public lockstep::AugmentedDataset {
 public:
  std::size_t size() const override { return images.size(0); }
  lockstep::Sample get(std::size_t index, const lockstep::Epoch& epoch) const override {
    const at::Tensor image = images[index];
    const bool is_flipped = torch::rand({}, epoch.generator(index)).item<float>() < 0.5;
    return {is_flipped ? image.flip(-1) : image, labels[index]};
  }
  at::Tensor images = torch::rand({100, 1, 8, 8}), labels = torch::zeros({100});
};

TEST(DataDocs, SnippetsWork) {
  EXPECT_TRUE(all_passed(run_ranks(1, [](int) {
    const auto world = lockstep::World::join();
    {
      auto corpus = std::make_shared<Corpus>();
      lockstep::DistributedSampler sampler(corpus->size(), world);
      lockstep::BasicLoader<Sentences> loader(corpus, sampler, collate, {.batch_size = 32});
      for (const Sentences& batch : loader) EXPECT_EQ(batch.mask.sizes(), batch.tokens.sizes());
    }
    {
      auto corpus = std::make_shared<Corpus>();
      std::vector<std::int64_t> lengths;
      for (std::size_t i = 0; i < corpus->size(); ++i) lengths.push_back(1 + i % 30);
      const std::size_t batch_size = 32;
      lockstep::DistributedSampler sampler(corpus->size(), world,
                                           {.order = lockstep::SampleOrder::kByLength,
                                            .lengths = lengths,
                                            .bucket_size = batch_size * world.size()});
      lockstep::BasicLoader<Sentences> loader(corpus, sampler, collate, {.batch_size = batch_size});
      EXPECT_TRUE(loader.next());
    }
    {
      auto images = std::make_shared<Flipped>();
      lockstep::Loader loader(images, lockstep::DistributedSampler(images->size(), world));
      EXPECT_TRUE(loader.next());
    }
    std::string name = testing::TempDir() + "lockstep-docs-XXXXXX";
    const std::string folder = ::mkdtemp(name.data());
    const std::vector<std::string> paths = {folder + "/a.rec", folder + "/b.rec"};
    for (const std::string& path : paths) lockstep::write_records(path, {"one", "two", "three"});
    {
      auto files =
          std::make_shared<lockstep::RecordFiles>(paths, world, lockstep::RecordFormat::kSized);
      lockstep::BasicLoader<Sentences> loader(
          files, lockstep::StreamSampler(world, {.shuffle = 10000}),
          [](const std::vector<std::string>& records) {
            std::vector<Sentence> samples;
            for (const std::string& text : records) {
              const auto length = static_cast<std::int64_t>(text.size());
              samples.push_back({text, torch::full({length}, 7, torch::kLong)});
            }
            return collate(std::move(samples));
          },
          {.batch_size = 4});
      EXPECT_EQ(loader.next()->texts.size(), 4U);
    }
    std::filesystem::remove_all(folder);
  })));
}

TEST(DataDocs, SnippetsAreThoseOfThisFile) {
  expect_snippets(LOCKSTEP_GOLDEN_DIR "/../../docs/data.md",
                  LOCKSTEP_GOLDEN_DIR "/../unit/data/data_docs_test.cpp", 5);
}

}  // namespace
}  // namespace lockstep::test::docs
