// Checkpoints of slices on the late device, and wrapping again: states are put together and cut
// anew.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include "multiprocess/late_sharded.h"
#include "multiprocess/sharded_saves.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/on_late_device.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

class LateShardedSaves : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, LateShardedSaves,
                         testing::Values("AdamW", "TiedAndFrozen", "Masters"),
                         [](const auto& test) { return test.param; });

// From one world and mode to the next, beside the same without sharding: the same files.
TEST_P(LateShardedSaves, AreThoseOfATrainingWithoutShardingInAnyWorld) {
  const TempFolder folder;
  const std::vector<std::pair<int, Shard>> stages = {{3, Shard::kGradients},
                                                     {2, Shard::kNone},
                                                     {2, Shard::kOptimizer},
                                                     {3, Shard::kNone},
                                                     {2, Shard::kGradients}};
  for (std::int64_t stage = 0; stage < std::ssize(stages); ++stage) {
    const auto [size, mode] = stages[static_cast<std::size_t>(stage)];
    const auto body = [&, mode = mode](const World& world) {
      at::set_num_threads(1);
      torch::manual_seed(5);
      const std::string paths[] = {folder.path() + "/replicated", folder.path() + "/sliced"};
      SavedTwin replicated(world, Shard::kNone, recipe_of(GetParam()), paths[0]);
      SavedTwin sliced(world, mode, recipe_of(GetParam()), paths[1]);
      const std::int64_t from = 3 * stage;
      const std::int64_t to = from + 3;
      EXPECT_EQ(replicated.checkpoints.load_latest().step, from);
      EXPECT_EQ(sliced.checkpoints.load_latest().step, from);
      sliced.expect_same(replicated);
      replicated.run(from, to);
      sliced.run(from, to);
      sliced.expect_same(replicated);
      replicated.checkpoints.save(to);
      if (stage % 2 == 0) {
        sliced.checkpoints.save(to);
      } else {
        sliced.checkpoints.save_async(to);
        sliced.checkpoints.wait();
      }
      if (world.rank() != 0) return;
      const std::string name = "/" + std::to_string(stage) + "-step-" + std::to_string(to);
      expect_same_files(paths[0] + name, paths[1] + name);
    };
    ASSERT_TRUE(all_passed(late::run(size, body))) << "stage " << stage;
  }
}

// Wrapped again with another layout, as a parameter is frozen: states are cut anew.
TEST(LateSharded, RewrappingKeepsStates) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    at::set_num_threads(1);
    Twins<optim::AdamW, to::AdamWOptions> twins(world, to::AdamWOptions(1e-2));
    const auto train = [&](int from, int to) {
      for (int step = from; step < to; ++step) {
        twins.step(step, [&](auto& twin) {
          twin.optimizer->zero_grad();
          loss_of(twin.model->forward(batch(world.rank(), step))).backward();
          twin.optimizer->step();
        });
      }
    };
    train(0, 2);
    for (auto& twin : twins.all) twin->ddp->rewrap();  // nothing has changed
    train(2, 4);
    for (auto& twin : twins.all) {
      twin->model->wide->weight.set_requires_grad(false);
      twin->optimizer->zero_grad();
      twin->ddp->rewrap();
    }
    train(4, 6);
    // Without sharding nobody puts the slices together.
    for (auto& twin : twins.all) {
      if (twin->mode == Shard::kNone) continue;
      const std::string text =
          error_of([&] { const DistributedDataParallel other(twin->model, world); });
      EXPECT_TRUE(has(text, "Another wrapper with DdpOptions::shard")) << text;
      twin->ddp.reset();
      const DistributedDataParallel other(twin->model, world);
      loss_of(twin->model->forward(batch(world.rank()))).backward();
      const std::string refusal = error_of([&] { twin->optimizer->step(); });
      EXPECT_TRUE(has(refusal, "has a part of what it keeps")) << refusal;
    }
  })));
}

}  // namespace
}  // namespace lockstep::test
