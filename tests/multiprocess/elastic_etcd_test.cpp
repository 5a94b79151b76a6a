// Elastic jobs whose coordinator is elected in etcd: hosts that coordinate are lost, others take
// over, and the weights at the end are those of a run that lost nobody, to the bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/json.h"
#include "base/text.h"
#include "multiprocess/elastic_run.h"
#include "support/etcd_server.h"
#include "support/has.h"
#include "support/job.h"

namespace lockstep::test {
namespace {

constexpr int kHosts = 3;
constexpr int kTrainedSteps = 500;
constexpr auto kPatience = std::chrono::seconds(30);
const std::string kKey = "/lockstep/takeover/coordinator";

class ElasticEtcd : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_etcd_installed()) {
      // CI installs it: there, nothing is left out.
      if (std::getenv("CI") != nullptr) FAIL() << "etcd is not installed";
      GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
    }
    for (int host = 0; host < kHosts; ++host) ports_.push_back(port_of(listen_at("127.0.0.1", 0)));
  }

  void start_host(int host, const std::string& hosts, int steps,
                  const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"run",
                                          "-n",
                                          "1",
                                          "--elastic",
                                          "--logical-ranks",
                                          std::to_string(kHosts),
                                          "--hosts",
                                          hosts,
                                          "--host-rank",
                                          std::to_string(host),
                                          "--coordinator",
                                          server_.url(),
                                          "--job-id",
                                          "takeover",
                                          "--lost-after",
                                          "4",
                                          "--master",
                                          text::format("127.0.0.1:{}", ports_[host])};
    arguments.insert(arguments.end(), more.begin(), more.end());
    arguments.insert(arguments.end(),
                     {"--", LOCKSTEP_ELASTIC_TRAINER, folder_.path() + "/run", "cnn",
                      std::to_string(steps), "log=" + folder_.path(), "sleep=10"});
    jobs_[host] = std::make_unique<Job>(
        arguments, JobOptions{.variables = {{"OMP_NUM_THREADS", "1"},
                                            {"LOCKSTEP_HOST_ID", text::format("h{}", host)},
                                            {"LOCKSTEP_SECRET",
                                             "VGhlIHNlY3JldCBvZiB0aGUgdGVzdHMsIGluIGJhc2U2NA=="}}});
  }
  void start_hosts(int steps) {
    for (int host = 0; host < kHosts; ++host) start_host(host, "1:3", steps);
  }

  // The host that etcd names; -1: none.
  int coordinator() {
    const auto entry = server_.client().get(kKey);
    if (!entry) return -1;
    const int port = Json::parse(entry->value).at("port").get<int>();
    return static_cast<int>(std::ranges::find(ports_, port) - ports_.begin());
  }

  // As if its power had failed: all of its processes at once.
  void kill_host(int host) {
    for (const pid_t one : jobs_.at(host)->processes()) ::kill(one, SIGKILL);
    jobs_.at(host)->wait();
    jobs_.erase(host);
  }

  int last_step() { return test::last_step(folder_.path()); }
  // Until a rank has begun `step`; throws std::runtime_error.
  void wait_for_step(int step) {
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    while (last_step() < step) {
      if (std::chrono::steady_clock::now() > limit) {
        for (const auto& [_, job] : jobs_) {
          for (const pid_t one : job->processes()) ::kill(one, SIGKILL);
          job->wait();
        }
        throw std::runtime_error(text::format("step {} was not reached{}", step, texts()));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  // Kills the host that coordinates; returns it, and how long no step began.
  std::pair<int, double> kill_coordinator() {
    const int host = coordinator();
    kill_host(host);
    const auto start = std::chrono::steady_clock::now();
    const int before = last_step();
    wait_for_step(before + 2);
    return {host, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  }

  std::string texts() {
    std::string all;
    for (const auto& [host, job] : jobs_) {
      all += text::format("\n--- host {}\n{}\n{}", host, job->out(), job->err());
    }
    return all;
  }

  EtcdServer server_;
  const TempFolder folder_;
  std::vector<int> ports_;
  std::map<int, std::unique_ptr<Job>> jobs_;  // by host
};

TEST_F(ElasticEtcd, TwoCoordinatorsAreLostAndNoBitChanges) {
  const JobResult undisturbed = run_job(
      {"run", "-n", "1", "--logical-ranks", std::to_string(kHosts), "--", LOCKSTEP_ELASTIC_TRAINER,
       folder_.path() + "/alone", "cnn", std::to_string(kTrainedSteps)},
      {.variables = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;

  server_.start_and_wait();
  start_hosts(kTrainedSteps);
  wait_for_step(20);
  const auto [first, first_seconds] = kill_coordinator();
  ASSERT_NE(coordinator(), first);
  // A host that comes to the job of the new coordinator.
  start_host(first, "1:3", kTrainedSteps);
  jobs_.at(coordinator())->wait_for_output(text::format("host {} (", first));
  jobs_.at(coordinator())->wait_for_output("has come, with 1 rank");
  wait_for_step(last_step() + 20);
  const auto [second, second_seconds] = kill_coordinator();
  const int third = coordinator();
  ASSERT_NE(third, second);
  ASSERT_EQ(jobs_.size(), 2U);
  jobs_.at(third)->signal(SIGTERM);  // this one is told to stop, and leaves the job to the last
  jobs_.at(third)->wait_for_output("then another host coordinates");
  std::string out;
  std::string err;
  for (const auto& [host, job] : jobs_) {
    EXPECT_EQ(job->wait().code, 0) << texts();
    EXPECT_TRUE(job->processes().empty());
    out += job->out();
    err += job->err();
  }
  EXPECT_EQ(result_of(out), result_of(undisturbed.out)) << texts();
  EXPECT_TRUE(has(err, "has taken over: host ")) << err;
  EXPECT_TRUE(has(jobs_.at(third)->out(), "left")) << texts();
  EXPECT_FALSE(has(out, "generation 0")) << out;
  EXPECT_EQ(coordinator(), -1);  // it has resigned
  for (const double seconds : {first_seconds, second_seconds}) {
    RecordProperty("seconds", std::to_string(seconds));
    std::cout << text::format("next step {:.2f} s after the coordinator's end\n", seconds);
    EXPECT_LT(seconds, 15);
  }
}

// The coordinator cannot know whether another is elected, and the others have nobody to follow.
TEST_F(ElasticEtcd, WithoutEtcdNobodyGoesOn) {
  server_.start_and_wait();
  start_hosts(100'000);
  wait_for_step(10);
  const int first = coordinator();
  const auto start = std::chrono::steady_clock::now();
  server_.suspend();
  EXPECT_EQ(jobs_.at(first)->wait().code, 75) << texts();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_TRUE(has(jobs_.at(first)->err(), "can no longer be sure of its lease")) << texts();
  for (const auto& [host, job] : jobs_) {
    EXPECT_EQ(job->wait().code, 75) << texts();
    EXPECT_TRUE(job->processes().empty());
    if (host != first) {
      EXPECT_TRUE(has(job->err(), "has had no coordinator for 14 s")) << texts();
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST_F(ElasticEtcd, NoEtcdAtTheStart) {
  start_host(1, "2", 10, {"--join-timeout", "2"});
  EXPECT_EQ(jobs_.at(1)->wait().code, 1);
  const std::string& err = jobs_.at(1)->err();
  EXPECT_TRUE(has(err, "could not reach the coordinator in ")) << err;
  EXPECT_TRUE(has(err, text::format("127.0.0.1:{}: cannot connect", server_.port()))) << err;
  EXPECT_TRUE(has(err, "Check etcd (--coordinator)")) << err;
}

TEST(ElasticEtcdArguments, WhatIsMissingIsNamed) {
  const auto error = [](const std::vector<std::string>& options) {
    std::vector<std::string> arguments = {"run", "--coordinator", "etcd://127.0.0.1:1"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.insert(arguments.end(), {"--", "true"});
    const JobResult result = run_job(arguments);
    EXPECT_EQ(result.code, 2) << result.err;
    return result.err;
  };
  EXPECT_TRUE(has(error({}), "--coordinator needs --elastic"));
  EXPECT_TRUE(has(error({"--elastic"}), "--coordinator needs --hosts"));
  EXPECT_TRUE(has(error({"--elastic", "--hosts", "1:2"}), "--coordinator needs --job-id"));
  EXPECT_TRUE(has(error({"--elastic", "--hosts", "1:2", "--job-id", "a"}),
                  "--coordinator needs --master HOST:PORT, an address of this host"));
  EXPECT_TRUE(has(run_job({"run", "--elastic", "--hosts", "2", "--job-id", "a", "--coordinator",
                           "http://a", "--", "true"})
                      .err,
                  "--coordinator: "));
}

}  // namespace
}  // namespace lockstep::test
