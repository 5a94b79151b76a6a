#include "base/process.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "base/posix.h"

namespace lockstep {
namespace {

ExitStatus run(const Command& command) {
  int status = 0;
  ::waitpid(spawn(command), &status, 0);
  return ExitStatus::from_wait(status);
}

TEST(Process, KnowsItself) {
  const ProcessId self = this_process();
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_NE(self.start_time, 0U);
  EXPECT_TRUE(is_alive(self));
  EXPECT_EQ(parent_of(self.pid), ::getppid());
}

TEST(Process, AReusedPidIsAnotherProcess) {
  ProcessId old = this_process();
  old.start_time -= 1;
  EXPECT_FALSE(is_alive(old));
}

TEST(Process, IsEndingUntilItIsGone) {
  const pid_t pid = spawn({.arguments = {"sleep", "60"}});
  const ProcessId process = find_process(pid);
  EXPECT_FALSE(is_ending(process));
  EXPECT_FALSE(is_ending(this_process()));
  ::kill(pid, SIGKILL);
  while (!look_at_end(pid)) ::usleep(1000);
  EXPECT_TRUE(is_ending(process));  // a zombie
  ::waitpid(pid, nullptr, 0);
  EXPECT_TRUE(is_ending(process));
}

TEST(Process, IsDeadOnceItHasEndedEvenIfNobodyWaited) {
  const pid_t pid = spawn({.arguments = {"sleep", "60"}});
  const ProcessId process = find_process(pid);
  EXPECT_TRUE(is_alive(process));
  ::kill(pid, SIGKILL);
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);  // ended, still a zombie
  EXPECT_FALSE(is_alive(process));
  ::waitpid(pid, nullptr, 0);
  EXPECT_FALSE(is_alive(process));
}

TEST(Process, ReportsHowItEnded) {
  EXPECT_TRUE(run({.arguments = {"true"}}).is_ok());
  EXPECT_EQ(run({.arguments = {"sh", "-c", "exit 3"}}).text(), "exited with code 3");
  EXPECT_EQ(run({.arguments = {"sh", "-c", "kill -9 $$"}}).text(),
            "was killed by signal 9 (Killed)");
}

TEST(Process, GetsVariablesDescriptorsAndOutput) {
  ::setenv("LOCKSTEP_GONE", "1", 1);
  Pipe pipe = make_pipe();
  const Fd extra = make_memfd("extra");
  const std::string script = "test -z \"$LOCKSTEP_GONE\" && test -e /proc/self/fd/" +
                             std::to_string(extra.get()) + " && printf %s \"$LOCKSTEP_NEW\"";
  const ExitStatus status = run({.arguments = {"sh", "-c", script},
                                 .variables = {{"LOCKSTEP_NEW", "here"}},
                                 .removed_variables = {"LOCKSTEP_GONE"},
                                 .inherited_fds = {extra.get()},
                                 .stdout_fd = pipe.write_end.get()});
  ::unsetenv("LOCKSTEP_GONE");
  EXPECT_TRUE(status.is_ok()) << status.text();
  pipe.write_end.reset();
  char buffer[16] = {};
  EXPECT_EQ(::read(pipe.read_end.get(), buffer, sizeof buffer), 4);
  EXPECT_STREQ(buffer, "here");
}

// A child that cannot end keeps its own: they are killed all the same.
TEST(Process, DescendantsOfTheLivingAreFoundAndKilled) {
  Pipe pipe = make_pipe();
  const pid_t parent = spawn(
      {.arguments = {"sh", "-c", "sleep 600 & echo $!; wait"}, .stdout_fd = pipe.write_end.get()});
  const pid_t other = spawn(
      {.arguments = {"sh", "-c", "sleep 600 & echo $!; wait"}, .stdout_fd = pipe.write_end.get()});
  std::string text;
  while (std::ranges::count(text, '\n') < 2) {
    char buffer[64];
    const ssize_t count = ::read(pipe.read_end.get(), buffer, sizeof buffer);
    ASSERT_GT(count, 0);
    text.append(buffer, static_cast<std::size_t>(count));
  }
  EXPECT_EQ(living_descendants().size(), 4U);
  const auto found = living_descendants({other});
  EXPECT_EQ(found.size(), 2U);
  EXPECT_TRUE(found.contains(parent));
  ::kill(parent, SIGSTOP);
  std::set<pid_t> spared = {other};
  kill_children_once(spared);
  EXPECT_TRUE(kill_all_children(std::chrono::seconds(60), spared));
  EXPECT_TRUE(living_descendants({other}).empty());
  EXPECT_EQ(living_descendants().size(), 2U);
  EXPECT_TRUE(kill_all_children(std::chrono::seconds(60)));
  EXPECT_FALSE(has_children());
}

// As /proc has them of processes that end while they are read.
TEST(Process, WhatCannotBeReadIsEmpty) {
  EXPECT_EQ(read_small_file("/no/such/file"), "");
  EXPECT_EQ(read_small_file("/proc/self"), "");  // opens, and cannot be read: a folder
  EXPECT_TRUE(read_small_file("/proc/self/stat").starts_with(std::to_string(::getpid())));
}

TEST(Process, OtherDescriptorsStayHere) {
  const Fd secret = make_memfd("secret");
  const std::string path = "/proc/self/fd/" + std::to_string(secret.get());
  EXPECT_EQ(run({.arguments = {"test", "-e", path}}).code, 1);
}

TEST(Process, AProgramThatCannotStartIsAnErrorWithItsName) {
  try {
    spawn({.arguments = {"/no/such/program"}});
    FAIL();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), ENOENT);
    EXPECT_NE(error.message().find("'/no/such/program': No such file"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep
