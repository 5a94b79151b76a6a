#include "base/log.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "base/posix.h"
#include "support/run_ranks.h"

namespace lockstep {
namespace {

std::string read_all(Pipe& pipe) {
  pipe.write_end.reset();
  std::string text;
  char buffer[4096];
  for (ssize_t count; (count = ::read(pipe.read_end.get(), buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(count));
  }
  return text;
}

TEST(Log, EveryLineHasTheRank) {
  Pipe pipe = make_pipe();
  Log(3, LogLevel::kInfo, pipe.write_end.get()).info("one\ntwo {}", 2);
  Log(3, LogLevel::kInfo, pipe.write_end.get()).warning("late");
  Log(-1, LogLevel::kInfo, pipe.write_end.get()).info("no rank");
  EXPECT_EQ(read_all(pipe),
            "lockstep[3]: one\nlockstep[3]: two 2\nlockstep[3] warning: late\nlockstep: no rank\n");
}

TEST(Log, ShowsNothingBelowItsLevel) {
  Pipe pipe = make_pipe();
  const Log log(0, LogLevel::kWarning, pipe.write_end.get());
  log.debug("a");
  log.info("b");
  log.warning("c");
  EXPECT_EQ(read_all(pipe), "lockstep[0] warning: c\n");
}

TEST(Log, LevelsHaveNames) {
  EXPECT_EQ(parse_log_level("debug"), LogLevel::kDebug);
  EXPECT_EQ(parse_log_level("off"), LogLevel::kOff);
  EXPECT_THROW(parse_log_level("loud"), UsageError);
}

TEST(Log, LinesOfManyThreadsStayWhole) {
  Pipe pipe = make_pipe();
  constexpr int kThreads = 8;
  constexpr int kLines = 50;  // in total less than a pipe holds (64 KiB)
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&pipe, i] {
        const Log log(i, LogLevel::kInfo, pipe.write_end.get());
        for (int line = 0; line < kLines; ++line) log.info("{}", std::string(100, 'a' + i));
      });
    }
  }
  std::istringstream lines(read_all(pipe));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const char letter = line.back();
    EXPECT_EQ(line, text::format("lockstep[{}]: {}", letter - 'a', std::string(100, letter)));
  }
  EXPECT_EQ(count, kThreads * kLines);
}

}  // namespace
}  // namespace lockstep
