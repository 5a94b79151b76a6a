#include "base/lifeline.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <thread>

#include "base/process.h"

namespace lockstep {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);
constexpr auto kMoment = std::chrono::milliseconds(200);

// What the watcher calls, to be waited for.
std::future<bool> watch(const Fd& lifeline, pid_t pid) {
  const auto called = std::make_shared<std::promise<bool>>();
  const ProcessId process = find_process(pid);
  watch_lifeline(lifeline.get(), [called, process] { called->set_value(is_ending(process)); });
  return called->get_future();
}

// A child that holds it, as a rank does, and what it says when it does.
pid_t start_holder(const Fd& lifeline, void (*then)()) {
  Pipe ready = make_pipe();
  const pid_t pid = ::fork();
  if (pid == 0) {
    hold_lifeline(lifeline.get());
    (void)!::write(ready.write_end.get(), "x", 1);
    then();
    ::_exit(0);
  }
  char byte = 0;
  EXPECT_EQ(::read(ready.read_end.get(), &byte, 1), 1);
  return pid;
}

TEST(Lifeline, TellsOfADeath) {
  const Fd lifeline = make_lifeline();
  const pid_t pid = start_holder(lifeline, [] { ::pause(); });
  std::future<bool> called = watch(lifeline, pid);
  EXPECT_EQ(called.wait_for(kMoment), std::future_status::timeout);
  ::kill(pid, SIGKILL);
  ASSERT_EQ(called.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(called.get());
  ::waitpid(pid, nullptr, 0);
}

// A program may join a world in a thread, and in several: then it must look whether it lives.
TEST(Lifeline, AThreadThatEndsIsNoDeath) {
  const Fd lifeline = make_lifeline();
  std::thread([&] { hold_lifeline(lifeline.get()); }).join();
  std::future<bool> called = watch(lifeline, ::getpid());
  ASSERT_EQ(called.wait_for(kPatience), std::future_status::ready);
  EXPECT_FALSE(called.get());
}

TEST(Lifeline, IsHeldOnce) {
  const Fd lifeline = make_lifeline();
  const pid_t pid = start_holder(lifeline, [] { ::pause(); });
  hold_lifeline(lifeline.get());  // another's: it is left alone
  std::future<bool> called = watch(lifeline, pid);
  ::kill(pid, SIGKILL);
  ASSERT_EQ(called.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(called.get());
  ::waitpid(pid, nullptr, 0);
}

// As by a second thread of a process whose first one has ended.
TEST(Lifeline, IsTakenOverFromADeadHolder) {
  const Fd lifeline = make_lifeline();
  const pid_t first = start_holder(lifeline, [] { ::pause(); });
  ::kill(first, SIGKILL);
  ::waitpid(first, nullptr, 0);
  const pid_t second = start_holder(lifeline, [] { ::pause(); });
  std::future<bool> called = watch(lifeline, second);
  EXPECT_EQ(called.wait_for(kMoment), std::future_status::timeout);
  ::kill(second, SIGKILL);
  ASSERT_EQ(called.wait_for(kPatience), std::future_status::ready);
  ::waitpid(second, nullptr, 0);
}

}  // namespace
}  // namespace lockstep
