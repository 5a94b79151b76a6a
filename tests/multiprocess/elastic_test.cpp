// Elastic jobs, as a person starts them: ranks are killed, and the weights at the end are those of
// a run that lost nobody, to the bit; no sample is used twice or left out; nothing is left behind.

#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <random>
#include <thread>

#include "base/text.h"
#include "multiprocess/elastic_run.h"
#include "support/has.h"
#include "support/job.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

struct Case {
  std::string model;
  std::string shard;
  std::string phase;
};

class ElasticPhases : public testing::TestWithParam<Case> {};

TEST_P(ElasticPhases, AKilledRankChangesNoBit) {
  const Folder folder;
  const auto& [model, shard, phase] = GetParam();
  const JobResult job =
      run_job(arguments(folder, model, 14, {"shard=" + shard, "kill=2:5:" + phase}), options());
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(result_of(job.out), expected(model, 14)) << job.err;
  EXPECT_TRUE(has(job.err, "rank 2 (pid ")) << job.err;
  EXPECT_TRUE(has(job.err, "was killed by signal 9 (Killed)")) << job.err;
  EXPECT_TRUE(has(job.err, "3 ranks go on")) << job.err;
  EXPECT_TRUE(has(job.err, "generation 1: 3 ranks at step ")) << job.err;
  EXPECT_TRUE(has_each_sample_once(folder, 14));
}

std::vector<Case> phases() {
  std::vector<Case> cases;
  for (const char* const phase :
       {"forward", "bucket", "gradients", "optimizer", "stepped", "commit"}) {
    cases.push_back({"cnn", "none", phase});
    cases.push_back({"mlp", "gradients", phase});
    cases.push_back({"gpt", "optimizer", phase});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Elastic, ElasticPhases, testing::ValuesIn(phases()), [](const auto& one) {
  return one.param.model + "_" + one.param.shard + "_" + one.param.phase;
});

void expect_same_weights(const std::string& model, int steps, std::vector<std::string> more,
                         const std::vector<std::string>& in_err,
                         const std::vector<std::string>& launcher = {}) {
  const Folder folder;
  more.emplace_back("sleep=10");
  const JobResult job = run_job(arguments(folder, model, steps, more, launcher), options());
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(result_of(job.out), expected(model, steps)) << job.err;
  for (const std::string& text : in_err) EXPECT_TRUE(has(job.err, text)) << text << "\n" << job.err;
  EXPECT_TRUE(has_each_sample_once(folder, steps));
}

TEST(ElasticJob, TwoRanksAtOnce) {
  expect_same_weights("cnn", 40, {"kill=1:5:forward", "kill=2:5:bucket"}, {"2 ranks go on"});
}

TEST(ElasticJob, AllButOne) {
  expect_same_weights("mlp", 40, {"kill=0:5:forward", "kill=1:6:bucket", "kill=2:7:commit"},
                      {"1 rank goes on"}, {"--max-replacements", "0"});
}

TEST(ElasticJob, ARankDiesWhileOthersReForm) {
  expect_same_weights("cnn", 40, {"kill=1:5:forward", "kill=3:5:reform"}, {"2 ranks go on"});
}

TEST(ElasticJob, AReplacementGetsTheStateFromMemory) {
  expect_same_weights("gpt", 300, {"kill=1:5:forward"},
                      {"4 ranks at step ", "1 joined; ", "MB of state were sent"});
}

TEST(ElasticJob, AReplacementThatDiesIsReplaced) {
  expect_same_weights("cnn", 200, {"kill=1:5:forward", "kill=1+:0:reform"},
                      {"rank 1 is replaced in 1 s", "1 joined"});
}

// In the middle of the state, which is large.
TEST(ElasticJob, ARankDiesWhileItFeedsANewcomer) {
  expect_same_weights("cnn", 250, {"kill=1:5:forward", "kill=0:0:feed", "ballast=256"},
                      {"rank 0 (pid ", "3 ranks go on", "1 joined"});
}

TEST(ElasticJob, ANewcomerDiesWhileItIsFed) {
  expect_same_weights("cnn", 250, {"kill=1:5:forward", "kill=1+:0:feed", "ballast=256"},
                      {"rank 1 is replaced in 1 s", "1 joined"});
}

// A large process is taken apart while the others complete the job.
TEST(ElasticJob, ADeathInTheLastStepEndsNobodyElse) {
  const Folder folder;
  const JobResult job =
      run_job(arguments(folder, "mlp", 14, {"kill=1:13:forward", "ballast=1024"}), options());
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(result_of(job.out), expected("mlp", 14)) << job.err;
  EXPECT_TRUE(has(job.err, "generation 1: 3 ranks at step 13")) << job.err;
}

// Rank 2 leaves the step before it comes to where others wait for it, and for nobody else.
TEST(ElasticJob, WaitsForThoseWhoHaveLeftEnd) {
  expect_same_weights("mlp", 30, {"kill=1:5:forward", "late=2:5:500", "split"}, {"3 ranks go on"},
                      {"--max-replacements", "0"});
}

TEST(ElasticJob, AReplacementThatDoesNotFitIsRefused) {
  const Folder folder;
  const JobResult job =
      run_job(arguments(folder, "mlp", 500, {"sleep=10", "kill=1:5:forward", "misfit"},
                        {"--max-replacements", "1"}),
              options());
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(result_of(job.out), expected("mlp", 500)) << job.err;
  EXPECT_TRUE(has(job.err, "This process cannot replace a rank of the job")) << job.err;
  EXPECT_TRUE(has(job.out, "3 ranks, generation 1")) << job.out;
}

// Nobody waits for the lost rank: the others are busy with gradients that are of no use any more.
TEST(ElasticJob, WhoComputesHearsOfALoss) {
  const Folder folder;
  constexpr int kSlowMs = 200;
  constexpr int kNumParameters = 13;
  const JobResult job = run_job(arguments(folder, "gpt", 14,
                                          {"kill=1:5:forward", text::format("slow=5:{}", kSlowMs),
                                           "trace=" + folder.path() + "/trace"},
                                          {"--max-replacements", "0"}),
                                options());
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(result_of(job.out), expected("gpt", 14)) << job.err;
  int num_changed = 0;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (!entry.path().filename().string().starts_with("trace.")) continue;
    std::ifstream file(entry.path());
    int before = 0;
    int after = 0;
    bool has_changed = false;
    for (std::string line; std::getline(file, line);) {
      has_changed |= line.starts_with("change ");
      if (line == "slow") ++(has_changed ? after : before);
    }
    if (!has_changed) continue;
    ++num_changed;
    EXPECT_GE(after, kNumParameters);  // of the step that is done again
    EXPECT_LT(before, kNumParameters);
  }
  EXPECT_EQ(num_changed, 3);
}

TEST(ElasticJob, ExitCodesThatAreNotRetried) {
  const Folder folder;
  Job job(arguments(folder, "mlp", 100, {"sleep=10", "exit=1:5:3"}, {"--no-replace", "3"}),
          options());
  EXPECT_EQ(job.wait().code, 0) << job.err();
  EXPECT_EQ(result_of(job.out()), expected("mlp", 100));
  EXPECT_TRUE(has(job.err(), "exit code 3 is not retried")) << job.err();
  EXPECT_TRUE(has(job.out(), "3 ranks, generation 1")) << job.out();
}

TEST(ElasticJob, TooFewRanksEndTheJob) {
  const Folder folder;
  const JobResult job =
      run_job(arguments(folder, "mlp", 100, {"sleep=10", "kill=1:5:forward"}, {"--min-ranks", "4"}),
              options());
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  EXPECT_TRUE(has(job.err, "3 ranks left, fewer than --min-ranks 4")) << job.err;
}

TEST(ElasticJob, NobodyIsLeft) {
  const Folder folder;
  const JobResult job = run_job(arguments(folder, "mlp", 100,
                                          {"sleep=10", "kill=0:5:forward", "kill=1:5:forward",
                                           "kill=2:5:forward", "kill=3:5:forward"}),
                                options());
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  EXPECT_TRUE(has(job.err, "was killed by signal 9")) << job.err;
}

TEST(ElasticJob, AnErrorThatIsNoLossIsThrown) {
  const Folder folder;
  const JobResult job =
      run_job(arguments(folder, "mlp", 30, {"throw=1:5"}, {"--max-replacements", "0"}), options());
  EXPECT_EQ(job.code, 0) << job.err;  // the other ranks go on
  EXPECT_TRUE(has(job.err, "a fault of the script")) << job.err;
  EXPECT_TRUE(has(job.err, "rank 1 is not replaced any more")) << job.err;
}

TEST(ElasticJob, WithoutTheOptionARankThatIsLostEndsTheJob) {
  const Folder folder;
  const JobResult job =
      run_job({"run", "-n", "2", "--logical-ranks", "2", "--", LOCKSTEP_ELASTIC_TRAINER,
               folder.path() + "/run", "mlp", "1000", "exit=1:5:3"},
              {.variables = {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_SEAT", "1"}}});
  EXPECT_NE(job.code, 0) << job.err;
}

TEST(ElasticScale, RanksComeAndLeaveAtTheEndOfAStep) {
  const Folder folder;
  const std::string name = text::format("test{}", ::getpid());
  const JobOptions its = {
      .variables = {{"OMP_NUM_THREADS", "1"}, {"XDG_RUNTIME_DIR", folder.path()}},
      .deadline = kDeadline};
  Job job({"run", "-n", "2", "--elastic", "--logical-ranks", "4", "--job-id", name, "--",
           LOCKSTEP_ELASTIC_TRAINER, folder.path() + "/run", "cnn", "700", "log=" + folder.path(),
           "sleep=10"},
          its);
  const auto scale = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"scale", name});
    return run_job(more, its);
  };
  job.wait_for_output("2 ranks on 1 host");
  JobResult result;
  for (int tries = 0; tries < 100; ++tries) {  // until all have come to Elastic::run()
    result = scale({"-n", "4"});
    if (result.code == 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_EQ(result.out, "from 2 ranks to 4 ranks\n") << result.err;
  job.wait_for_output(": 4 ranks at step ");
  EXPECT_TRUE(has(scale({}).out, "4 of at most 4 ranks")) << scale({}).out;
  EXPECT_EQ(scale({"-n", "5"}).code, 1);
  EXPECT_TRUE(has(scale({"-n", "5"}).err, "the job has 4 logical ranks"));
  EXPECT_EQ(scale({"--leave", "0"}).out, "rank 0 leaves at the end of a step\n");
  job.wait_for_output(": 3 ranks at step ");
  EXPECT_EQ(scale({"-n", "1"}).code, 0);
  job.wait_for_output(": 1 rank at step ");
  EXPECT_EQ(job.wait().code, 0) << job.err();
  EXPECT_EQ(result_of(job.out()), expected("cnn", 700)) << job.err();
  EXPECT_FALSE(has(job.err(), "is done again"))
      << job.err();  // nothing is lost by a planned change
  EXPECT_TRUE(has_each_sample_once(folder, 700));
  EXPECT_TRUE(has(run_job({"scale", name}, its).err, "There is no job"));
}

// Ranks are killed from outside, at any moment.
TEST(ElasticRandomKill, EveryRunEndsWithTheSameWeights) {
  const int kills = soak(24, 300);
  std::mt19937 random(static_cast<unsigned>(kills));
  const auto pick = [&](int count) {
    return std::uniform_int_distribution<int>(0, count - 1)(random);
  };
  const std::vector<std::string> models = {"mlp", "cnn", "gpt"};
  const std::vector<std::string> shards = {"none", "optimizer", "gradients"};
  constexpr int kSteps = 400;
  for (int killed = 0, run = 0; killed < kills; ++run) {
    const std::string model = models[static_cast<std::size_t>(run) % 3];
    const std::string shard = shards[static_cast<std::size_t>(run / 3) % 3];
    SCOPED_TRACE(model + ", shard " + shard + ", run " + std::to_string(run));
    const Folder folder;
    JobOptions its = options();
    its.deadline = std::chrono::seconds(120);
    Job job(arguments(folder, model, kSteps, {"shard=" + shard, "sleep=5"}), its);
    int in_this_run = 0;
    for (; in_this_run < 3; ++in_this_run) {
      if (in_this_run == 0) wait_for_step(folder.path(), 2);
      std::this_thread::sleep_for(std::chrono::milliseconds(100) +
                                  std::chrono::microseconds(pick(400'000)));
      const std::vector<pid_t> ranks = trainers_of(job);
      if (ranks.size() < 2 || has(job.out(), "weights ")) break;
      ::kill(ranks[static_cast<std::size_t>(pick(static_cast<int>(ranks.size())))], SIGKILL);
    }
    const ExitStatus end = job.wait();
    ASSERT_EQ(end.code, 0) << job.err();
    ASSERT_EQ(end.signal, 0) << job.err();
    ASSERT_EQ(result_of(job.out()), expected(model, kSteps)) << job.err();
    ASSERT_TRUE(has_each_sample_once(folder, kSteps)) << job.err();
    EXPECT_TRUE(job.processes().empty());
    EXPECT_TRUE(job.left_files().empty());
    killed += std::max(in_this_run, 1);
  }
}

}  // namespace
}  // namespace lockstep::test
