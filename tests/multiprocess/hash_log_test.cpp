// Logs of hashes: what trainings write, and what `lockstep verify` says of them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ddp/platform.h"
#include "launch/verify.h"
#include "multiprocess/run_models.h"
#include "support/has.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

struct Run {
  int ranks = 1;
  int logical_ranks = 8;
  std::int64_t steps = 7;
  Shard shard = Shard::kNone;
  int perturbed_step = -1;       // after which a bit of middle.bias changes
  std::string checkpoints = {};  // where it is saved at the end, and resumed from
  std::uint64_t seed = 5;
};

void train(const World& world, const Run& run) {
  at::set_num_threads(1);
  seed_all(run.seed, world);
  Mlp model;
  const DdpOptions options{.shard = run.shard, .shard_min_bytes = 0};
  DistributedDataParallel ddp(model, world, options);
  optim::Sharded<optim::AdamW> optimizer(model->parameters(), to::AdamWOptions(1e-2));
  std::optional<Checkpointer> checkpoints;
  std::int64_t step = 0;
  if (!run.checkpoints.empty()) {
    checkpoints.emplace(run.checkpoints, world);
    checkpoints->add(model).add(optimizer).add(ddp);
    step = checkpoints->load_latest().step;
  }
  for (; step < run.steps; ++step) {
    for (bool is_last = false; !is_last;) {
      const Turn turn = ddp.play();
      is_last = turn.is_last;
      loss_of(model->forward(turn.logical_rank, static_cast<int>(step))).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
    if (step + 1 == run.perturbed_step) {
      const at::NoGradGuard no_grad;
      ddp.change_parameters([&] { model->middle->bias[3].mul_(1 + 1e-6); });
    }
  }
  if (checkpoints) checkpoints->save(step);
}

RankResults train_on_ranks(const Run& run, const std::string& log, int every = 2) {
  return run_ranks(
      run.ranks, [&](int) { train(World::join({.logical_ranks = run.logical_ranks}), run); },
      {.variables = {{"LOCKSTEP_HASH_EVERY", std::to_string(every)}, {"LOCKSTEP_HASH_LOG", log}}});
}

std::string lines_of(const std::string& path, std::string_view part) {
  std::ifstream file(path);
  std::string found;
  for (std::string line; std::getline(file, line);) {
    if (has(line, part)) found += line + "\n";
  }
  return found;
}

class HashLogs : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  const TempFolder folder_;
};

TEST_F(HashLogs, AreTheSameOnAnyNumberOfRanks) {
  ASSERT_TRUE(all_passed(train_on_ranks({.ranks = 1}, path("1"))));
  const std::string entries = lines_of(path("1"), "\"step\"");
  EXPECT_EQ(std::ranges::count(entries, '\n'), 4) << entries;  // 0, 2, 4, 6
  EXPECT_TRUE(has(entries, R"({"step":6,"model":"","hash":")")) << entries;
  EXPECT_TRUE(has(entries, R"("tensors":{"first.weight":")")) << entries;
  EXPECT_TRUE(lines_of(path("1"), "format")
                  .starts_with(R"({"format":"lockstep hashes","version":1,"every":2,"ranks":1,)"
                               R"("logical_ranks":8,"seed":5,"threads":1,"platform":"LibTorch )"));
  for (const auto& [ranks, shard] :
       {std::pair(2, Shard::kNone), std::pair(3, Shard::kNone), std::pair(2, Shard::kOptimizer),
        std::pair(3, Shard::kGradients)}) {
    const std::string log = path(std::to_string(ranks) + std::to_string(static_cast<int>(shard)));
    ASSERT_TRUE(all_passed(train_on_ranks({.ranks = ranks, .shard = shard}, log)));
    EXPECT_EQ(lines_of(log, "\"step\""), entries) << ranks;
    EXPECT_EQ(verify(path("1"), log).text, "equal: 4 common steps, 0 to 6\n");
  }
}

TEST_F(HashLogs, TheFirstHashAfterAChangeNamesTheTensor) {
  for (const int ranks : {1, 2}) {
    const std::string right = path("right" + std::to_string(ranks));
    const std::string wrong = path("wrong" + std::to_string(ranks));
    ASSERT_TRUE(all_passed(train_on_ranks({.ranks = ranks}, right)));
    ASSERT_TRUE(all_passed(train_on_ranks({.ranks = ranks, .perturbed_step = 4}, wrong)));
    Report report = verify(right, wrong);
    EXPECT_TRUE(has(report.text,
                    "differ: first at step 4, in middle.bias, alone of 6 tensors; equal up to "
                    "step 2\n2 of 4 common steps differ\n"))
        << report.text;
    EXPECT_EQ(report.code, 1);
    // Between two hashes: it has spread.
    const std::string between = path("between" + std::to_string(ranks));
    ASSERT_TRUE(all_passed(train_on_ranks({.ranks = ranks, .perturbed_step = 3}, between)));
    report = verify(right, between);
    EXPECT_TRUE(has(report.text, "differ: first at step 4")) << report.text;
    EXPECT_TRUE(has(report.text, "equal up to step 2")) << report.text;
  }
}

TEST_F(HashLogs, AWorldOfOneWithoutLogicalRanksHasThem) {
  for (const char* const log : {"a", "b"}) {
    ASSERT_TRUE(all_passed(train_on_ranks({.logical_ranks = 0}, path(log), 3)));
  }
  EXPECT_EQ(verify(path("a"), path("b")).text, "equal: 3 common steps, 0 to 6\n");
  ASSERT_TRUE(all_passed(train_on_ranks({.logical_ranks = 0, .seed = 6}, path("c"), 3)));
  const std::string text = verify(path("a"), path("c")).text;
  EXPECT_TRUE(has(text, "warning: the seed is 5 in")) << text;
}

TEST_F(HashLogs, AResumedRunGoesOnInItsLog) {
  ASSERT_TRUE(all_passed(train_on_ranks({.ranks = 2, .steps = 9}, path("whole"))));
  const std::string runs = path("runs");
  ASSERT_TRUE(
      all_passed(train_on_ranks({.ranks = 3, .steps = 4, .checkpoints = runs}, path("resumed"))));
  ASSERT_TRUE(
      all_passed(train_on_ranks({.ranks = 1, .steps = 9, .checkpoints = runs}, path("resumed"))));
  EXPECT_EQ(verify(path("whole"), path("resumed")).text, "equal: 5 common steps, 0 to 8\n");
  EXPECT_EQ(lines_of(path("resumed"), "\"step\""), lines_of(path("whole"), "\"step\""));
  // A process that was killed while it wrote leaves half a line.
  const auto half = std::filesystem::file_size(path("resumed")) - 20;
  std::filesystem::resize_file(path("resumed"), half);
  ASSERT_TRUE(
      all_passed(train_on_ranks({.ranks = 2, .steps = 13, .checkpoints = runs}, path("resumed"))));
  const std::string text = verify(path("whole"), path("resumed")).text;
  EXPECT_TRUE(has(text, "equal: 4 common steps, 0 to 6\n")) << text;
  EXPECT_TRUE(has(text, "is incomplete and was ignored")) << text;
  EXPECT_TRUE(has(text, "only in " + path("resumed") + ": 2 steps, 10 to 12")) << text;
}

// Of runs on different numbers of ranks.
TEST_F(HashLogs, CheckpointsAreComparedAsWell) {
  for (const int ranks : {1, 2}) {
    const std::string runs = path("runs" + std::to_string(ranks));
    for (const std::int64_t steps : {3, 6}) {
      ASSERT_TRUE(all_passed(train_on_ranks({.ranks = ranks,
                                             .steps = steps,
                                             .perturbed_step = ranks == 2 ? 5 : -1,
                                             .checkpoints = runs},
                                            path("log"), 100)));
    }
  }
  const Report report = verify(path("runs1"), path("runs2"));
  EXPECT_TRUE(report.text.starts_with("differ: first at step 6, in ")) << report.text;
  EXPECT_TRUE(has(report.text, "; equal up to step 3\n")) << report.text;
}

TEST_F(HashLogs, AFileThatCannotBeOpenedIsAnErrorOnAllRanks) {
  const std::string other = path("other");
  std::ofstream(other) << "int main() {}\n";
  for (const int ranks : {1, 2}) {
    for (const auto& [log, part] : {std::pair(path("no/folder"), "No such file or directory"),
                                    std::pair(folder_.path(), "Is a directory"),
                                    std::pair(std::string("/dev/full"), "No space left"),
                                    std::pair(other, "is not a log of hashes")}) {
      const auto results =
          run_ranks(ranks,
                    [&, &part = part, &log = log](int) {
                      const World world = World::join();
                      Mlp model;
                      try {
                        const DistributedDataParallel ddp(model, world);
                        ADD_FAILURE() << "no error";
                      } catch (const Error& error) {
                        EXPECT_EQ(error.kind(),
                                  has(part, "not a log") ? ErrorKind::kUsage : ErrorKind::kSystem);
                        EXPECT_TRUE(has(error.what(), part)) << error.what();
                        EXPECT_TRUE(has(error.what(), log)) << error.what();
                      }
                    },
                    {.variables = {{"LOCKSTEP_HASH_EVERY", "1"}, {"LOCKSTEP_HASH_LOG", log}}});
      EXPECT_TRUE(all_passed(results)) << log;
    }
  }
  EXPECT_EQ(std::filesystem::file_size(other), 14U);
}

// On one rank: the limit is for memory files, too, and joining and leaving write to one.
TEST_F(HashLogs, AWriteThatFailsIsAWarning) {
  const auto results = run_ranks(
      1,
      [](int) {
        const World world = World::join({.logical_ranks = 8});
        std::signal(SIGXFSZ, SIG_IGN);
        rlimit limit{};
        ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
        const rlimit small{650 + platform().size(), limit.rlim_max};  // of an entry and a half
        ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
        train(world, {});
        ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
      },
      {.variables = {{"LOCKSTEP_HASH_EVERY", "1"}, {"LOCKSTEP_HASH_LOG", path("log")}}});
  ASSERT_TRUE(all_passed(results));
  const std::string& output = results.front().output;
  EXPECT_TRUE(has(output, "warning: cannot write hashes of the parameters to " + path("log")))
      << output;
  EXPECT_EQ(output.find("warning"), output.rfind("warning")) << output;
  const std::string text = verify(path("log"), path("log")).text;
  EXPECT_TRUE(has(text, "the last line is incomplete")) << text;
}

TEST_F(HashLogs, BadVariablesAreClearErrors) {
  const auto wrap_error = [&](const std::string& every, int rank_of_it) {
    return run_ranks(2,
                     [](int) {
                       const World world = World::join();
                       Mlp model;
                       const DistributedDataParallel ddp(model, world);
                     },
                     {.rank_variables = [=](int rank) -> std::map<std::string, std::string> {
                       if (rank_of_it >= 0 && rank != rank_of_it) return {};
                       return {{"LOCKSTEP_HASH_EVERY", every}};
                     }});
  };
  for (const RankResult& one : wrap_error("often", -1)) {
    EXPECT_TRUE(has(one.output, "LOCKSTEP_HASH_EVERY is 'often'")) << one.output;
  }
  for (const RankResult& one : wrap_error("7", 0)) {
    EXPECT_TRUE(has(one.output, "hashes every 7 steps")) << one.output;
  }
  EXPECT_TRUE(all_passed(wrap_error("0", -1)));
}

// Their steps are those of each, in one file.
TEST_F(HashLogs, SeveralModelsShareAFile) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int rank) {
        const World world = World::join();
        Mlp one;
        Mlp other;
        DistributedDataParallel actor(one, world, DdpOptions{.name = "actor"});
        DistributedDataParallel critic(other, world, DdpOptions{.name = "critic"});
        for (int step = 0; step < 3; ++step) {
          (loss_of(one->forward(rank, step)) + loss_of(other->forward(rank, step))).backward();
        }
      },
      {.variables = {{"LOCKSTEP_HASH_EVERY", "1"}, {"LOCKSTEP_HASH_LOG", path("log")}}})));
  for (const char* const name : {"actor", "critic"}) {
    const std::string part = std::string("\"model\":\"") + name;
    EXPECT_EQ(std::ranges::count(lines_of(path("log"), part), '\n'), 3) << name;
  }
  EXPECT_EQ(verify(path("log"), path("log")).text, "equal: 3 common steps, 0 to 2\n");
}

}  // namespace
}  // namespace lockstep::test
