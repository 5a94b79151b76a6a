// `lockstep run` on several hosts: several launchers on this one's loopback, which know nothing of
// each other but the address and the secret. And strangers at the port.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>
#include <tuple>

#include "base/posix.h"
#include "base/socket.h"
#include "base/text.h"
#include "support/carrier.h"
#include "support/has.h"
#include "support/job.h"

namespace lockstep::test {
namespace {

const std::string kSecret = "VGhlIHNlY3JldCBvZiB0aGUgdGVzdHMsIGluIGJhc2U2NA==";

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
  std::string program = "ACTOR";
  std::string master = "127.0.0.1";
  std::map<std::string, std::string> variables = {};
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
                                        text::format("{}:{}", its.master, its.port)};
  arguments.insert(arguments.end(), its.more.begin(), its.more.end());
  arguments.insert(arguments.end(), {"--", its.program});
  arguments.insert(arguments.end(), its.script.begin(), its.script.end());
  JobOptions options{.variables = its.variables};
  options.variables["LOCKSTEP_SECRET"] = its.secret;
  return std::make_unique<Job>(arguments, options);
}

std::vector<std::unique_ptr<Job>> start_hosts(const HostArguments& its) {
  std::vector<std::unique_ptr<Job>> jobs;
  // The first comes last: the others wait for it.
  for (int rank = its.hosts - 1; rank >= 0; --rank) {
    jobs.insert(jobs.begin(), start_host(rank, its));
  }
  return jobs;
}

// The processes of `lockstep run` itself.
std::vector<pid_t> launchers_of(const Job& job) {
  std::vector<pid_t> launchers;
  for (const pid_t one : job.processes()) {
    if (read_small_file(text::format("/proc/{}/comm", one)) == "lockstep\n") {
      launchers.push_back(one);
    }
  }
  return launchers;
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
          for (const pid_t one : launchers_of(*jobs[victim])) ::kill(one, signal);
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

// As a host that was suspended, or a launcher whose disk hung: it goes on after the others have
// given it up.
TEST(Hosts, OneThatWasHeldUpHearsThatItWasGivenUp) {
  for (const std::size_t victim : {0, 1}) {
    auto jobs = start_hosts({.port = some_port(),
                             .more = {"--lost-after", "4", "--max-restarts", "3"},
                             .script = {"print ready", "env LOCKSTEP_LOST_AFTER", "sleep 600"}});
    for (const auto& job : jobs) job->wait_for_output("LOCKSTEP_LOST_AFTER=4", 2);
    const auto launchers = launchers_of(*jobs[victim]);
    ASSERT_EQ(launchers.size(), 2U);
    for (const pid_t one : launchers) ::kill(one, SIGSTOP);
    Job& other = *jobs[1 - victim];
    other.wait_for_output("silent for 4 s");
    EXPECT_EQ(other.wait().code, 1) << other.err();
    for (const pid_t one : launchers) ::kill(one, SIGCONT);
    EXPECT_EQ(jobs[victim]->wait().code, 1) << jobs[victim]->err();
    const std::string said = jobs[victim]->err();
    EXPECT_TRUE(has(said, text::format("this launcher was given up by host {}", 1 - victim)))
        << said;
    EXPECT_TRUE(has(said, "it has been silent for 4 s. If it was only held up")) << said;
    EXPECT_FALSE(has(said, "closed the connection")) << said;
    const char* const end = victim == 0 ? "the job ends here" : "There is no restart";
    EXPECT_TRUE(has(other.err(), end)) << other.err();
  }
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

// Host 0 decides on restarts, so it is its number that counts.
TEST(Hosts, AllKnowHowOftenHost0Restarts) {
  const int port = some_port();
  const std::vector<std::string> script = {"env TORCHELASTIC_MAX_RESTARTS", "@0 @gen0 exit 5",
                                           "@gen0 sleep 600"};
  auto second = start_host(1, {.port = port, .ranks = "1", .script = script});
  auto first = start_host(
      0, {.port = port, .ranks = "1", .more = {"--max-restarts", "2"}, .script = script});
  for (Job* const job : {first.get(), second.get()}) {
    EXPECT_EQ(job->wait().code, 0) << job->err();
    EXPECT_TRUE(has(job->err(), "restart 1 of 2")) << job->err();
    EXPECT_TRUE(has(job->out(), "TORCHELASTIC_MAX_RESTARTS=2")) << job->out();
  }
}

// A rank fails, which would be a restart; but a host that is lost meanwhile has no part in it.
TEST(Hosts, ALostHostIsNotRestartedAndThatIsSaid) {
  auto jobs = start_hosts({.port = some_port(),
                           .ranks = "1",
                           .more = {"--lost-after", "4", "--max-restarts", "3"},
                           .script = {"@0 count 10", "@0 exit 5", "print ready", "sleep 600"}});
  for (const auto& job : jobs) job->wait_for_output("ready");
  const auto launchers = launchers_of(*jobs[1]);
  for (const pid_t one : launchers) ::kill(one, SIGSTOP);
  jobs[0]->signal(SIGUSR1);
  EXPECT_EQ(jobs[0]->wait().code, 5);
  const std::string& said = jobs[0]->err();
  EXPECT_TRUE(has(said, "exited with code 5")) << said;
  EXPECT_TRUE(has(said, "was lost (it has been silent for 4 s), so there is no restart.")) << said;
  for (const pid_t one : launchers) ::kill(one, SIGCONT);
  EXPECT_NE(jobs[1]->wait().code, 0) << jobs[1]->err();
}

TEST(Hosts, AnotherProgramIsRefused) {
  const int port = some_port();
  auto first = start_host(0, {.port = port, .script = {"print ran"}});
  auto other = start_host(1, {.port = port, .program = "true"});
  EXPECT_EQ(other->wait().code, 2);
  EXPECT_TRUE(has(other->err(), "the program 'true' of host 1")) << other->err();
  EXPECT_TRUE(has(other->err(), "--any-program")) << other->err();
  // The job still waits for the right one.
  auto second = start_host(1, {.port = port, .script = {"print ran"}});
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  EXPECT_TRUE(has(first->err(), "refused host ")) << first->err();
}

TEST(Hosts, ProgramsMayDifferIfThatIsMeant) {
  const int port = some_port();
  auto second = start_host(1, {.port = port, .program = "true"});
  auto first = start_host(0, {.port = port, .more = {"--any-program"}, .program = "echo"});
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
}

TEST(Hosts, OtherArgumentsAreWarnedOfAndNamedAtTheEnd) {
  const int port = some_port();
  auto second = start_host(1, {.port = port, .ranks = "1", .script = {"sleep 600", "print 20"}});
  auto first = start_host(0, {.port = port, .ranks = "1", .script = {"sleep 1", "exit 3"}});
  EXPECT_EQ(first->wait().code, 3);
  EXPECT_EQ(second->wait().code, 3);
  for (Job* const job : {first.get(), second.get()}) {
    const std::string& said = job->err();
    EXPECT_TRUE(has(said, "warning: Host 1 (")) << said;
    const std::size_t end = said.find("exited with code 3");
    ASSERT_NE(end, std::string::npos) << said;
    EXPECT_TRUE(has(said.substr(end),
                    "was started with other arguments: argument 1 of its program "
                    "is 'sleep 600', that of host 0's is 'sleep 1'."))
        << said;
  }
}

TEST(Hosts, AHostOfAnotherJobIsRefused) {
  const int port = some_port();
  auto first = start_host(0, {.port = port, .variables = {{"SLURM_JOB_ID", "17"}}});
  auto other = start_host(1, {.port = port, .variables = {{"SLURM_JOB_ID", "18"}}});
  EXPECT_EQ(other->wait().code, 2);
  EXPECT_TRUE(has(other->err(), "host 1 has the job id '18', host 0 has the job id '17'"))
      << other->err();
  auto second = start_host(1, {.port = port, .more = {"--job-id", "17"}});
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
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

TEST(Hosts, WhyHost0WasNotReachedIsSaid) {
  const int port = some_port();
  const auto reason = [](const HostArguments& its) {
    auto job = start_host(1, its);
    EXPECT_EQ(job->wait().code, 1);
    EXPECT_FALSE(has(job->err(), ": .")) << job->err();
    EXPECT_FALSE(has(job->err(), "..")) << job->err();
    return job->err();
  };
  const std::vector<std::string> more = {"--join-timeout", "1"};
  std::string said = reason({.port = port, .more = more});
  EXPECT_TRUE(has(said, "Connection refused. Check --master")) << said;
  const Fd silent = listen_at("127.0.0.1", port);  // takes connections, and says nothing
  said = reason({.port = port, .more = more});
  EXPECT_TRUE(has(said, "does not speak as a launcher does. Check --master")) << said;
  // No name server is asked: a part of a name has 63 characters at most.
  const std::string name(70, 'x');
  said = reason({.port = port, .more = more, .master = name});
  EXPECT_TRUE(has(said, text::format("The address of '{}' was not found: ", name))) << said;
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
  for (const std::string& weak : {std::string("short"), std::string("correct horse battery staple"),
                                  std::string(64, 'a'), std::string(42, 'x') + "yz"}) {
    EXPECT_TRUE(has(refusal({.port = some_port(), .secret = weak}), "can be guessed")) << weak;
  }
  EXPECT_TRUE(has(refusal({.port = some_port(), .more = {"--secret-file", file}}),
                  "open to other users (mode 644)"));
  EXPECT_TRUE(
      has(refusal({.port = some_port(), .more = {"--secret-file", file + "x"}}), "cannot be read"));
  ::chmod(file.c_str(), 0600);
  if (::geteuid() == 0) {  // who else could give it away
    ASSERT_EQ(::chown(file.c_str(), 65534, 65534), 0);
    EXPECT_TRUE(has(refusal({.port = some_port(), .more = {"--secret-file", file}}),
                    "belongs to user 65534, this is user 0"));
    ASSERT_EQ(::chown(file.c_str(), 0, 0), 0);
  }
  const int port = some_port();
  auto second = start_host(1, {.port = port, .more = {"--secret-file", file}, .secret = ""});
  auto first = start_host(0, {.port = port});  // the same, from the variable
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  ::unlink(file.c_str());
}

TEST(Hosts, ASecretIsMadeOnce) {
  const std::string file = testing::TempDir() + text::format("made-secret-{}", ::getpid());
  EXPECT_EQ(run_job({"secret", file}).code, 0);
  struct stat status {};
  ASSERT_EQ(::stat(file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  const std::string made = read_small_file(file);
  EXPECT_EQ(made.size(), 45U);  // 32 bytes in base64, and the end of the line
  const JobResult again = run_job({"secret", file});
  EXPECT_EQ(again.code, 1);
  EXPECT_TRUE(has(again.err, "File exists")) << again.err;
  EXPECT_EQ(read_small_file(file), made);
  const JobResult printed = run_job({"secret"});
  EXPECT_EQ(printed.out.size(), 45U) << printed.err;
  EXPECT_NE(printed.out, made);
  const int port = some_port();
  auto second = start_host(1, {.port = port, .more = {"--secret-file", file}, .secret = ""});
  auto first = start_host(0, {.port = port, .secret = made.substr(0, 44)});
  EXPECT_EQ(first->wait().code, 0) << first->err();
  EXPECT_EQ(second->wait().code, 0) << second->err();
  ::unlink(file.c_str());
}

TEST(Hosts, AWrongSecretIsRefusedAndDisturbsNothing) {
  const int port = some_port();
  auto first = start_host(0, {.port = port, .script = {"print ready", "sleep 1"}});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  auto stranger =
      start_host(1, {.port = port, .secret = std::string(kSecret.rbegin(), kSecret.rend())});
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

// A connection from another machine's address.
Fd connect_from_elsewhere(int port) {
  Fd one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  ::bind(one.get(), reinterpret_cast<sockaddr*>(&from), sizeof from);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(one.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) one.reset();
  return one;
}

// Between the moment in which a host connects and that in which it proves itself, somebody else
// opens more connections than may be undecided at a time: silent ones, or ones that repeat the
// host's own greeting, which shows that its sender knows the key.
TEST(Hosts, AFloodOfNewcomersPushesNoHostOut) {
  for (const bool is_replayed : {false, true}) {
    const int port = some_port();
    auto first = start_host(0, {.port = port});
    while (!is_reached("127.0.0.1", port)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    std::vector<Fd> flood;
    const Carrier carrier([&](const Fd& host1) {
      std::array<char, 4096> greeting{};
      const ssize_t size = ::recv(host1.get(), greeting.data(), greeting.size(), MSG_PEEK);
      Fd host0 = connect_to(port);
      for (int i = 0; i < 200; ++i) {
        flood.push_back(connect_from_elsewhere(port));
        if (!is_replayed || size < 0 || !flood.back()) continue;
        ::send(flood.back().get(), greeting.data(), static_cast<std::size_t>(size), MSG_NOSIGNAL);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // all have been taken in
      return host0;
    });
    auto second = start_host(1, {.port = carrier.port()});
    EXPECT_EQ(first->wait().code, 0) << first->err();
    EXPECT_EQ(second->wait().code, 0) << second->err();
    EXPECT_TRUE(has(first->err(), "too many at a time")) << first->err();
  }
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
