#include "launch/top.h"

#include <gtest/gtest.h>

#include "support/has.h"

namespace lockstep {
namespace {

using test::has;

RankStatus rank(int number) {
  return {.number = number,
          .host = number / 2,
          .host_name = number < 2 ? "alpha" : "beta",
          .pid = 100 + number,
          .has_gauges = true,
          .rank = number,
          .doing = "backward",
          .waits_for = -1,
          .steps = 50,
          .step_s = 0.1,
          .since_step_s = 0.05,
          .stepping_s = 5,
          .waited_s = 1,
          .samples = 500,
          .memory_bytes = (number + 1) * 1'000'000};
}

Look look(double seconds) {
  Look look{.job = {.job = "a", .program = "train --lr 1", .pid = 7, .seconds = 65, .num_hosts = 2},
            .seconds = seconds};
  for (int number = 0; number < 4; ++number) look.job.ranks.push_back(rank(number));
  return look;
}

// Ten steps in a second, of which ranks wait 0.2, 0.3, ...
Look later(const Look& before) {
  Look now = before;
  now.seconds += 1;
  for (RankStatus& one : now.job.ranks) {
    one.steps += 10;
    one.stepping_s += 1;
    one.waited_s += 0.5 - 0.1 * one.number;
    one.samples += 80;
  }
  return now;
}

std::vector<std::string> pids(const TopView& view) {
  std::vector<std::string> all;
  for (const TopLine& line : view.ranks) all.push_back(line.text.substr(28, 3));
  return all;
}

TEST(Top, RatesAreOfTheTimeBetweenTwoLooks) {
  const TopView view = view_of(later(look(10)), look(10), {});
  EXPECT_EQ(view.head[0], "train --lr 1: job a on 2 hosts, 4 ranks, generation 0, up 1 min");
  EXPECT_EQ(view.head[1],
            "step 60   10 steps/s   waiting 35 %   320 samples/s   slowest: rank 3, 15.0 ms more "
            "than the median");
  ASSERT_EQ(view.ranks.size(), 4U);
  for (const char* const text : {"0 alpha", "100", "backward", "60", "100", "50 %", "80", "1 MB"}) {
    EXPECT_TRUE(has(view.ranks[0].text, text)) << view.ranks[0].text;
  }
  EXPECT_TRUE(has(view.ranks[3].text, "20 %")) << view.ranks[3].text;
}

TEST(Top, OneLookShowsTheWholeRun) {
  const TopView view = view_of(look(10), std::nullopt, {});
  EXPECT_TRUE(has(view.head[1], "step 50   10 steps/s   waiting 20 %   400 samples/s"))
      << view.head[1];
}

// A rank that has done nothing between two looks is shown as it was.
TEST(Top, NoStepBetweenTwoLooks) {
  Look now = look(10);
  now.seconds = 11;
  const TopView view = view_of(now, look(10), {});
  EXPECT_TRUE(has(view.ranks[0].text, "100     20 %          -")) << view.ranks[0].text;
}

TEST(Top, Sorts) {
  const auto order = [](TopSort sort, bool is_reversed = false) {
    return pids(view_of(later(look(10)), look(10), {.sort = sort, .is_reversed = is_reversed}));
  };
  using Order = std::vector<std::string>;
  EXPECT_EQ(order(TopSort::kRank), (Order{"100", "101", "102", "103"}));
  EXPECT_EQ(order(TopSort::kRank, true), (Order{"103", "102", "101", "100"}));
  EXPECT_EQ(order(TopSort::kWork), (Order{"103", "102", "101", "100"}));
  EXPECT_EQ(order(TopSort::kWaiting), (Order{"100", "101", "102", "103"}));
  EXPECT_EQ(order(TopSort::kMemory), (Order{"103", "102", "101", "100"}));
  EXPECT_EQ(order(TopSort::kHost), (Order{"100", "101", "102", "103"}));
}

TEST(Top, Filters) {
  const TopView view = view_of(look(10), std::nullopt, {.filter = "beta"});
  EXPECT_EQ(pids(view), (std::vector<std::string>{"102", "103"}));
  EXPECT_TRUE(has(view.head[0], "4 ranks"));  // of the job
}

TEST(Top, SaysWhatIsWrong) {
  Look now = look(10);
  RankStatus& waiting = now.job.ranks[0];
  waiting.waits_in = "all_reduce";
  waiting.waits_for = 2;
  waiting.waits_s = 12.34;
  RankStatus& stuck = now.job.ranks[1];
  stuck.doing = "loading";
  stuck.since_step_s = 100;
  RankStatus& dead = now.job.ranks[2];
  dead.end = "was killed by signal 9 (Killed)";
  RankStatus& foreign = now.job.ranks[3];
  foreign = {.number = 3, .pid = 103};
  const TopView view = view_of(now, std::nullopt, {});
  EXPECT_TRUE(has(view.ranks[0].text, "waits 12.3 s for rank 2 (all_reduce)"));
  EXPECT_TRUE(view.ranks[0].is_bad);
  EXPECT_TRUE(has(view.ranks[1].text, "loading, 100 s after its last step"));
  EXPECT_TRUE(has(view.ranks[2].text, "was killed by signal 9 (Killed)"));
  EXPECT_TRUE(view.ranks[2].is_bad);
  EXPECT_TRUE(has(view.ranks[3].text, "has not joined"));
  EXPECT_TRUE(has(view.head[0], "3 ranks"));
  EXPECT_TRUE(has(to_text(view), "rank host"));
}

TEST(Top, ShortWaitsAreHowAStepGoes) {
  RankStatus one = rank(0);
  one.waits_in = "all_reduce";
  one.waits_s = 0.5;
  EXPECT_EQ(describe_state(one), "backward");
  one.waits_s = 1.5;
  EXPECT_EQ(describe_state(one), "waits 1.5 s for others (all_reduce)");
}

TEST(Top, ShowsTheNewestLoss) {
  Look now = look(10);
  now.job.ranks[1].loss_step = 40;
  now.job.ranks[1].loss = 0.25;
  EXPECT_TRUE(has(view_of(now, std::nullopt, {}).head[1], "loss 0.25"));
}

TEST(Top, AJobThatHasNotStepped) {
  Look now = look(10);
  for (RankStatus& one : now.job.ranks) one = {.number = one.number, .pid = one.pid};
  now.job.generation = -1;
  const TopView view = view_of(now, std::nullopt, {});
  EXPECT_EQ(view.head[1], "step 0");
  EXPECT_TRUE(has(view.head[0], "generation 0"));
}

TEST(Top, ListsJobs) {
  Look one = look(0);
  one.job.program = std::string(100, 'x');
  const std::string text = list_jobs({one.job});
  EXPECT_TRUE(has(text, "job              launcher  hosts  ranks       step        up  program"))
      << text;
  EXPECT_TRUE(has(text, "xxx...")) << text;
}

}  // namespace
}  // namespace lockstep
