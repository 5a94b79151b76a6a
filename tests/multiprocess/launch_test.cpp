// `lockstep run` on one host, as a person types it: what ranks get, what is printed, and how jobs
// end.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "base/posix.h"
#include "base/text.h"
#include "launch/cores.h"
#include "support/has.h"
#include "support/job.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::ranges::sort(lines);
  return lines;
}

// One sentence, and nothing started.
TEST(Launch, BadArgumentsAreOneSentenceAndExitCode2) {
  const std::string file = testing::TempDir() + "not-executable";
  std::ofstream(file) << "no program";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "say what to do: run, top, jobs, scale, inspect, verify, doctor, secret or completion"},
      {{"dance"}, "dance"},
      {{"inspect"}, "path"},
      {{"inspect", "a", "b"}, "one path, or --diff and two"},
      {{"inspect", "--diff", "a"}, "one path, or --diff and two"},
      {{"verify"}, "path"},
      {{"verify", "a"}, "path"},
      {{"verify", "a", "b", "c"}, "c"},
      {{"run", "--hash-every", "0", "--", "true"}, "--hash-every"},
      {{"run", "--hash-every", "often", "--", "true"}, "--hash-every"},
      {{"run", "--hash-log", "a.jsonl", "--", "true"}, "--hash-every"},
      {{"run", "--what", "--", "true"}, "--what"},
      {{"run", "-n", "0", "--", "true"}, "-n is '0'"},
      {{"run", "-n", "-3", "--", "true"}, "-n"},
      {{"run", "-n", "two", "--", "true"}, "-n is 'two'"},
      {{"run", "-n", "2x", "--", "true"}, "-n is '2x'"},
      {{"run", "-n"}, "--ranks"},
      {{"run", "-n", "2", "true"}, "no -- before the program"},
      {{"run", "-n", "2"}, "no -- before the program"},
      {{"run", "-n", "2", "--"}, "no program behind --"},
      {{"run", "--", "no-such-program"},
       "cannot start 'no-such-program': there is no such program"},
      {{"run", "--", "./no/such/program"}, "there is no such program"},
      {{"run", "--", file}, "may not be executed"},
      {{"run", "--", "/tmp"}, "it is a folder"},
      {{"run", "--bind", "somehow", "--", "true"}, "--bind"},
      {{"run", "-n", "2", "--only-rank", "2", "--", "true"}, "ranks are 0 to 1"},
      {{"run", "--max-restarts", "-1", "--", "true"}, "--max-restarts"},
      {{"run", "--stop-grace", "soon", "--", "true"}, "--stop-grace"},
      {{"run", "--hosts", "2", "--", "true"}, "--master"},
      {{"run", "--hosts", "2", "--host-rank", "2", "--master", "a:1", "--", "true"}, "0 to 1"},
      {{"run", "--hosts", "2", "--master", "nowhere", "--", "true"}, "HOST:PORT"},
      {{"run", "--hosts", "2", "--master", "a:99999", "--", "true"}, "HOST:PORT"},
      {{"run", "--log-dir", file + "/x", "--", "true"}, "--log-dir"}};
  for (const auto& [arguments, part] : cases) {
    const JobResult result = run_job(arguments);
    EXPECT_EQ(result.code, 2) << part;
    EXPECT_EQ(result.out, "") << part;
    EXPECT_TRUE(has(result.err, part)) << result.err;
    EXPECT_TRUE(result.err.starts_with("lockstep: ")) << result.err;
    EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
  }
}

TEST(Launch, HelpVersionAndCompletion) {
  EXPECT_TRUE(has(run_job({"--help"}).out, "lockstep run -n 4 -- ./train"));
  EXPECT_TRUE(has(run_job({"run", "--help"}).out, "--max-restarts"));
  EXPECT_TRUE(has(run_job({"--version"}).out, "lockstep 0."));
  const JobResult completion = run_job({"completion"});
  EXPECT_TRUE(has(completion.out, "--max-restarts")) << completion.out;
  // bash itself has the last word.
  std::ofstream(testing::TempDir() + "completion.sh")
      << completion.out << "COMP_WORDS=(lockstep run --max-res); COMP_CWORD=2; _lockstep\n"
      << "echo \"${COMPREPLY[*]}\"\n";
  const JobResult bash =
      run_job({"run", "-n", "1", "--", "bash", testing::TempDir() + "completion.sh"});
  EXPECT_EQ(bash.out, "[0] --max-restarts\n") << bash.err;
}

TEST(Launch, RanksKnowTheirPlace) {
  const JobResult result = run_job({"run", "-n", "3", "--", "ACTOR", "env RANK", "env WORLD_SIZE",
                                    "env LOCAL_RANK", "env LOCAL_WORLD_SIZE", "env MASTER_ADDR",
                                    "env GROUP_RANK", "env TORCHELASTIC_RESTART_COUNT"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (int rank = 0; rank < 3; ++rank) {
    for (const std::string& expected :
         {text::format("[{}] RANK={}\n", rank, rank), text::format("[{}] WORLD_SIZE=3\n", rank),
          text::format("[{}] LOCAL_RANK={}\n", rank, rank),
          text::format("[{}] LOCAL_WORLD_SIZE=3\n", rank),
          text::format("[{}] MASTER_ADDR=127.0.0.1\n", rank),
          text::format("[{}] GROUP_RANK=0\n", rank),
          text::format("[{}] TORCHELASTIC_RESTART_COUNT=0\n", rank)}) {
      EXPECT_TRUE(has(result.out, expected)) << expected << result.out;
    }
  }
}

TEST(Launch, RanksKnowWhereHashesGo) {
  const auto variables = [](const std::vector<std::string>& options) {
    std::vector<std::string> arguments = {"run", "-n", "1"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    for (const char* const one :
         {"--", "ACTOR", "env LOCKSTEP_HASH_EVERY", "env LOCKSTEP_HASH_LOG"}) {
      arguments.emplace_back(one);
    }
    return run_job(arguments).out;
  };
  const std::string folder = std::filesystem::current_path();
  EXPECT_EQ(variables({"--hash-every", "50"}),
            text::format("[0] LOCKSTEP_HASH_EVERY=50\n[0] LOCKSTEP_HASH_LOG={}/{}\n", folder,
                         "lockstep-hashes.jsonl"));
  EXPECT_EQ(variables({"--hash-every", "7", "--hash-log", "a.jsonl"}),
            text::format("[0] LOCKSTEP_HASH_EVERY=7\n[0] LOCKSTEP_HASH_LOG={}/a.jsonl\n", folder));
  EXPECT_FALSE(has(variables({}), "jsonl"));
}

// The exit code of verify: 1 is a difference.
TEST(Launch, RunsThatCannotBeComparedAreExitCode2) {
  const std::string log = testing::TempDir() + "a-log.jsonl";
  std::ofstream(log) << R"({"format":"lockstep hashes","version":1,"every":1,"ranks":1,)"
                     << R"("logical_ranks":0,"seed":1,"threads":1,"platform":""})"
                        "\n"
                     << R"({"step":0,"model":"","hash":"00","tensors":{"w":"00"}})"
                        "\n";
  JobResult result = run_job({"verify", log, log});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "equal: 1 common step, 0\n");
  result = run_job({"verify", log, log + ".missing"});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(has(result.err, "a-log.jsonl.missing")) << result.err;
}

TEST(Launch, RanksGetTheirShareOfCores) {
  const Machine machine = this_machine();
  for (const auto& [bind, text] :
       {std::pair(Bind::kCore, "core"), std::pair(Bind::kNone, "none")}) {
    for (const int ranks : {1, 2}) {
      const JobResult result = run_job({"run", "-n", std::to_string(ranks), "--bind", text, "--",
                                        "ACTOR", "cpus", "env OMP_NUM_THREADS"});
      const auto shares = split_cores(machine, ranks, bind);
      for (int rank = 0; rank < ranks; ++rank) {
        const Share& share = shares[static_cast<std::size_t>(rank)];
        std::vector<int> cpus = share.cpus;  // none: all of this process's
        for (const Cpu& cpu : machine.cpus) {
          if (share.cpus.empty()) cpus.push_back(cpu.id);
        }
        EXPECT_TRUE(has(result.out, text::format("[{}] cpus {} first {}\n", rank, cpus.size(),
                                                 *std::ranges::min_element(cpus))))
            << result.out;
        EXPECT_TRUE(has(result.out, text::format("[{}] OMP_NUM_THREADS={}\n", rank, share.threads)))
            << result.out;
      }
    }
  }
  // What the user has set stays.
  const JobResult set = run_job({"run", "-n", "1", "--", "ACTOR", "env OMP_NUM_THREADS"},
                                {.variables = {{"OMP_NUM_THREADS", "7"}}});
  EXPECT_EQ(set.out, "[0] OMP_NUM_THREADS=7\n");
}

TEST(Launch, RanksInheritNothingElse) {
  int expected = 6;                    // standard streams, the store, blames, and gauges
  for (int fd = 3; fd < 1024; ++fd) {  // what whoever runs the tests passes on to everybody
    const int flags = ::fcntl(fd, F_GETFD);
    expected += flags >= 0 && (flags & FD_CLOEXEC) == 0 ? 1 : 0;
  }
  const JobResult result = run_job({"run", "-n", "2", "--", "ACTOR", "fds", "blocked"});
  EXPECT_EQ(sorted_lines(result.out),
            (std::vector<std::string>{"[0] blocked 000", text::format("[0] fds {}", expected),
                                      "[1] blocked 000", text::format("[1] fds {}", expected)}));
}

TEST(Launch, OnlyRank0ReadsTheInput) {
  const JobResult result =
      run_job({"run", "-n", "2", "--", "ACTOR", "stdin"}, {.input = "first\nsecond\n"});
  EXPECT_EQ(sorted_lines(result.out),
            (std::vector<std::string>{"[0] end of input", "[0] read first", "[0] read second",
                                      "[1] end of input"}));
}

TEST(Launch, AnyNumberOfRanksStartsAndStops) {
  const JobResult result = run_job({"run", "-n", "64", "--", "ACTOR", "env RANK"});
  EXPECT_EQ(result.code, 0) << result.err;
  const auto lines = sorted_lines(result.out);
  ASSERT_EQ(lines.size(), 64U);
  EXPECT_EQ(lines.front(), "[ 0] RANK=0");
  EXPECT_EQ(lines.back(), "[63] RANK=63");
}

TEST(Launch, DryRunStartsNothing) {
  const JobResult result =
      run_job({"run", "-n", "2", "--dry-run", "--", "ACTOR", "print I was started"});
  EXPECT_EQ(result.code, 0);
  EXPECT_TRUE(has(result.out, "local rank 1, ")) << result.out;
  EXPECT_TRUE(has(result.out, "RANK=1")) << result.out;
  EXPECT_TRUE(has(result.out, "OMP_NUM_THREADS=")) << result.out;
  EXPECT_FALSE(has(result.out, "[1]")) << result.out;
}

TEST(Launch, LinesAreWholeAndSayWhoseTheyAre) {
  const JobResult result = run_job({"run", "-n", "2", "--", "ACTOR", "raw half a", "sleep 0.05",
                                    "print  line", "error to the other stream", "raw no end"});
  EXPECT_EQ(sorted_lines(result.out), (std::vector<std::string>{"[0] half a line", "[0] no end",
                                                                "[1] half a line", "[1] no end"}));
  EXPECT_EQ(sorted_lines(result.err),
            (std::vector<std::string>{"[0] to the other stream", "[1] to the other stream"}));
}

TEST(Launch, OnlyOneRankIsShownAndAllAreLogged) {
  const std::string folder = testing::TempDir() + text::format("logs-{}", ::getpid());
  const JobResult result = run_job({"run", "-n", "3", "--only-rank", "1", "--log-dir", folder, "--",
                                    "ACTOR", "env RANK", "error said"});
  EXPECT_EQ(result.out, "[1] RANK=1\n");
  EXPECT_EQ(result.err, "[1] said\n");
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(sorted_lines(read_small_file(text::format("{}/rank-{}.log", folder, rank))),
              (std::vector<std::string>{text::format("RANK={}", rank), "said"}));
  }
  std::filesystem::remove_all(folder);
}

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 0777;
}

TEST(Launch, LogFilesAreOpenToThoseToWhomTheirFolderIs) {
  const std::string folder = testing::TempDir() + text::format("log-modes-{}", ::getpid());
  const mode_t umask_before = ::umask(022);
  const auto log = [&](const std::string& into) {
    EXPECT_EQ(run_job({"run", "-n", "1", "--log-dir", into, "--", "ACTOR", "print hello"}).code, 0);
    return mode_of(into + "/rank-0.log");
  };
  EXPECT_EQ(log(folder + "/made/"), 0600U);
  EXPECT_EQ(mode_of(folder + "/made"), 0700U);
  EXPECT_EQ(mode_of(folder), 0755U);
  EXPECT_EQ(log(folder), 0644U);
  ::chmod(folder.c_str(), 0750);
  EXPECT_EQ(log(folder), 0640U);
  ::umask(umask_before);
  std::filesystem::remove_all(folder);
}

// A folder that others may write to: what they have put there is neither followed nor written.
TEST(Launch, ALogFileIsNeverAnotherFile) {
  const std::string folder = testing::TempDir() + text::format("log-links-{}", ::getpid());
  std::filesystem::create_directories(folder);
  const std::string victim = folder + "/victim";
  const std::string log = folder + "/rank-0.log";
  std::ofstream(victim) << "precious";
  const auto run = [&](const std::string& script) {
    return run_job({"run", "-n", "1", "--log-dir", folder, "--", "ACTOR", "print hello", script});
  };
  const auto make = [&](const std::string& kind) {
    std::filesystem::remove(log);
    if (kind == "link") std::filesystem::create_symlink(victim, log);
    if (kind == "lost link") std::filesystem::create_symlink(folder + "/nowhere", log);
    if (kind == "fifo") {
      ASSERT_EQ(::mkfifo(log.c_str(), 0666), 0);
    }
    if (kind == "second name") std::filesystem::create_hard_link(victim, log);
  };
  for (const char* kind : {"link", "lost link", "fifo"}) {
    for (const char* script : {"sleep 600", "exit 0"}) {  // seen while it runs, and too late
      make(kind);
      const JobResult result = run(script);
      EXPECT_EQ(result.code, 126) << kind << result.err;
      EXPECT_TRUE(has(result.err, "rank-0.log: it is there already, and is no regular file"))
          << kind << result.err;
    }
  }
  make("second name");
  EXPECT_EQ(run("exit 0").code, 0);
  EXPECT_EQ(read_small_file(log), "hello\n");
  EXPECT_EQ(read_small_file(victim), "precious");
  EXPECT_FALSE(std::filesystem::exists(folder + "/nowhere"));
  // What an earlier job has left is replaced; a later generation goes on in the same file.
  const JobResult twice =
      run_job({"run", "-n", "1", "--max-restarts", "1", "--log-dir", folder, "--", "ACTOR",
               "env TORCHELASTIC_RESTART_COUNT", "@gen0 exit 1"});
  EXPECT_EQ(twice.code, 0) << twice.err;
  EXPECT_EQ(read_small_file(log), "TORCHELASTIC_RESTART_COUNT=0\nTORCHELASTIC_RESTART_COUNT=1\n");
  std::filesystem::remove_all(folder);
}

TEST(Launch, ManyRanksHaveEnoughOpenFilesAndTheirOwnLimit) {
  const JobResult result = run_job(
      {"run", "-n", "1", "--", "bash", "-c",
       text::format("ulimit -S -n 50; {} run -n 40 -- bash -c 'ulimit -S -n'", LOCKSTEP_PROGRAM)});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(has(result.out, "[39] 50\n")) << result.out;
}

// While one rank is a zombie, so that others can see how it ended.
TEST(Launch, OrphansDoNotStayZombies) {
  Job job({"run", "-n", "2", "--", "ACTOR", "@1 exit 0", "sleep 1", "orphans 50", "print ready",
           "sleep 600"});
  job.wait_for_output("ready");
  std::set<pid_t> launcher = {job.pid()};
  const auto num_zombies = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const auto pid = static_cast<pid_t>(std::stol(name));
      const pid_t parent = parent_of(pid);
      if (parent == job.pid()) launcher.insert(pid);
      const bool is_zombie = describe_end(find_process(pid)) != "has ended";
      count += is_zombie && launcher.contains(parent) ? 1 : 0;
    }
    return count;
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::this_thread::sleep_for(std::chrono::seconds(1));  // they have ended
  while (num_zombies() != 1 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_EQ(num_zombies(), 1);  // the rank
}

TEST(Launch, TheFirstCauseIsNamedNotTheFirstEnd) {
  const JobResult result = run_job({"run", "-n", "3", "--", "ACTOR", "@1 told 0", "@2 told 0",
                                    "sleep 1", "error the reason", "exit 3"});
  EXPECT_EQ(result.code, 3) << result.err;
  const std::size_t report = result.err.find("lockstep: rank 0 (pid ");
  ASSERT_NE(report, std::string::npos) << result.err;
  const std::string text = result.err.substr(report);
  EXPECT_TRUE(has(text, "exited with code 3 after ")) << text;
  EXPECT_TRUE(has(text, "\n    the reason\n")) << text;
  // One that fails by itself is the cause, whoever is blamed.
  const JobResult other = run_job(
      {"run", "-n", "3", "--", "ACTOR", "@1 told 0", "@2 sleep 1", "@2 exit 4", "sleep 600"});
  EXPECT_EQ(other.code, 4) << other.err;
  EXPECT_TRUE(has(other.err, "lockstep: rank 2 (pid ")) << other.err;
}

// One that is blamed and goes on, or left without a failure: then who failed is the cause.
TEST(Launch, ARankThatIsBlamedMustFail) {
  const JobResult goes_on =
      run_job({"run", "-n", "2", "--", "ACTOR", "@1 told 0", "catch 15 0", "sleep 600"});
  EXPECT_EQ(goes_on.code, 134) << goes_on.err;
  EXPECT_TRUE(has(goes_on.err, "lockstep: rank 1 (pid ")) << goes_on.err;
  EXPECT_TRUE(has(goes_on.err, "Because rank 0: the first cause")) << goes_on.err;
  const JobResult left =
      run_job({"run", "-n", "2", "--", "ACTOR", "@0 exit 0", "sleep 1", "told 0"});
  EXPECT_EQ(left.code, 134) << left.err;
  EXPECT_TRUE(has(left.err, "lockstep: rank 1 (pid ")) << left.err;
  // Told to stop meanwhile: the failure came first.
  Job job({"run", "-n", "2", "--max-restarts", "5", "--", "ACTOR", "@1 told 0", "print ready",
           "sleep 600"});
  job.wait_for_output("terminate called");
  job.wait_for_output("ready");
  std::this_thread::sleep_for(milliseconds(500));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait().code, 134) << job.err();
  EXPECT_FALSE(has(job.err(), "restart")) << job.err();
}

// Whoever ends first, and whoever the failed one blames.
TEST(Launch, AFailureBesideRanksThatHaveSavedIsAFailure) {
  const std::vector<std::vector<std::string>> scripts = {
      {"@1 told 0", "sleep 1", "exit 75"},
      {"@0 exit 75", "sleep 1", "told 0"},
      {"@0 exit 75", "sleep 1", "exit 134"},
      {"@1 told 2", "@0 sleep 1", "@0 exit 75", "sleep 2", "exit 134"}};
  for (const auto& script : scripts) {
    std::vector<std::string> arguments = {"run", "-n", "3", "--", "ACTOR"};
    arguments.insert(arguments.end(), script.begin(), script.end());
    const JobResult result = run_job(arguments);
    EXPECT_EQ(result.code, 134) << script.front() << "\n" << result.err;
  }
}

TEST(Launch, AFailureIsReportedAtTheEnd) {
  const JobResult result =
      run_job({"run", "-n", "3", "--", "ACTOR", "@1 lines 30 20", "@1 error the reason",
               "catch 15 4", "@1 sleep 1", "@1 exit 3", "sleep 60"});
  EXPECT_EQ(result.code, 3);
  EXPECT_LT(result.seconds, 10);
  const std::size_t report = result.err.find("lockstep: rank 1 (pid ");
  ASSERT_NE(report, std::string::npos) << result.err;
  const std::string text = result.err.substr(report);
  EXPECT_TRUE(has(text, "exited with code 3 after ")) << text;
  EXPECT_TRUE(has(text, "\n    the reason\n")) << text;
  EXPECT_TRUE(has(text, "\n    0000000011")) << text;   // 20 lines: from the 12th of 30 on, and the
  EXPECT_FALSE(has(text, "\n    0000000010")) << text;  // reason
  EXPECT_TRUE(has(text, "Because of it:\n    rank 0 exited with code 4")) << text;
  EXPECT_TRUE(text.ends_with("lockstep: exit code 3\n")) << text;
}

// A program that catches no exception ends by SIGABRT, which no launcher sends.
TEST(Launch, WhatARankSaidBeforeItAbortedIsInTheReport) {
  const JobResult result =
      run_job({"run", "-n", "2", "--", "ACTOR", "@0 ignore 15", "@1 sleep 1", "@1 exit 3",
               "@0 sleep 2", "@0 error its own reason", "@0 raise 6"});
  EXPECT_EQ(result.code, 3);
  EXPECT_TRUE(has(result.err,
                  "Because of it:\n    rank 0 was killed by signal 6 (Aborted)\n      "
                  "its own reason\n"))
      << result.err;
}

// All ranks fail at about the same time: those that are not the first are stopped while they leave.
TEST(Launch, TheErrorOfARankThatWasStoppedIsInTheReport) {
  const JobResult result =
      run_job({"run", "-n", "3", "--", "ACTOR",
               "@0 error lockstep error on rank 0 (host a), join:", "@0 error   its own reason",
               "@0 sleep 1", "@0 lines 7 20", "@1 sleep 3", "@1 exit 3", "sleep 60"});
  EXPECT_EQ(result.code, 3);
  EXPECT_TRUE(has(result.err,
                  "Because of it:\n    rank 0 was killed by signal 15 (Terminated)\n      lockstep "
                  "error on rank 0 (host a), join:\n        its own reason\n"))
      << result.err;
  EXPECT_FALSE(has(result.err, "rank 2 was killed")) << result.err;  // it only waited
}

TEST(Launch, ASignalIsNamed) {
  const JobResult killed = run_job({"run", "-n", "2", "--", "ACTOR", "@0 raise 9", "sleep 60"});
  EXPECT_EQ(killed.code, 137);
  EXPECT_TRUE(has(killed.err, "rank 0 (pid ")) << killed.err;
  EXPECT_TRUE(has(killed.err, "was killed by signal 9 (Killed)")) << killed.err;
  EXPECT_TRUE(has(killed.err, "out-of-memory")) << killed.err;
  const JobResult crashed = run_job({"run", "-n", "2", "--", "ACTOR", "@1 raise 6", "sleep 60"});
  EXPECT_EQ(crashed.code, 134);
  EXPECT_TRUE(has(crashed.err, "rank 1 (pid ")) << crashed.err;
}

TEST(Launch, WhoDoesNotStopIsKilledAfterTheGraceTime) {
  Job job({"run", "-n", "2", "--stop-grace", "0.5", "--", "ACTOR", "ignore 15", "print ready",
           "@0 sleep 1", "@0 exit 1", "sleep 60"});
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(job.wait().code, 1);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took.count(), 1.5);
  EXPECT_LT(took.count(), 20);
  EXPECT_TRUE(job.processes().empty());
}

TEST(Launch, RanksChildrenGoToo) {
  for (const char* end : {"exit 0", "exit 1", "raise 9"}) {
    Job job({"run", "-n", "2", "--", "ACTOR", "daemon", end});
    job.wait();
    EXPECT_TRUE(job.processes().empty()) << end;
  }
}

TEST(Launch, SignalsReachTheRanks) {
  {
    Job job({"run", "-n", "2", "--", "ACTOR", "count 10"});
    job.wait_for_output("ready", 2);
    job.signal(SIGUSR1);
    EXPECT_EQ(job.wait().code, 0);
    EXPECT_TRUE(has(job.out(), "[0] caught 10") && has(job.out(), "[1] caught 10")) << job.out();
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Job job({"run", "-n", "2", "--", "ACTOR", "print ready", "sleep 60"});
    job.wait_for_output("ready", 2);
    job.signal(signal);
    EXPECT_EQ(job.wait().code, 128 + signal) << job.err();
    EXPECT_TRUE(has(job.err(), "told to stop by signal")) << job.err();
    EXPECT_TRUE(job.processes().empty());
  }
  // Ranks that end well after the signal have done what they were asked to.
  Job job({"run", "-n", "2", "--", "ACTOR", "catch 15 0", "print ready", "sleep 60"});
  job.wait_for_output("ready", 2);
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait().code, 0) << job.err();
}

TEST(Launch, ASecondInterruptIsImmediate) {
  Job job({"run", "-n", "2", "--stop-grace", "600", "--", "ACTOR", "ignore 2", "print ready",
           "sleep 600"});
  job.wait_for_output("ready", 2);
  job.signal(SIGINT);
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_FALSE(job.processes().empty());
  job.signal(SIGINT);
  EXPECT_EQ(job.wait().code, 130) << job.err();
  EXPECT_FALSE(has(job.err(), "the launcher's process")) << job.err();  // by itself, not by force
  EXPECT_TRUE(job.processes().empty());
}

TEST(Launch, RestartsAllWithANewGeneration) {
  const JobResult result = run_job({"run", "-n", "2", "--max-restarts", "2", "--", "ACTOR",
                                    "env TORCHELASTIC_RESTART_COUNT", "@1 @gen0 exit 5",
                                    "@gen0 sleep 60", "print done"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(has(result.err, "exited with code 5")) << result.err;
  EXPECT_TRUE(has(result.err, "restart 1 of 2 in 1 s")) << result.err;
  EXPECT_TRUE(has(result.out, "[0] TORCHELASTIC_RESTART_COUNT=1")) << result.out;
  EXPECT_TRUE(has(result.out, "[0] done") && has(result.out, "[1] done")) << result.out;
  const JobResult never =
      run_job({"run", "-n", "2", "--max-restarts", "1", "--", "ACTOR", "exit 6"});
  EXPECT_EQ(never.code, 6);
  EXPECT_TRUE(has(never.err, "restart 1 of 1")) << never.err;
  EXPECT_TRUE(never.err.ends_with("lockstep: exit code 6\n")) << never.err;
}

// Told to stop while it is stopping because of a failure: that is no time to start again.
TEST(Launch, AnInterruptDuringTheGraceTimeEndsTheJob) {
  Job job({"run", "-n", "2", "--max-restarts", "9", "--stop-grace", "600", "--", "ACTOR",
           "@1 catch 15 0", "@1 ignore 15", "print ready", "@0 sleep 0.5", "@0 exit 6",
           "sleep 600"});
  job.wait_for_output("ready", 2);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  job.signal(SIGTERM);
  std::this_thread::sleep_for(milliseconds(200));
  job.signal(SIGINT);
  EXPECT_EQ(job.wait().code, 6) << job.err();
  EXPECT_FALSE(has(job.err(), "restart")) << job.err();
}

// As batch systems do it: every process of the job gets the signal, and the ranks have their grace.
TEST(Launch, ASignalToAllProcessesCountsOnce) {
  Job job({"run", "-n", "2", "--", "ACTOR", "catch 15 0", "print ready", "sleep 600"});
  job.wait_for_output("ready", 2);
  for (const pid_t one : job.processes()) {
    if (read_small_file(text::format("/proc/{}/comm", one)) == "lockstep\n") ::kill(one, SIGTERM);
  }
  EXPECT_EQ(job.wait().code, 0) << job.err();
}

// As in "lockstep run ... &" of a script.
TEST(Launch, IgnoredSignalsDoNotKeepRanksAlive) {
  Job job({"run", "-n", "1", "--", "bash", "-c",
           text::format("trap '' QUIT INT; {} run -n 2 -- {} 'print ready' 'sleep 600' & "
                        "sleep 1; kill -9 $!; sleep 600",
                        LOCKSTEP_PROGRAM, LOCKSTEP_ACTOR)});
  job.wait_for_output("ready", 2);
  const auto gone = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto count = [&] {
    int actors = 0;
    for (const pid_t one : job.processes()) {
      actors += read_small_file(text::format("/proc/{}/comm", one)).starts_with("lockstep_test_a");
    }
    return actors;
  };
  while (count() > 0 && std::chrono::steady_clock::now() < gone) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(count(), 0);
}

TEST(Launch, ClosedStreamsHurtNobody) {
  Job job(
      {"run", "-n", "1", "--", "bash", "-c",
       text::format("{} run -n 2 -- {} 'print one' 'error two' 'exit 3' <&- >&- 2>&-; echo code $?",
                    LOCKSTEP_PROGRAM, LOCKSTEP_ACTOR)});
  EXPECT_EQ(job.wait().code, 0) << job.err();
  EXPECT_TRUE(has(job.out(), "code 3")) << job.out();
}

TEST(Launch, AnInterruptEndsThePauseBeforeARestart) {
  Job job({"run", "-n", "2", "--max-restarts", "9", "--", "ACTOR", "exit 6"});
  job.wait_for_output("restart 3 of 9 in 4 s");
  job.signal(SIGTERM);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(job.wait().code, 128 + SIGTERM) << job.err();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
}

TEST(Launch, JobsRunSideBySide) {
  std::vector<std::unique_ptr<Job>> jobs;
  for (int i = 0; i < 10; ++i) {
    jobs.push_back(std::make_unique<Job>(std::vector<std::string>{
        "run", "-n", "2", "--", "ACTOR", "sleep 0.3", text::format("exit {}", i)}));
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(jobs[static_cast<std::size_t>(i)]->wait().code, i);
    EXPECT_TRUE(jobs[static_cast<std::size_t>(i)]->left_files().empty());
  }
}

// 64 MB in CI, 1 GB under --soak; the other rank writes in between.
TEST(Launch, MuchOutputIsNeitherLostNorMixed) {
  const long lines = soak(64, 1024) * (1L << 20) / 64;
  JobOptions options;
  options.deadline = std::chrono::minutes(5);
  Job job({"run", "-n", "2", "--", "ACTOR", text::format("@0 lines {} 64", lines),
           text::format("@1 lines {} 64", lines / 16)},
          options);
  ASSERT_EQ(job.wait().code, 0) << job.err();
  ASSERT_EQ(job.out().size(), static_cast<std::size_t>((lines + lines / 16) * 68));
  long next[2] = {0, 0};
  for (std::size_t at = 0; at < job.out().size(); at += 68) {
    const int rank = job.out()[at + 1] - '0';
    ASSERT_TRUE(rank == 0 || rank == 1) << at;
    ASSERT_EQ(std::stol(job.out().substr(at + 4, 10)), next[rank]++) << at;
    ASSERT_EQ(job.out().substr(at + 14, 54), std::string(53, rank == 0 ? 'a' : 'b') + "\n") << at;
  }
}

TEST(Launch, NobodyWaitsForAReaderThatIsGone) {
  // head ends after one line; the ranks go on, and so does the launcher.
  Job job({"run", "-n", "1", "--", "bash", "-c",
           text::format("{} run -n 2 -- {} 'lines 100000 64' 'error done' | head -1",
                        LOCKSTEP_PROGRAM, LOCKSTEP_ACTOR)});
  EXPECT_EQ(job.wait().code, 0) << job.err();
  EXPECT_TRUE(has(job.err(), "[0] done") && has(job.err(), "[1] done")) << job.err();
}

TEST(Launch, OnATerminal) {
  Job job({"run", "-n", "2", "--", "ACTOR", "bar 10%", "bar 20%", "print ready", "sleep 60"},
          {.has_terminal = true});
  job.wait_for_output("ready", 2);
  EXPECT_TRUE(has(job.out(), "\x1b[31m[0] \x1b[0mready")) << job.out();
  EXPECT_TRUE(has(job.out(), "\x1b[32m[1] \x1b[0m20%\x1b[K\r")) << job.out();
  job.type("\x03");  // Ctrl-C
  EXPECT_EQ(job.wait().code, 130) << job.out();
  EXPECT_TRUE(has(job.out(), "told to stop by signal 2 (Interrupt)")) << job.out();
  EXPECT_TRUE(job.processes().empty());
}

TEST(Launch, CtrlCTwiceOnATerminal) {
  Job job({"run", "-n", "2", "--stop-grace", "600", "--", "ACTOR", "ignore 2", "print ready",
           "sleep 600"},
          {.has_terminal = true});
  job.wait_for_output("ready", 2);
  job.type("\x03");
  job.wait_for_output("^C");
  std::this_thread::sleep_for(milliseconds(100));
  job.type("\x03");
  EXPECT_EQ(job.wait().code, 130) << job.out();
  EXPECT_FALSE(has(job.out(), "the launcher's process")) << job.out();
  EXPECT_TRUE(job.processes().empty());
}

// Kills one process of a job, of any kind, at any moment: nothing may be left.
TEST(Launch, RandomDeathsLeaveNothingBehind) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (int round = 0; round < soak(15, 100); ++round) {
    Job job({"run", "-n", "3", "--stop-grace", "0.2", "--", "ACTOR", "daemon", "print ready",
             "sleep 600"});
    if (round % 3 != 0) job.wait_for_output("ready", 1 + static_cast<int>(random() % 3));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    const auto processes = job.processes();
    ASSERT_FALSE(processes.empty());
    const pid_t victim = processes[random() % processes.size()];
    ::kill(victim, SIGKILL);
    // A grandchild's death is its parent's affair; the job is ended another way.
    std::this_thread::sleep_for(milliseconds(50));
    if (is_alive(find_process(job.pid()))) job.signal(SIGTERM);
    EXPECT_NE(job.wait().text(), "exited with code 0") << "seed " << seed << " round " << round;
    const auto gone = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!job.processes().empty() && std::chrono::steady_clock::now() < gone) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    EXPECT_TRUE(job.processes().empty()) << "seed " << seed << " round " << round;
    EXPECT_TRUE(job.left_files().empty()) << "seed " << seed << " round " << round;
  }
}

TEST(Launch, WaitingCostsNothing) {
  Job job({"run", "-n", "2", "--", "ACTOR", "print ready", "sleep 2"});
  job.wait_for_output("ready", 2);
  std::this_thread::sleep_for(milliseconds(300));
  const auto usage = [&] {  // ticks of user and system time, and resident bytes, of the launcher
    long ticks = 0;
    long bytes = 0;
    for (const pid_t pid : job.processes()) {
      if (!has(read_small_file(text::format("/proc/{}/cmdline", pid)), "--")) continue;
      if (!read_small_file(text::format("/proc/{}/comm", pid)).starts_with("lockstep")) continue;
      std::istringstream stat(read_small_file(text::format("/proc/{}/stat", pid)));
      std::string field;
      for (int i = 1; i <= 15; ++i) {
        stat >> field;
        if (i == 14 || i == 15) ticks += std::stol(field);
      }
      std::istringstream rollup(read_small_file(text::format("/proc/{}/smaps_rollup", pid)));
      for (std::string line; std::getline(rollup, line);) {
        if (line.starts_with("Pss:")) bytes += std::stol(line.substr(4)) * 1024;
      }
    }
    return std::pair(ticks, bytes);
  };
  const auto [before, bytes] = usage();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const auto [after, _] = usage();
  EXPECT_LE(after - before, 1);
  EXPECT_GT(bytes, 0);
#ifndef LOCKSTEP_SANITIZED
  EXPECT_LT(bytes, 10 << 20);
#endif
  EXPECT_EQ(job.wait().code, 0);
}

TEST(Doctor, SaysWhatThereIs) {
  const JobResult result = run_job({"doctor"});
  EXPECT_TRUE(result.code == 0 || result.code == 1) << result.err;
  for (const char* subject : {"cores", "cpu quota", "NUMA", "memory", "shared memory", "huge pages",
                              "open files", "engines", "LibTorch", "addresses"}) {
    EXPECT_TRUE(has(result.out, subject)) << result.out;
  }
}

}  // namespace
}  // namespace lockstep::test
