#include "launch/hello.h"

#include <gtest/gtest.h>

#include "support/has.h"

namespace lockstep::test {
namespace {

Hello some_host(int rank) {
  return {.host_rank = rank,
          .num_hosts = 3,
          .host = "b",
          .job_id = "17",
          .program = "./train",
          .program_hash = "0123456789",
          .arguments = {"--steps", "10"}};
}

TEST(Hello, TheJobIsTheSchedulers) {
  EXPECT_EQ(scheduler_job_id({}), "");
  EXPECT_EQ(scheduler_job_id({{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "3"}}), "17");
  EXPECT_EQ(scheduler_job_id({{"PBS_JOBID", "12[3].server"}}), "12[3].server");
  EXPECT_EQ(scheduler_job_id({{"LSB_JOBID", "5"}, {"LSB_JOBINDEX", "2"}}), "5.2");
  EXPECT_EQ(scheduler_job_id({{"JOB_ID", "5"}, {"SGE_TASK_ID", "undefined"}}), "5.undefined");
  EXPECT_EQ(scheduler_job_id({{"JOB_ID", "of somebody else"}}), "");
}

TEST(Hello, HostsOfOneJobFit) {
  EXPECT_EQ(find_conflict(some_host(0), some_host(1), false), "");
  Hello other = some_host(1);
  other.num_ranks = 7;
  other.program = "/home/b/train";  // the same file elsewhere
  other.arguments = {};
  EXPECT_EQ(find_conflict(some_host(0), other, false), "");
}

TEST(Hello, AnElectedCoordinatorMayBeAnyHost) {
  EXPECT_EQ(find_conflict(some_host(2), some_host(0), false), "");
  EXPECT_TRUE(has(find_conflict(some_host(2), some_host(3), false), "not in 0 to 2"));
  Hello other = some_host(0);
  other.job_id = "18";
  EXPECT_TRUE(has(find_conflict(some_host(2), other, false), "host 2 has the job id '17'"));
}

TEST(Hello, WhatDoesNotFitIsNamedWithBothSides) {
  const auto conflict = [](auto change) {
    Hello other = some_host(1);
    change(other);
    return find_conflict(some_host(0), other, false);
  };
  std::string text = conflict([](Hello& other) { other.job_id = "18"; });
  EXPECT_TRUE(has(text, "the job id '18'") && has(text, "the job id '17'")) << text;
  text = conflict([](Hello& other) { other.job_id = ""; });
  EXPECT_TRUE(has(text, "host 1 has no job id")) << text;
  text = conflict([](Hello& other) { other.num_hosts = 2; });
  EXPECT_TRUE(has(text, "--hosts 2") && has(text, "--hosts 3")) << text;
  EXPECT_TRUE(has(conflict([](Hello& other) { other.host_rank = 3; }), "not in 1 to 2"));
  EXPECT_TRUE(has(conflict([](Hello& other) { other.host_rank = 0; }), "not in 1 to 2"));
  const auto change_program = [](Hello& other) {
    other.program = "./trian";
    other.program_hash = "abcdef";
  };
  text = conflict(change_program);
  EXPECT_TRUE(has(text, "'./trian' of host 1 (abcdef)") && has(text, "'./train' of host 0"))
      << text;
  Hello other = some_host(1);
  change_program(other);
  EXPECT_EQ(find_conflict(some_host(0), other, true), "");
  other.program_hash = "";  // it may be run, but not read: nothing is known of it
  EXPECT_EQ(find_conflict(some_host(0), other, false), "");
}

TEST(Hello, TheFirstArgumentThatDiffersIsNamed) {
  Hello other = some_host(1);
  EXPECT_EQ(compare_arguments(some_host(0), other), "");
  other.arguments = {"--steps", "20"};
  EXPECT_EQ(compare_arguments(some_host(0), other),
            "argument 2 of its program is '20', that of host 0's is '10'");
  other.arguments = {"--steps"};
  EXPECT_EQ(compare_arguments(some_host(0), other),
            "argument 2 of its program is nothing, that of host 0's is '10'");
  other.arguments = {"--steps", "10", "--fast"};
  EXPECT_EQ(compare_arguments(some_host(0), other),
            "argument 3 of its program is '--fast', that of host 0's is nothing");
}

}  // namespace
}  // namespace lockstep::test
