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

JobStatus look() {
  JobStatus job{.job = "a", .program = "train --lr 1", .pid = 7, .seconds = 65, .num_hosts = 2};
  for (int number = 0; number < 4; ++number) job.ranks.push_back(rank(number));
  return job;
}

// Ten steps, of which ranks wait half the time, four tenths, ...
JobStatus later(const JobStatus& before) {
  JobStatus now = before;
  for (RankStatus& one : now.ranks) {
    one.steps += 10;
    one.stepping_s += 1;
    one.waited_s += 0.5 - 0.1 * one.number;
    one.samples += 80;
  }
  return now;
}

std::vector<std::string> pids(const TopView& view) {
  std::vector<std::string> all;
  for (const TopLine& line : view.ranks) all.push_back(line.text.substr(line.text.size() - 3));
  return all;
}

TEST(Top, RatesAreOfTheTimeBetweenTwoLooks) {
  const TopView view = view_of(later(look()), look(), {});
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
  const TopView view = view_of(look(), std::nullopt, {});
  EXPECT_TRUE(has(view.head[1], "step 50   10 steps/s   waiting 20 %   400 samples/s"))
      << view.head[1];
}

// Slow steps: what is known of all of them is shown.
TEST(Top, NoStepBetweenTwoLooks) {
  const TopView view = view_of(look(), look(), {});
  EXPECT_TRUE(has(view.ranks[0].text, "     100    20 %       100")) << view.ranks[0].text;
}

TEST(Top, AJobThatHangsHasNoRate) {
  JobStatus now = look();
  for (RankStatus& one : now.ranks) one.since_step_s = 100 + one.number;
  const TopView view = view_of(now, look(), {});
  EXPECT_TRUE(has(view.head[1], "step 50   no step for 2 min")) << view.head[1];
  EXPECT_FALSE(has(view.head[1], "steps/s")) << view.head[1];
  EXPECT_FALSE(has(view.head[1], "samples/s")) << view.head[1];
  EXPECT_TRUE(has(view.ranks[0].text, "     100    20 %         -")) << view.ranks[0].text;
}

TEST(Top, ARankThatIsStoppedWaitsForNobody) {
  RankStatus one = rank(0);
  one.waits_in = "all_reduce";
  one.waits_s = 20;
  one.is_stopped = true;
  EXPECT_EQ(describe_state(one), "is stopped (SIGSTOP, or a debugger)");
}

TEST(Top, Sorts) {
  const auto order = [](TopSort sort, bool is_reversed = false) {
    return pids(view_of(later(look()), look(), {.sort = sort, .is_reversed = is_reversed}));
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
  const TopView view = view_of(look(), std::nullopt, {.filter = "beta"});
  EXPECT_EQ(pids(view), (std::vector<std::string>{"102", "103"}));
  EXPECT_TRUE(has(view.head[0], "4 ranks"));  // of the job
}

TEST(Top, SaysWhatIsWrong) {
  JobStatus now = look();
  RankStatus& waiting = now.ranks[0];
  waiting.waits_in = "all_reduce";
  waiting.waits_for = 2;
  waiting.waits_s = 12.34;
  RankStatus& stuck = now.ranks[1];
  stuck.doing = "loading";
  stuck.since_step_s = 100;
  RankStatus& dead = now.ranks[2];
  dead.end = "was killed by signal 9 (Killed)";
  RankStatus& foreign = now.ranks[3];
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
  EXPECT_TRUE(has(to_text(view).substr(to_text(view).find("rank host"), 80), "waiting"));
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
  JobStatus now = look();
  now.ranks[1].loss_step = 40;
  now.ranks[1].loss = 0.25;
  EXPECT_TRUE(has(view_of(now, std::nullopt, {}).head[1], "loss 0.25"));
}

TEST(Top, AJobThatHasNotStepped) {
  JobStatus now = look();
  for (RankStatus& one : now.ranks) one = {.number = one.number, .pid = one.pid};
  now.generation = -1;
  const TopView view = view_of(now, std::nullopt, {});
  EXPECT_EQ(view.head[1], "step 0");
  EXPECT_TRUE(has(view.head[0], "generation 0"));
}

TEST(Top, ListsJobs) {
  JobStatus one = look();
  one.program = std::string(100, 'x');
  const std::string text = list_jobs({one});
  EXPECT_TRUE(has(text, "job              launcher  hosts  ranks       step        up  program"))
      << text;
  EXPECT_TRUE(has(text, "xxx...")) << text;
}

}  // namespace
}  // namespace lockstep
