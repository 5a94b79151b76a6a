// `lockstep top` and `lockstep jobs`, as a person uses them on jobs that run, hang and end.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <memory>
#include <thread>

#include "base/text.h"
#include "multiprocess/elastic_run.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

// Jobs of these tests are in a folder of their own.
class TopOfJobs : public testing::Test {
 protected:
  JobOptions options() const {
    return {.variables = {{"OMP_NUM_THREADS", "1"}, {"XDG_RUNTIME_DIR", folder_.path()}},
            .deadline = kDeadline};
  }
  JobResult run(const std::vector<std::string>& arguments) const {
    return run_job(arguments, options());
  }
  std::unique_ptr<Job> start(const std::string& name, int steps = 100'000) const {
    return std::make_unique<Job>(
        std::vector<std::string>{"run", "-n", "2", "--job-id", name, "--logical-ranks", "2", "--",
                                 LOCKSTEP_ELASTIC_TRAINER, folder_.path() + "/run-" + name, "mlp",
                                 std::to_string(steps), "sleep=2", "log=" + folder_.path()},
        options());
  }
  // Until `lockstep top` shows it.
  std::string wait_for(const std::string& job, const std::string& text) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::string shown;
    while (!has(shown, text) && std::chrono::steady_clock::now() < limit) {
      shown = run({"top", job}).out;
    }
    EXPECT_TRUE(has(shown, text)) << shown;
    return shown;
  }
  static void end(Job& job) {
    job.signal(SIGTERM);
    job.wait();
  }

  const Folder folder_;
};

TEST_F(TopOfJobs, ShowsARunningJob) {
  const auto job = start("one");
  wait_for_step(folder_.path(), 20);
  const JobResult shown = run({"top"});  // the only one
  EXPECT_EQ(shown.code, 0) << shown.err;
  for (const char* const text :
       {"lockstep_test_elastic_trainer", "job one on 1 host, 2 ranks, generation 0", " steps/s   ",
        " samples/s   ", "slowest: rank ", " MB"}) {
    EXPECT_TRUE(has(shown.out, text)) << text << "\n" << shown.out;
  }
  const std::string jobs = run({"jobs"}).out;
  EXPECT_TRUE(has(jobs, "one ")) << jobs;
  struct stat status {};
  ASSERT_EQ(::stat((folder_.path() + "/lockstep/one.sock").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
  end(*job);
  EXPECT_TRUE(has(run({"jobs"}).out, "No job of this user runs on this host."));
  const JobResult gone = run({"top"});
  EXPECT_EQ(gone.code, 1);
  EXPECT_TRUE(has(gone.err, "No job of this user runs on this host.")) << gone.err;
  EXPECT_FALSE(fs::exists(folder_.path() + "/lockstep"));
}

// Nothing runs in the rank that hangs.
TEST_F(TopOfJobs, SaysWhoHangsAndWhoWaits) {
  const auto job = start("two");
  wait_for_step(folder_.path(), 20);
  const std::vector<pid_t> ranks = trainers_of(*job);
  ASSERT_EQ(ranks.size(), 2U);
  ::kill(ranks[1], SIGSTOP);
  wait_for("two", "is stopped (SIGSTOP");
  wait_for("two", "waits ");
  wait_for("two", " s for rank 1 (");
  wait_for("two", "no step for ");
  ::kill(ranks[1], SIGCONT);
  end(*job);
}

TEST_F(TopOfJobs, SeveralJobsMustBeNamed) {
  const auto one = start("one");
  const auto two = start("two");
  wait_for("one", "generation 0");
  wait_for("two", "generation 0");
  EXPECT_TRUE(has(run({"top"}).err, "Several jobs run: one, two.")) << run({"top"}).err;
  const JobResult other = run({"top", "three"});
  EXPECT_EQ(other.code, 1);
  EXPECT_TRUE(has(other.err, "There is no job 'three' of this user on this host."));
  EXPECT_TRUE(has(other.err, "Running: one, two."));
  EXPECT_TRUE(has(run({"scale", "one", "-n", "1"}).err, "The job is not elastic"));
  end(*one);
  end(*two);
}

TEST_F(TopOfJobs, OnATerminal) {
  const auto job = start("one");
  wait_for_step(folder_.path(), 20);
  JobOptions terminal = options();
  terminal.has_terminal = true;
  terminal.variables["TERM"] = "xterm";
  Job top({"top", "one", "--every", "0.2"}, terminal);
  top.wait_for_output("q quit");
  top.type("s");
  top.type("/rank");
  top.type("\n");
  top.wait_for_output("only lines with 'rank'");
  top.type("p");
  top.wait_for_output("paused");
  top.type("q");
  EXPECT_EQ(top.wait().code, 0);

  Job last({"top", "one", "--every", "0.2"}, terminal);
  last.wait_for_output("q quit");
  end(*job);
  EXPECT_EQ(last.wait().code, 0);
  EXPECT_TRUE(has(last.out(), "The job has ended. It was last seen like this:")) << last.out();
}

// The first host's launcher asks the others.
TEST_F(TopOfJobs, SeveralHosts) {
  std::vector<std::unique_ptr<Job>> hosts;
  const int port = 20500 + ::getpid() % 9000;
  for (int host = 0; host < 2; ++host) {
    JobOptions its = options();
    its.variables["LOCKSTEP_SECRET"] = "VGhlIHNlY3JldCBvZiB0aGUgdGVzdHMsIGluIGJhc2U2NA==";
    its.variables["LOCKSTEP_HOST_ID"] = host == 0 ? "a" : "b";
    hosts.push_back(
        std::make_unique<Job>(std::vector<std::string>{"run",
                                                       "-n",
                                                       "1",
                                                       "--job-id",
                                                       "both",
                                                       "--hosts",
                                                       "2",
                                                       "--host-rank",
                                                       std::to_string(host),
                                                       "--master",
                                                       text::format("127.0.0.1:{}", port),
                                                       "--logical-ranks",
                                                       "2",
                                                       "--",
                                                       LOCKSTEP_ELASTIC_TRAINER,
                                                       folder_.path() + "/run",
                                                       "mlp",
                                                       "100000",
                                                       "sleep=2",
                                                       "log=" + folder_.path()},
                              its));
  }
  wait_for_step(folder_.path(), 20);
  const std::string shown = wait_for("both", "job both on 2 hosts, 2 ranks");
  EXPECT_TRUE(has(shown, "\n   0 0 ")) << shown;
  EXPECT_TRUE(has(shown, "\n   1 1 ")) << shown;
  const std::string other = run({"top", "both.host1"}).out;
  EXPECT_TRUE(has(other, "Another host coordinates this job")) << other;
  EXPECT_TRUE(has(other, "\n   1 1 ")) << other;
  hosts[0]->signal(SIGTERM);
  for (const auto& host : hosts) host->wait();
}

}  // namespace
}  // namespace lockstep::test
