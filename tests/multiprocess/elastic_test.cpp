// Elastic jobs, as a person starts them: ranks are killed, and the weights at the end are those of
// a run that lost nobody, to the bit; no sample is used twice or left out; nothing is left behind.

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "support/has.h"
#include "support/job.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 4;

class Folder {
 public:
  Folder() : path_(testing::TempDir() + "elastic.XXXXXX") { (void)!::mkdtemp(path_.data()); }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<std::string> arguments(const Folder& folder, const std::string& model, int steps,
                                   std::vector<std::string> more,
                                   std::vector<std::string> launcher = {}) {
  std::vector<std::string> all = {"run", "-n", std::to_string(kRanks), "--elastic"};
  all.insert(all.end(), launcher.begin(), launcher.end());
  all.insert(all.end(), {"--", LOCKSTEP_ELASTIC_TRAINER, folder.path() + "/run", model,
                         std::to_string(steps), "log=" + folder.path()});
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

JobOptions options() { return {.variables = {{"OMP_NUM_THREADS", "1"}}}; }

// "weights 7e7ebedc908282ec after 30 steps, sum 30, lr 0.1"
std::string result_of(const std::string& out) {
  const std::size_t at = out.find("weights ");
  return at == std::string::npos ? "none" : out.substr(at, out.find(", ", out.find("lr ")) - at);
}

// That of a run of one rank, which nobody disturbs.
std::string expected(const std::string& model, int steps) {
  static std::map<std::pair<std::string, int>, std::string> known;
  auto& result = known[{model, steps}];
  if (result.empty()) {
    const Folder folder;
    result = result_of(run_job({"run", "-n", "1", "--logical-ranks", std::to_string(kRanks), "--",
                                LOCKSTEP_ELASTIC_TRAINER, folder.path() + "/run", model,
                                std::to_string(steps)},
                               options())
                           .out);
  }
  return result;
}

// Each logical rank had the same samples in a step whoever played it, and in each epoch each sample
// was in one step.
testing::AssertionResult has_each_sample_once(const Folder& folder, int steps) {
  std::map<std::pair<int, int>, std::string> samples;  // by step and logical rank
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (!entry.path().filename().string().starts_with("samples.")) continue;
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      int step = 0;
      int player = 0;
      words >> step >> player;
      std::string rest;
      std::getline(words, rest);
      const auto [found, is_new] = samples.try_emplace({step, player}, rest);
      // A process may die while it writes.
      if (!is_new && found->second != rest && !found->second.starts_with(rest)) {
        return testing::AssertionFailure() << "step " << step << ", logical rank " << player
                                           << ": " << found->second << " and " << rest;
      }
    }
  }
  if (static_cast<int>(samples.size()) != steps * kRanks) {
    return testing::AssertionFailure()
           << samples.size() << " batches instead of " << steps * kRanks;
  }
  constexpr int kStepsPerEpoch = 7;
  std::map<int, std::set<std::string>> epochs;
  for (const auto& [place, rest] : samples) {
    std::istringstream words(rest);
    for (std::string word; words >> word;) {
      if (!epochs[place.first / kStepsPerEpoch].insert(word).second) {
        return testing::AssertionFailure() << "sample " << word << " twice, at step " << place.first;
      }
    }
  }
  return testing::AssertionSuccess();
}

struct Case {
  std::string model;
  std::string shard;
  std::string phase;
};

class ElasticPhases : public testing::TestWithParam<Case> {};

TEST_P(ElasticPhases, AKilledRankChangesNoBit) {
  const Folder folder;
  const auto& [model, shard, phase] = GetParam();
  const JobResult job = run_job(
      arguments(folder, model, 14, {"shard=" + shard, "kill=2:5:" + phase}), options());
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
  expect_same_weights("gpt", 120, {"kill=1:5:forward"},
                      {"4 ranks at step ", "1 joined; ", "MB of state were sent"});
}

TEST(ElasticJob, AReplacementThatDiesIsReplaced) {
  expect_same_weights("cnn", 200, {"kill=1:5:forward", "kill=1+:0:reform"},
                      {"rank 1 is replaced in 1 s", "1 joined"});
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
  const JobResult job = run_job(
      arguments(folder, "mlp", 100, {"sleep=10", "kill=1:5:forward"}, {"--min-ranks", "4"}),
      options());
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  EXPECT_TRUE(has(job.err, "3 ranks left, fewer than --min-ranks 4")) << job.err;
}

TEST(ElasticJob, NobodyIsLeft) {
  const Folder folder;
  const JobResult job =
      run_job(arguments(folder, "mlp", 100,
                        {"sleep=10", "kill=0:5:forward", "kill=1:5:forward", "kill=2:5:forward",
                         "kill=3:5:forward"}),
              options());
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  EXPECT_TRUE(has(job.err, "was killed by signal 9")) << job.err;
}

TEST(ElasticJob, AnErrorThatIsNoLossIsThrown) {
  const Folder folder;
  const JobResult job = run_job(
      arguments(folder, "mlp", 30, {"throw=1:5"}, {"--max-replacements", "0"}), options());
  EXPECT_EQ(job.code, 0) << job.err;  // the other ranks go on
  EXPECT_TRUE(has(job.err, "a fault of the script")) << job.err;
  EXPECT_TRUE(has(job.err, "rank 1 is not replaced any more")) << job.err;
}

TEST(ElasticJob, WithoutTheOptionARankThatIsLostEndsTheJob) {
  const Folder folder;
  const JobResult job = run_job({"run", "-n", "2", "--logical-ranks", "2", "--",
                                 LOCKSTEP_ELASTIC_TRAINER, folder.path() + "/run", "mlp", "1000",
                                 "exit=1:5:3"},
                                {.variables = {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_SEAT", "1"}}});
  EXPECT_NE(job.code, 0) << job.err;
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
      std::this_thread::sleep_for(std::chrono::milliseconds(in_this_run == 0 ? 1200 : 100) +
                                  std::chrono::microseconds(pick(400'000)));
      std::vector<pid_t> ranks;
      for (const pid_t pid : job.processes()) {
        std::ifstream command(text::format("/proc/{}/cmdline", pid));
        std::string name;
        std::getline(command, name, '\0');
        if (name == LOCKSTEP_ELASTIC_TRAINER) ranks.push_back(pid);
      }
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
