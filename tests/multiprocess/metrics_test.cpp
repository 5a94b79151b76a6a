// Numbers over ranks, files for plots, and the progress bar.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <lockstep/metrics.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

std::string make_folder() {
  // Of the ranks: the test's. Of the test itself: that of e2e/tensorboard.sh.
  if (const char* given = std::getenv("LOCKSTEP_TEST_EVENTS")) return given;
  std::string name = testing::TempDir() + "lockstep-metrics-XXXXXX";
  return ::mkdtemp(name.data());
}

TEST(Metrics, MeansAndCountsAreOverAllRanks) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    EXPECT_EQ(world.sum(rank + 0.5), 4.5);
    EXPECT_EQ(world.mean(at::full({}, 2.0 * rank)), 2);
    // Ranks with 1, 2 and 3 samples of which rank 2's are right: 3 of 6, not a third.
    Accuracy accuracy;
    EXPECT_EQ(Accuracy().over(world), 0);
    at::Tensor scores = at::zeros({rank + 1, 4});
    scores.select(1, rank) += 1;
    accuracy.add(scores, at::full({rank + 1}, 2, at::TensorOptions(at::kLong)));
    EXPECT_EQ(accuracy.over(world), 0.5);
    accuracy.add(1, 1);
    EXPECT_EQ(accuracy.over(world), 6.0 / 9);
    EXPECT_THROW(accuracy.add(2, 1), UsageError);
    EXPECT_THROW(accuracy.add(at::zeros({2, 3}), at::zeros({3})), UsageError);
  })));
}

TEST(Metrics, ALossThatIsNoNumberStopsAllRanksIfAsked) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    EXPECT_EQ(finite_mean(at::full({}, 1.0 * rank), world), 1);
    try {
      finite_mean(at::full({}, rank == 1 ? std::nan("") : 1.0), world);
      ADD_FAILURE() << "nan was taken for a number";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("The loss is nan on rank 1."), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(finite_mean(at::full({1}, 2.0), world), 2) << "all ranks can go on";
  })));
}

TEST(StepClock, CountsAllRanksSamples) {
  StepClock clock(4);
  EXPECT_EQ(clock.step_ms(), 0);
  EXPECT_EQ(clock.samples_per_second(), 0);
  for (int i = 0; i < 5; ++i) {
    clock.step(8);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GE(clock.step_ms(), 10);
  EXPECT_NEAR(clock.samples_per_second(), 4 * 8 / clock.step_ms() * 1000, 1e-6);
}

TEST(JsonLines, OnlyRank0WritesAndALineIsThereAtOnce) {
  const std::string folder = make_folder();
  const auto in_ranks = [&](int) {
    const World world = World::join();
    JsonLines lines(folder + "/new/folder/log.jsonl", world);
    for (int step = 0; step < 3; ++step) {
      lines.write(step, {{"loss", 0.5 * step}, {"bad", std::nan("")}});
    }
    world.barrier();
    std::ifstream file(folder + "/new/folder/log.jsonl");
    int count = 0;
    for (std::string line; std::getline(file, line); ++count) {
      const auto json = nlohmann::json::parse(line);
      EXPECT_EQ(json.at("step"), count);
      EXPECT_EQ(json.at("loss"), 0.5 * count);
      EXPECT_TRUE(json.at("bad").is_null());
      EXPECT_GT(json.at("time"), 1.7e9);
    }
    EXPECT_EQ(count, 3);
  };
  EXPECT_TRUE(
      all_passed(run_ranks(2, in_ranks, {.variables = {{"LOCKSTEP_TEST_EVENTS", folder}}})));
  fs::remove_all(folder);
}

TEST(JsonLines, WhatCannotBeWrittenIsNamed) {
  const World world = World::join();
  EXPECT_THROW(JsonLines("/proc/nowhere/log.jsonl", world), SystemError);
  JsonLines full("/dev/full", world);
  EXPECT_THROW(full.write(0, {{"loss", 1}}), SystemError);
}

// That TensorBoard itself reads it is tested in e2e/tensorboard.sh.
TEST(TensorBoard, WritesEvents) {
  const std::string folder = make_folder();
  const auto in_ranks = [&](int) {
    const World world = World::join();
    TensorBoard events(folder, world);
    for (int step = 0; step < 200; ++step) {
      events.write(step * 1000, {{"loss", 1.0 / (1 + step)}, {"rate/samples", 5.0 * step}});
    }
  };
  EXPECT_TRUE(
      all_passed(run_ranks(2, in_ranks, {.variables = {{"LOCKSTEP_TEST_EVENTS", folder}}})));
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    EXPECT_TRUE(entry.path().filename().string().starts_with("events.out.tfevents."));
    EXPECT_GT(fs::file_size(entry.path()), 200U * 50);
    ++files;
  }
  EXPECT_EQ(files, 1);
  if (std::getenv("LOCKSTEP_TEST_EVENTS") == nullptr) fs::remove_all(folder);
}

TEST(ProgressBar, SaysStepsLossRateAndWhatIsLeft) {
  const World world = World::join();
  const ProgressBar bar(200, world);
  const std::string line = bar.text(50, 0.12345, 1234.5, 0);
  EXPECT_EQ(line, "step 50/200  loss 0.1235  1234 samples/s  0:00 left");
  const std::string wide = bar.text(50, 0.5, 10, 100);
  EXPECT_TRUE(wide.starts_with(" 25% [##########..............................] step 50/200"))
      << wide;
  for (int width = 1; width < 150; ++width) {
    EXPECT_LT(bar.text(50, 0.5, 10, width).size(), static_cast<std::size_t>(std::max(width, 2)));
  }
  EXPECT_TRUE(bar.text(0, 0.5, 10, 0).ends_with("? left"));
  EXPECT_TRUE(bar.text(300, 0.5, 10, 100).starts_with("100% ["));
  EXPECT_THROW(ProgressBar(0, world), UsageError);
}

TEST(ProgressBar, DrawsOnTerminalsAndWritesLinesElsewhere) {
  const auto drawn = [](const std::map<std::string, std::string>& variables) {
    return run_ranks(2,
                     [](int) {
                       const World world = World::join();
                       ProgressBar bar(3, world);
                       for (int step = 1; step <= 3; ++step) bar.update(step, 1, 10);
                     },
                     {.variables = variables});
  };
  const auto lines = drawn({{"LOCKSTEP_LOG", "warning"}});
  EXPECT_TRUE(all_passed(lines));
  EXPECT_NE(lines[0].output.find("step 1/3"), std::string::npos);
  EXPECT_NE(lines[0].output.find("step 3/3  loss 1.0000  10 samples/s  0:00 left\n"),
            std::string::npos);
  EXPECT_EQ(lines[0].output.find('\r'), std::string::npos);
  EXPECT_EQ(lines[1].output.find("step"), std::string::npos);
  const auto bars = drawn({{"LOCKSTEP_LOG", "warning"}, {"LOCKSTEP_TERMINAL", "90"}});
  EXPECT_NE(bars[0].output.find("\x1b[K\r"), std::string::npos);
  EXPECT_TRUE(bars[0].output.ends_with("\n"));
}

}  // namespace
}  // namespace lockstep::test
