// What each rank has of its own in a checkpoint, and speed where ranks take different numbers of
// samples.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "multiprocess/checkpoint_run.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

std::string text_of(const std::mt19937_64& generator) {
  std::ostringstream text;
  text << generator;
  return text.str();
}

TEST(PerRank, EachHasItsOwnAgainAndOtherSizesHaveARule) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const RankOptions options{.variables = folder.variables()};
  // Rank 1's second text is empty, rank 2's is no UTF-8 and has a zero in it.
  const std::vector<std::string> odd = {"zero", "", std::string("\xff\0\x80", 3)};
  EXPECT_TRUE(all_passed(run_ranks(
      3,
      [&](int rank) {
        const World world = World::join();
        std::mt19937_64 simulator(static_cast<unsigned>(rank));
        const std::string& mine = odd[static_cast<std::size_t>(rank)];
        {
          Checkpointer checkpoints(folder.path(), world);
          checkpoints.add_per_rank(
              "simulator", [&] { return text_of(simulator); }, [](const std::string&) {});
          checkpoints.add_per_rank(
              "odd", [&] { return mine; }, [](const std::string&) {});
          simulator.discard(static_cast<unsigned>(10 * rank));
          checkpoints.save_async(1);
          checkpoints.wait();
        }
        std::mt19937_64 other(99);
        std::string text = "before";
        Checkpointer checkpoints(folder.path(), world);
        checkpoints.add_per_rank(
            "simulator", [] { return std::string(); },
            [&](const std::string& its) { std::istringstream(its) >> other; });
        checkpoints.add_per_rank(
            "odd", [] { return std::string(); }, [&](const std::string& its) { text = its; });
        EXPECT_EQ(checkpoints.load_latest().step, 1);
        EXPECT_EQ(simulator(), other());
        EXPECT_EQ(text, mine);
      },
      options)));
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [&](int) {
        const World world = World::join();
        Checkpointer checkpoints(folder.path(), world);
        const auto save = [] { return std::string("new"); };
        const auto fail = [](const std::string&) { FAIL() << "there is no text of this rank"; };
        std::vector<std::string> texts;
        checkpoints.add_per_rank("odd", save, fail,
                                 [&](const std::vector<std::string>& all) { texts = all; });
        checkpoints.add_per_rank("simulator", save, fail);
        EXPECT_TRUE(has(error_of([&] { checkpoints.load_latest(); }),
                        "simulator: saved by 3 ranks, here are 2"));
        EXPECT_TRUE(texts.empty()) << "nothing is loaded if something does not fit";
        EXPECT_EQ(checkpoints.load_latest({.strict = false}).differences.size(), 2U);
        EXPECT_EQ(texts, odd);
      },
      options)));
}

TEST(PerRank, WhatFailsOnOneRankIsToldOnAll) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join();
    Checkpointer checkpoints(folder.path(), world);
    bool can_save = false;
    checkpoints.add_per_rank(
        "simulator",
        [&] {
          if (rank == 1 && !can_save) throw std::runtime_error("the simulator is busy");
          return std::string("state");
        },
        [&](const std::string&) {
          if (rank == 0) throw std::runtime_error("the simulator is another");
        });
    EXPECT_TRUE(has(error_of([&] { checkpoints.save(1); }), "the simulator is busy"));
    can_save = true;
    checkpoints.save(1);
    EXPECT_TRUE(has(error_of([&] { checkpoints.load_latest(); }), "the simulator is another"));
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// One that is too large is told before anybody is sent it.
TEST(PerRank, WhatIsTooLargeIsNamedOnAllRanks) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join();
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add_per_rank(
        "simulator", [&] { return std::string(rank == 1 ? (128U << 20) + 1 : 1, 'x'); },
        [](const std::string&) {});
    const std::string error = error_of([&] { checkpoints.save(1); });
    EXPECT_TRUE(has(error, "'simulator' of this rank has 134217729 bytes, more than 134217728"));
    EXPECT_TRUE(rank == 1 || has(error, "rank 1")) << error;
    EXPECT_TRUE(has(error, "save its name")) << error;
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST(StepClockOfRanks, AddsUpRanksWithDifferentNumbersOfSamples) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    StepClock clock;
    EXPECT_EQ(clock.samples_per_second(world), 0);
    for (int i = 0; i < 4; ++i) {
      clock.step(rank == 0 ? 10 : 30);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const double mine = clock.samples_per_second();
    EXPECT_NEAR(clock.samples_per_second(world), world.sum(mine), 1e-9);
    EXPECT_GT(clock.samples_per_second(world), mine);
  })));
}

// Whatever fails on one rank, before or after what is each rank's own: the others do not wait.
TEST(PerRank, ALoadThatFailsOnOneRankHoldsUpNobody) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(10)});
    torch::nn::Linear model(2, 2);
    DistributedDataParallel ddp(model, world);
    WeightAverage average(model);
    average.update();
    std::string bad;
    int num_loaded = 0;
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(average)
        .add(
            "text", [] { return std::string("text"); },
            [&](const std::string&) {
              if (rank == 1 && bad == "text") throw std::runtime_error("the text is bad");
            })
        .add_per_rank(
            "own",
            [&] {
              if (rank == 0 && bad == "save") throw 42;
              return std::string("own");
            },
            [&](const std::string&) {
              ++num_loaded;
              if (rank == 0 && bad == "own") throw 42;
            });
    bad = "save";
    EXPECT_TRUE(has(error_of([&] { checkpoints.save(1); }), "not a std::exception"));
    bad = "";
    checkpoints.save(1);
    const auto load = [&] { checkpoints.load_latest(); };
    bad = "text";
    EXPECT_TRUE(has(error_of(load), "the text is bad"));
    EXPECT_EQ(num_loaded, 0);
    bad = "own";
    EXPECT_TRUE(has(error_of(load), "not a std::exception"));
    EXPECT_EQ(num_loaded, 1);
    bad = "";
    {
      std::optional<WeightAverage::Applied> applied;
      if (rank == 1) applied.emplace(average);
      EXPECT_TRUE(has(error_of(load), "The averaged weights are in the model"));
    }
    EXPECT_EQ(checkpoints.load_latest().step, 1);
    EXPECT_EQ(world.sum(1), 2);
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

}  // namespace
}  // namespace lockstep::test
