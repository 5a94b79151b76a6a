// The code of docs/reproducibility.md: it compiles here, does what the page says, and is the same
// in both.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/doc_snippets.h"
#include "support/run_ranks.h"

namespace lockstep::test::docs {
namespace {

// As in a program of its own.
class Points : public lockstep::Dataset {
 public:
  std::size_t size() const override { return 96; }
  lockstep::Sample get(std::size_t index) const override {
    const auto number = static_cast<std::int64_t>(index);
    return {torch::arange(number, number + 4).to(torch::kFloat) / 100,
            torch::tensor(number % 3, torch::kLong)};
  }
};

TEST(LogicalDocs, SnippetsWork) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    auto world = lockstep::World::join({.logical_ranks = 8});
    lockstep::seed_all(42, world);
    torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::LogSoftmax(1));
    auto points = std::make_shared<Points>();
    auto loader = std::make_unique<lockstep::Loader>(
        points, lockstep::DistributedSampler(points->size(), world),
        lockstep::LoaderOptions{.batch_size = 2});
    lockstep::optim::SGD optimizer(model->parameters(), 0.1);
    lockstep::DistributedDataParallel ddp(model, world);
    for (const auto& batch : *loader) {
      const auto turn = ddp.play();  // whose batch this is: its random numbers, its buffers
      torch::nll_loss(model->forward(batch.data), batch.target).backward();
      if (!turn.is_last) continue;  // others of this rank come first
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(ddp.stats().steps, 6);  // of 96 samples, 16 a step

    const std::size_t dataset_size = points->size();
    const std::size_t batch_size = 4;
    const auto loss_of = [&](const std::vector<std::size_t>& samples) {
      return static_cast<double>(samples.front());
    };
    lockstep::TurnMean mean(world);
    const auto mine = world.logical_ranks();
    for (int player = mine.first; player < mine.first + mine.count; ++player) {
      lockstep::EvalSampler sampler(dataset_size, player, world.logical_size());
      while (const auto samples = sampler.next(batch_size)) {
        mean.add(player, loss_of(*samples), static_cast<double>(samples->size()));
      }
    }
    const double loss = mean.take();
    EXPECT_GT(loss, 0);
  })));
}

TEST(LogicalDocs, SnippetsAreThoseOfThisFile) {
  expect_snippets(LOCKSTEP_GOLDEN_DIR "/../../docs/reproducibility.md",
                  LOCKSTEP_GOLDEN_DIR "/../multiprocess/logical_docs_test.cpp", 3);
}

}  // namespace
}  // namespace lockstep::test::docs
