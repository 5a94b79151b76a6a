#include "base/process.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <sys/wait.h>
#include <unistd.h>

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
