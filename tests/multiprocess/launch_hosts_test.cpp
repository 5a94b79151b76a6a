// `lockstep run` on several hosts: several launchers on this one's loopback, which know nothing of
// each other but the address and the secret. And strangers at the port.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>
#include <tuple>

#include "base/posix.h"
#include "base/socket.h"
#include "base/text.h"
#include "support/has.h"
#include "support/job.h"

namespace lockstep::test {
namespace {

const std::string kSecret = "a secret of the tests";

// A port that is free now, and the next one.
int some_port() {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const Fd first = listen_at("127.0.0.1", 0);
    sockaddr_in address{};
    socklen_t size = sizeof address;
    ::getsockname(first.get(), reinterpret_cast<sockaddr*>(&address), &size);
    const int port = ntohs(address.sin_port);
    if (port < 65534 && listen_at("127.0.0.1", port + 1)) return port;
  }
  return 0;
}

struct HostArguments {
  int hosts = 2;
  int port = 0;
  std::string ranks = "2";
  std::vector<std::string> more = {};
  std::vector<std::string> script = {};
  std::string secret = kSecret;
};

std::unique_ptr<Job> start_host(int host_rank, const HostArguments& its) {
  std::vector<std::string> arguments = {"run",
                                        "-n",
                                        its.ranks,
                                        "--hosts",
                                        std::to_string(its.hosts),
                                        "--host-rank",
                                        std::to_string(host_rank),
                                        "--master",
                                        text::format("127.0.0.1:{}", its.port)};
  arguments.insert(arguments.end(), its.more.begin(), its.more.end());
  arguments.insert(arguments.end(), {"--", "ACTOR"});
  arguments.insert(arguments.end(), its.script.begin(), its.script.end());
  return std::make_unique<Job>(arguments,
                               JobOptions{.variables = {{"LOCKSTEP_SECRET", its.secret}}});
}

std::vector<std::unique_ptr<Job>> start_hosts(const HostArguments& its) {
  std::vector<std::unique_ptr<Job>> jobs;
  // The first comes last: the others wait for it.
  for (int rank = its.hosts - 1; rank >= 0; --rank) {
    jobs.insert(jobs.begin(), start_host(rank, its));
  }
  return jobs;
}

Fd connect_to(int port) {
  Fd socket = start_connecting("127.0.0.1", port);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return socket;
}

bool is_reached(const std::string& address, int port) {
  const Fd socket = start_connecting(address, port);
  pollfd one{socket.get(), POLLOUT, 0};
  int error = ETIMEDOUT;
  socklen_t size = sizeof error;
  if (::poll(&one, 1, 1000) > 0) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0;
}

TEST(Hosts, RanksAreNumberedOverAllHosts) {
  const int port = some_port();
  const std::vector<std::string> script = {
      "env RANK",        "env WORLD_SIZE",  "env LOCAL_RANK",     "env GROUP_RANK",
      "env MASTER_ADDR", "env MASTER_PORT", "env LOCKSTEP_SECRET"};
  auto second = start_host(1, {.port = port, .ranks = "1", .script = script});
  auto first = start_host(0, {.port = port, .ranks = "2", .script = script});
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  for (const char* line :
       {"[0] RANK=0\n", "[1] RANK=1\n", "[1] WORLD_SIZE=3\n", "[0] GROUP_RANK=0\n"}) {
    EXPECT_TRUE(has(first->out(), line)) << first->out();
  }
  for (const std::string& line :
       {std::string("[2] RANK=2\n"), std::string("[2] LOCAL_RANK=0\n"),
        std::string("[2] GROUP_RANK=1\n"), std::string("[2] MASTER_ADDR=127.0.0.1\n"),
        text::format("[2] MASTER_PORT={}\n", port + 1), std::string("[2] LOCKSTEP_SECRET=\n")}) {
    EXPECT_TRUE(has(second->out(), line)) << second->out();
  }
  EXPECT_EQ(first->err() + second->err(), "");
}

TEST(Hosts, OneThatFailsStopsAllAndAllSayWhoBeganIt) {
  auto jobs =
      start_hosts({.hosts = 3,
                   .port = some_port(),
                   .script = {"@3 error the reason", "@3 sleep 0.1", "@3 exit 9", "sleep 600"}});
  for (const auto& job : jobs) {
    EXPECT_EQ(job->wait().code, 9) << job->err();
    EXPECT_TRUE(has(job->err(), "rank 3 of host 1 (")) << job->err();
    EXPECT_TRUE(has(job->err(), "exited with code 9")) << job->err();
    EXPECT_TRUE(has(job->err(), "\n    the reason\n")) << job->err();
    EXPECT_TRUE(job->processes().empty());
  }
}

// The rank that failed first is of another host than the one that ended first.
TEST(Hosts, TheFirstCauseIsNamedWhereverItIs) {
  for (const auto& [first, host, told] :
       {std::tuple(0, 0, 3), std::tuple(2, 1, 3), std::tuple(3, 1, 1)}) {
    auto jobs = start_hosts(
        {.port = some_port(),
         .script = {text::format("@{} told {}", told, first), text::format("@{} sleep 1", first),
                    text::format("@{} exit 9", first), "sleep 600"}});
    for (const auto& job : jobs) {
      EXPECT_EQ(job->wait().code, 9) << job->err();
      EXPECT_TRUE(has(job->err(), text::format("lockstep: rank {} of host {} (", first, host)))
          << job->err();
    }
  }
}

TEST(Hosts, ALauncherThatIsKilledStopsAll) {
  for (const std::size_t victim : {0, 1}) {
    for (const bool is_whole : {false, true}) {  // what people see of it, or all of it at once
      auto jobs = start_hosts({.port = some_port(), .script = {"print ready", "sleep 600"}});
      for (const auto& job : jobs) job->wait_for_output("ready", 2);
      if (is_whole) {
        // Stopped first: else one of them may see the other's end, and tell of it.
        for (const int signal : {SIGSTOP, SIGKILL}) {
          for (const pid_t one : jobs[victim]->processes()) {
            if (read_small_file(text::format("/proc/{}/comm", one)) == "lockstep\n") {
              ::kill(one, signal);
            }
          }
        }
      } else {
        jobs[victim]->signal(SIGKILL);
      }
      Job& other = *jobs[1 - victim];
      EXPECT_NE(other.wait().code, 0);
      const std::string expected = !is_whole     ? text::format("the launcher of host {} (", victim)
                                   : victim == 0 ? "this launcher lost host 0"
                                                 : "the launcher of host 1 (";
      EXPECT_TRUE(has(other.err(), expected)) << other.err();
      EXPECT_TRUE(other.processes().empty());
      jobs[victim]->wait();
      const auto gone = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!jobs[victim]->processes().empty() && std::chrono::steady_clock::now() < gone) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      EXPECT_TRUE(jobs[victim]->processes().empty());
    }
  }
}

// Nothing is closed, nothing arrives any more: as when a cable is pulled.
TEST(Hosts, ALauncherThatFallsSilentStopsTheOthers) {
  auto jobs = start_hosts({.port = some_port(), .script = {"print ready", "sleep 600"}});
  for (const auto& job : jobs) job->wait_for_output("ready", 2);
  const auto frozen = jobs[1]->processes();
  for (const pid_t one : frozen) ::kill(one, SIGSTOP);
  EXPECT_EQ(jobs[0]->wait().code, 1);
  EXPECT_TRUE(has(jobs[0]->err(), "silent for 8 s")) << jobs[0]->err();
  for (const pid_t one : frozen) ::kill(one, SIGCONT);
  EXPECT_NE(jobs[1]->wait().code, 0);
  EXPECT_TRUE(jobs[1]->processes().empty());
}

TEST(Hosts, AnInterruptOnOneHostStopsAll) {
  auto jobs = start_hosts({.port = some_port(), .script = {"print ready", "sleep 600"}});
  for (const auto& job : jobs) job->wait_for_output("ready", 2);
  jobs[1]->signal(SIGINT);
  EXPECT_EQ(jobs[0]->wait().code, 130) << jobs[0]->err();
  EXPECT_EQ(jobs[1]->wait().code, 130) << jobs[1]->err();
  EXPECT_TRUE(has(jobs[0]->err(), "the launcher of host 1 (")) << jobs[0]->err();
}

TEST(Hosts, AllRestartTogether) {
  auto jobs = start_hosts({.port = some_port(),
                           .more = {"--max-restarts", "1"},
                           .script = {"@2 @gen0 exit 5", "@gen0 sleep 600", "print done"}});
  for (const auto& job : jobs) {
    EXPECT_EQ(job->wait().code, 0) << job->err();
    EXPECT_TRUE(has(job->err(), "restart 1 of 1")) << job->err();
    EXPECT_TRUE(has(job->out(), "done")) << job->out();
  }
}

TEST(Hosts, WhatDoesNotFitTogetherIsSaid) {
  const int port = some_port();
  auto first = start_host(0, {.hosts = 3, .port = port, .more = {"-v"}, .script = {"sleep 600"}});
  auto other_size = start_host(1, {.hosts = 2, .port = port, .script = {"sleep 600"}});
  EXPECT_EQ(other_size->wait().code, 2);
  EXPECT_TRUE(has(other_size->err(), "--hosts 2")) << other_size->err();
  EXPECT_TRUE(has(other_size->err(), "--hosts 3")) << other_size->err();
  auto second = start_host(1, {.hosts = 3, .port = port, .script = {"sleep 600"}});
  first->wait_for_output("host 1 (");  // has come
  auto twin = start_host(1, {.hosts = 3, .port = port, .script = {"sleep 600"}});
  EXPECT_EQ(twin->wait().code, 2);
  EXPECT_TRUE(has(twin->err(), "there is a host 1 already")) << twin->err();
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait().code, 143);
  EXPECT_EQ(second->wait().code, 143) << second->err();
}

TEST(Hosts, AHostThatDoesNotComeIsNamed) {
  auto first = start_host(
      0, {.port = some_port(), .more = {"--join-timeout", "1"}, .script = {"sleep 600"}});
  EXPECT_EQ(first->wait().code, 1);
  EXPECT_TRUE(has(first->err(), "waiting for host 1")) << first->err();
  auto second = start_host(
      1, {.port = some_port(), .more = {"--join-timeout", "1"}, .script = {"sleep 600"}});
  EXPECT_EQ(second->wait().code, 1);
  EXPECT_TRUE(has(second->err(), "could not reach host 0")) << second->err();
}

TEST(Hosts, TheSecretIsNeededAndItsFileIsPrivate) {
  const std::string file = testing::TempDir() + text::format("secret-{}", ::getpid());
  std::ofstream(file) << kSecret << "\n";
  ::chmod(file.c_str(), 0644);
  const auto refusal = [&](const HostArguments& its) {
    auto job = start_host(0, its);
    EXPECT_EQ(job->wait().code, 2);
    return job->err();
  };
  EXPECT_TRUE(has(refusal({.port = some_port(), .secret = ""}), "need a common secret"));
  EXPECT_TRUE(has(refusal({.port = some_port(), .secret = "short"}), "5 characters"));
  EXPECT_TRUE(has(refusal({.port = some_port(), .more = {"--secret-file", file}}),
                  "open to other users (mode 644)"));
  EXPECT_TRUE(
      has(refusal({.port = some_port(), .more = {"--secret-file", file + "x"}}), "cannot be read"));
  ::chmod(file.c_str(), 0600);
  const int port = some_port();
  auto second = start_host(1, {.port = port, .more = {"--secret-file", file}, .secret = ""});
  auto first = start_host(0, {.port = port});  // the same, from the variable
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  ::unlink(file.c_str());
}

TEST(Hosts, AWrongSecretIsRefusedAndDisturbsNothing) {
  const int port = some_port();
  auto first = start_host(0, {.port = port, .script = {"print ready", "sleep 1"}});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  auto stranger = start_host(1, {.port = port, .secret = "another secret altogether"});
  EXPECT_EQ(stranger->wait().code, 1);
  EXPECT_TRUE(has(stranger->err(), "another secret")) << stranger->err();
  auto second = start_host(1, {.port = port, .script = {"print ready", "sleep 1"}});
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  EXPECT_TRUE(has(first->err(), "refused 127.0.0.1:")) << first->err();
}

TEST(Hosts, StrangersAtThePortDisturbNothing) {
  const int port = some_port();
  auto first = start_host(0, {.port = port, .script = {"print ready", "sleep 8"}});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::vector<Fd> strangers;
  const auto send = [&](const std::string& bytes) {
    strangers.push_back(connect_to(port));
    [[maybe_unused]] const ssize_t sent =
        ::send(strangers.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  };
  send("GET / HTTP/1.0\r\n\r\n");
  send(std::string(100000, '\xFF'));
  send(std::string(5, '\0'));
  send("\x16\x03\x01\x40");        // the beginning of a greeting, never to be ended
  for (int i = 0; i < 200; ++i) {  // more than may be undecided at a time
    strangers.push_back(start_connecting("127.0.0.1", port));
  }
  strangers.push_back(connect_to(port));
  auto second = start_host(1, {.port = port, .script = {"print ready", "sleep 8"}});
  first->wait_for_output("ready", 2);
  second->wait_for_output("ready", 2);
  // One byte at a time, while the job runs: the beginning of a greeting of 16 KB. It has 5 s.
  const Fd slow = connect_to(port);
  const std::string greeting = "\x16\x03\x01\x40";
  bool is_closed = false;
  for (std::size_t i = 0; i < 140 && !is_closed; ++i) {
    const std::string byte(1, i < greeting.size() ? greeting[i] : '\x01');
    is_closed = ::send(slow.get(), byte.data(), 1, MSG_NOSIGNAL) < 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_TRUE(is_closed);
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  EXPECT_TRUE(has(first->err(), "refused 127.0.0.1:")) << first->err();
  EXPECT_TRUE(has(first->err(), "no more of these are shown")) << first->err();
}

// Who answers at the address but does not know the secret learns nothing: a certificate is no
// proof.
TEST(Hosts, AnImpostorWithACertificateIsRefused) {
  const int port = some_port();
  const std::string folder = testing::TempDir() + text::format("impostor-{}", ::getpid());
  // It ends when its input does, so that is kept open.
  Job impostor({"run", "-n", "1", "--", "bash", "-c",
                text::format("mkdir -p {0} && cd {0} && openssl req -x509 -newkey ec -pkeyopt "
                             "ec_paramgen_curve:P-256 -nodes -keyout key -out cert -days 1 -subj "
                             "/CN=127.0.0.1 2>/dev/null && sleep 600 | openssl s_server -tls1_3 "
                             "-accept 127.0.0.1:{1} -key key -cert cert",
                             folder, port)});
  impostor.wait_for_output("ACCEPT");
  auto second = start_host(1, {.port = port, .script = {"print started"}});
  EXPECT_EQ(second->wait().code, 1);
  EXPECT_TRUE(has(second->err(), "another secret, or is not host 0")) << second->err();
  EXPECT_FALSE(has(second->out(), "started"));
  EXPECT_FALSE(has(impostor.out(), "hello")) << impostor.out();
  impostor.signal(SIGTERM);
  impostor.wait();
  std::filesystem::remove_all(folder);
}

TEST(Hosts, OnlyTheAddressAskedForIsBound) {
  const int port = some_port();
  auto first = start_host(0, {.port = port, .script = {"sleep 600"}});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!is_reached("127.0.0.1", port) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_TRUE(is_reached("127.0.0.1", port));
  // 127.0.0.2 is this host, too, and nobody listens there.
  EXPECT_FALSE(is_reached("127.0.0.2", port));
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait().code, 143);
}

TEST(Hosts, APortThatIsTakenIsAnError) {
  const int port = some_port();
  const Fd taken = listen_at("127.0.0.1", port);
  auto first = start_host(0, {.port = port});
  EXPECT_EQ(first->wait().code, 1);
  EXPECT_TRUE(has(first->err(), text::format("cannot listen at 127.0.0.1:{}", port)))
      << first->err();
}

TEST(Hosts, DryRunSaysWhereItWouldListen) {
  const JobResult result = run_job({"run", "-n", "1", "--hosts", "2", "--host-rank", "1",
                                    "--master", "10.1.2.3:29500", "--dry-run", "--", "ACTOR"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(has(result.out, "host 1 of 2 connects to 10.1.2.3:29500")) << result.out;
}

}  // namespace
}  // namespace lockstep::test
