// The launcher when a file server or a name server does not answer: it stays awake, or is ended.

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "base/posix.h"
#include "base/text.h"
#include "support/carrier.h"
#include "support/has.h"
#include "support/job.h"

namespace lockstep::test {
namespace {

using Clock = std::chrono::steady_clock;

// While one exists, what `variable` names hangs in jobs that have its variables
// (programs/hang.cpp).
class Hang {
 public:
  explicit Hang(std::string variable, bool is_on = true)
      : variable_(std::move(variable)),
        file_(testing::TempDir() + text::format("hang-{}-{}", variable_, ::getpid())) {
    if (is_on) begin();
  }
  ~Hang() { end(); }
  Hang(const Hang&) = delete;
  Hang& operator=(const Hang&) = delete;

  void begin() const { std::ofstream(file_) << "x"; }
  void end() const { ::unlink(file_.c_str()); }
  JobOptions options() const {
    return {.variables = {{"LD_PRELOAD", LOCKSTEP_HANG},
                          {variable_, file_},
                          {"LOCKSTEP_SECRET", "VGhlIHNlY3JldCBvZiB0aGUgdGVzdHMsIGluIGJhc2U2NA=="}},
            .deadline = std::chrono::seconds(120)};
  }

 private:
  std::string variable_;
  std::string file_;
};

void wait_until_gone(const Job& job) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!job.processes().empty() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(job.processes().empty());
}

TEST(Hang, OfALogFileHoldsUpItsRankOnly) {
  const Hang hang("HANG_OPEN");
  const std::string folder = testing::TempDir() + text::format("hung-logs-{}", ::getpid());
  {
    Job job({"run", "-n", "2", "--log-dir", folder, "--", "ACTOR", "print ready", "sleep 600"},
            hang.options());
    job.wait_for_output("ready", 2);
    job.signal(SIGTERM);
    EXPECT_EQ(job.wait().code, 143) << job.err();
    EXPECT_TRUE(has(job.err(), "told to stop by signal 15")) << job.err();
    EXPECT_FALSE(has(job.err(), "did not end in time")) << job.err();
    EXPECT_TRUE(has(job.err(), "rank-0.log, rank-1.log are incomplete")) << job.err();
    wait_until_gone(job);
  }
  // More than is kept in memory: the ranks wait, the launcher says why, and nothing is lost.
  Job job({"run", "-n", "1", "--only-rank", "0", "--log-dir", folder, "--", "ACTOR",
           "lines 40000 100", "print done"},
          hang.options());
  job.wait_for_output("have taken nothing for 10 s");
  EXPECT_FALSE(has(job.out(), "done"));
  hang.end();
  EXPECT_EQ(job.wait().code, 0) << job.err();
  EXPECT_EQ(std::filesystem::file_size(folder + "/rank-0.log"), 40000U * 100 + 5);
  std::filesystem::remove_all(folder);
}

TEST(Hang, OfALogFileDoesNotKeepALauncherWhoseRanksHaveEnded) {
  const Hang hang("HANG_OPEN");
  const std::string folder = testing::TempDir() + text::format("hung-ends-{}", ::getpid());
  const auto arguments = [&](const std::string& end) {
    return std::vector<std::string>{"run", "-n",    "2",          "--log-dir", folder,
                                    "--",  "ACTOR", "print done", "sleep 2",   end};
  };
  Job good(arguments("exit 0"), hang.options());
  Job bad(arguments("exit 3"), hang.options());
  EXPECT_EQ(good.wait().code, 0) << good.err();
  EXPECT_EQ(bad.wait().code, 3) << bad.err();
  for (const Job* job : {&good, &bad}) {
    EXPECT_TRUE(has(job->out(), "[1] done\n")) << job->out();
    EXPECT_TRUE(has(job->err(), "have taken nothing for 10 s: the launcher waits")) << job->err();
    EXPECT_TRUE(has(job->err(), "rank-0.log, rank-1.log are incomplete")) << job->err();
    EXPECT_TRUE(has(job->err(), folder)) << job->err();
  }
  std::filesystem::remove_all(folder);
}

TEST(Hang, OfTheProgramItselfHoldsUpNobody) {
  const Hang hang("HANG_EXEC");
  Job job({"run", "-v", "-n", "2", "--", "ACTOR", "sleep 600"}, hang.options());
  job.wait_for_output("are processes");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait().code, 143) << job.err();
  EXPECT_FALSE(has(job.err(), "did not end in time")) << job.err();
  wait_until_gone(job);
}

TEST(Hang, OfTheNameServerHoldsUpNobody) {
  const Hang hang("HANG_NAMES");
  Job job({"run", "-n", "2", "--hosts", "2", "--host-rank", "1", "--master", "host.example:29500",
           "--", "ACTOR"},
          hang.options());
  job.wait_for_output("waiting for host 0");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait().code, 143) << job.err();
  EXPECT_FALSE(has(job.err(), "did not end in time")) << job.err();
}

// The name of host 0 is asked for again as nothing has come over the first connection, which then
// gets through: it is the one that counts.
TEST(Hang, OfTheNameServerDoesNotReplaceAConnectionThatHasJoined) {
  const Hang hang("HANG_NAMES", false);
  const int port = [] {
    const Fd free = listen_at("127.0.0.1", 0);
    sockaddr_in address{};
    socklen_t size = sizeof address;
    ::getsockname(free.get(), reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.sin_port);
  }();
  bool is_first = true;
  const Carrier carrier([&](const Fd&) {
    if (std::exchange(is_first, false)) {
      hang.begin();
      std::this_thread::sleep_for(std::chrono::seconds(8));
    }
    return start_connecting("127.0.0.1", port);
  });
  const auto start = [&](const char* host_rank, int master_port, const char* preloaded) {
    JobOptions options = hang.options();
    options.variables["LD_PRELOAD"] = preloaded;
    return std::make_unique<Job>(
        std::vector<std::string>{"run", "-n", "1", "--hosts", "2", "--host-rank", host_rank,
                                 "--master", text::format("127.0.0.1:{}", master_port), "--",
                                 "ACTOR", "print ready", "sleep 3"},
        options);
  };
  const auto first = start("0", port, "");
  const auto second = start("1", carrier.port(), LOCKSTEP_HANG);
  second->wait_for_output("ready");
  hang.end();
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
}

// The thread that works hangs. Nothing outlives the launcher all the same.
TEST(Hang, OfTheLauncherItselfKeepsNothingAlive) {
  const Hang hang("HANG_POLL", false);
  const std::vector<std::string> arguments = {
      "run", "-n", "2", "--stop-grace", "0", "--", "ACTOR", "daemon", "print ready", "sleep 600"};
  Job told(arguments, hang.options());
  Job killed(arguments, hang.options());
  Job told_twice(arguments, hang.options());
  for (Job* job : {&told, &killed, &told_twice}) job->wait_for_output("ready", 2);
  hang.begin();
  // Any event, to wake it up: then it hangs.
  for (Job* job : {&told, &killed, &told_twice}) job->signal(SIGUSR1);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  told.signal(SIGTERM);
  told_twice.signal(SIGTERM);
  killed.signal(SIGKILL);
  std::this_thread::sleep_for(std::chrono::seconds(2));
  told_twice.signal(SIGTERM);
  wait_until_gone(killed);
  wait_until_gone(told_twice);
  for (Job* job : {&told_twice, &told}) {
    EXPECT_EQ(job->wait().code, 143) << job->err();
    EXPECT_TRUE(has(job->err(), "did not end in time after signal 15; all ranks were killed"))
        << job->err();
    EXPECT_TRUE(job->processes().empty());
  }
}

}  // namespace
}  // namespace lockstep::test
