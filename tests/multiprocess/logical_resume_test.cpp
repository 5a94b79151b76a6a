// Logical ranks: what a run is bound to, when it is resumed and on all of its ranks.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <cstdlib>

#include "multiprocess/logical_world.h"
#include "multiprocess/on_engines.h"
#include "multiprocess/run_models.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

struct Resumable {
  Resumable(const World& its_world, const std::string& folder)
      : world(its_world), checkpoints(folder, world) {
    checkpoints.add(model).add(optimizer).add(sampler).add(ddp);
  }
  // Until `last`; in the middle of epochs.
  void train(std::int64_t last) {
    for (std::int64_t step = checkpoints.load_latest().step; step < last;) {
      const auto samples = sampler.next(2);
      if (!samples) {
        sampler.reset();
        continue;
      }
      const Turn turn = ddp.play();
      loss_of(model->forward(static_cast<int>(samples->front()), 1)).backward();
      if (!turn.is_last) continue;
      optimizer.step();
      optimizer.zero_grad();
      if (++step == last) checkpoints.save(step);
    }
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all = model->parameters();
    for (const at::Tensor& one : model->buffers()) all.push_back(one);
    return all;
  }

  World world;
  Mlp model;
  DistributedDataParallel ddp{model, world};
  optim::AdamW optimizer{model->parameters(), to::AdamWOptions(1e-2)};
  DistributedSampler sampler{100, world};
  Checkpointer checkpoints;
};

TEST(LogicalRuns, AResumedTrainingHasTheBitsOfOneThatWasNot) {
  const TempFolder folder;
  int last = 0;
  for (const int ranks : {2, 3, 1, 4}) {
    last += 5;
    EXPECT_TRUE(all_passed(run_ranks(ranks, [&](int rank) {
      const World world = World::join({.logical_ranks = 8});
      seed_all(5, world);
      Resumable resumed(world, folder.path() + "/run");
      resumed.train(last);
      if (rank != 0) return;
      const World one = alone(8);
      seed_all(5, one);
      Resumable whole(one, folder.path() + "/whole" + std::to_string(ranks));
      whole.train(last);
      const auto expected = whole.tensors();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(resumed.tensors()[i].equal(expected[i])) << i << " at step " << last;
      }
    })));
  }
}

TEST(LogicalRuns, ACheckpointOfAnotherRunIsRefused) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const auto resume = [&](int logical_ranks, std::uint64_t seed, int threads) {
      const World world = World::join({.logical_ranks = logical_ranks, .threads = threads});
      EXPECT_EQ(at::get_num_threads(), threads);
      seed_all(seed, world);
      Resumable one(world, folder.path());
      one.train(2);
    };
    resume(4, 5, 1);
    expect_says(thrown_by<UsageError>([&] { resume(8, 5, 1); }),
                {"4 logical ranks with seed 5", "8 logical ranks"});
    expect_says(thrown_by<UsageError>([&] { resume(4, 6, 1); }), {"seed 5", "seed 6"});
    expect_says(thrown_by<UsageError>([&] { resume(4, 5, 2); }), {"1 threads", "2 threads"});
    // Another choice of kernels.
    ::setenv("MKL_CBWR", "COMPATIBLE", 1);
    expect_says(thrown_by<UsageError>([&] { resume(4, 5, 1); }),
                {"The run was on LibTorch", "MKL_CBWR=COMPATIBLE", "LOCKSTEP_ANY_PLATFORM=1"});
    ::setenv("LOCKSTEP_ANY_PLATFORM", "1", 1);
    resume(4, 5, 1);
  })));
}

// Ranks of one training must compute alike, too.
TEST(LogicalRuns, RanksOnAnotherPlatformAreRefused) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    if (rank == 1) ::setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 1);
    const World world = World::join({.logical_ranks = 2});
    Net model;
    const auto wrap = [&] { const DistributedDataParallel ddp(model, world); };
    expect_says(thrown_by<MismatchError>(wrap), {"ONEDNN_MAX_CPU_ISA=SSE41"});
    ::setenv("LOCKSTEP_ANY_PLATFORM", "1", 1);
    wrap();
  })));
}

TEST(LogicalRuns, ThreadsAreTheRuns) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    expect_says(
        thrown_by<MismatchError>([&] { World::join({.logical_ranks = 2, .threads = 1 + rank}); }),
        {"number of threads", "'1'", "'2'"});
    expect_says(thrown_by<UsageError>([] { World::join({.threads = 2}); }),
                {"without logical ranks", "set_num_threads"});
    expect_says(thrown_by<UsageError>([] { World::join({.logical_ranks = 2, .threads = -1}); }),
                {"1 or more"});
    ::setenv("LOCKSTEP_THREADS", "2", 1);
    const World world = World::join({.logical_ranks = 2});
    EXPECT_EQ(at::get_num_threads(), 2);
  })));
}

}  // namespace
}  // namespace lockstep::test
