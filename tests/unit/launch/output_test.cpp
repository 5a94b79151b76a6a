#include "launch/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <unistd.h>

#include <csignal>
#include <future>

namespace lockstep {
namespace {

TEST(LineCutter, GivesOutWholeLines) {
  LineCutter cutter;
  std::vector<std::string> lines;
  const auto keep = [&](std::string_view line, LineCutter::End) { lines.emplace_back(line); };
  cutter.add("one\ntw", false, keep);
  EXPECT_EQ(lines, (std::vector<std::string>{"one"}));
  cutter.add("o\n\nthree", false, keep);
  EXPECT_EQ(lines, (std::vector<std::string>{"one", "two", ""}));
  cutter.finish(keep);
  cutter.finish(keep);
  EXPECT_EQ(lines, (std::vector<std::string>{"one", "two", "", "three"}));
}

TEST(LineCutter, AProgressBarIsGivenOutOnTerminalsOnly) {
  LineCutter bar;
  std::string seen;
  const auto keep = [&](std::string_view line, LineCutter::End end) {
    seen += std::string(line) + (end == LineCutter::End::kBar        ? "<r>"
                                 : end == LineCutter::End::kAfterBar ? "<after>"
                                                                     : "<n>");
  };
  bar.add("10%\r20%", true, keep);
  EXPECT_EQ(seen, "10%<r>");
  bar.add("\rdone\n", true, keep);
  EXPECT_EQ(seen, "10%<r>20%<r>done<n>");
  // Lines that end with both, also if they come in pieces; and an empty line is one.
  seen.clear();
  bar.add("one\r", true, keep);
  bar.add("\ntwo\r\n\nthree\n", true, keep);
  EXPECT_EQ(seen, "one<r><after>two<r><after><n>three<n>");
  seen.clear();
  bar.add("10%\r20%\rdone\n", false, keep);
  EXPECT_EQ(seen, "10%\r20%\rdone<n>");
}

TEST(LineCutter, AnEndlessLineIsCut) {
  LineCutter cutter;
  std::size_t bytes = 0;
  int lines = 0;
  for (int i = 0; i < 100; ++i) {
    cutter.add(std::string(LineCutter::kLongest / 10, 'x'), false,
               [&](std::string_view line, LineCutter::End) {
                 bytes += line.size();
                 ++lines;
               });
  }
  EXPECT_GE(lines, 8);
  EXPECT_GE(bytes, 8 * LineCutter::kLongest);
}

TEST(Printer, NeverWaitsForAReaderAndLosesNothing) {
  EventLoop loop;
  Pipe pipe = make_pipe();
  std::string expected;
  bool has_room = false;
  Printer printer(loop, pipe.write_end.get(), [&] { has_room = true; });
  while (!printer.is_full()) {  // far more than a pipe holds
    const std::string line = "line " + std::to_string(expected.size()) + "\n";
    printer.write(line);
    expected += line;
  }
  std::string got;
  while (!printer.is_empty() || got.size() < expected.size()) {
    char buffer[5000];
    const ssize_t count = ::read(pipe.read_end.get(), buffer, sizeof buffer);
    ASSERT_GT(count, 0);
    got.append(buffer, static_cast<std::size_t>(count));
    loop.run_once(std::chrono::milliseconds(0));
  }
  EXPECT_EQ(got, expected);
  EXPECT_TRUE(has_room);
}

TEST(Printer, GoesOnWithoutAReader) {
  ::signal(SIGPIPE, SIG_IGN);
  EventLoop loop;
  Pipe pipe = make_pipe();
  Printer printer(loop, pipe.write_end.get(), [] {});
  pipe.read_end.reset();
  printer.write("nobody hears this\n");
  while (!printer.is_empty()) loop.run_once();
  printer.write("nor this\n");
  EXPECT_TRUE(printer.is_empty());
}

TEST(Writer, AFileThatHangsHoldsUpNobody) {
  EventLoop loop;
  const auto release = std::make_shared<std::promise<void>>();  // the thread may outlive the test
  std::vector<std::string> problems;
  Writer writer(loop, {.failed = [&](int file, bool is_open, const std::string& why) {
                  problems.push_back(std::to_string(file) + (is_open ? " open " : " ") + why);
                }});
  const int hanging = writer.add([release]() -> Fd {
    release->get_future().wait();
    throw_error(ErrorKind::kSystem, {}, "gone");
  });
  Pipe pipe = make_pipe();
  const int good = writer.add([fd = pipe.write_end.release()] { return Fd(fd); });
  while (!writer.is_full()) {
    writer.write(hanging, std::string(1000, 'x'));
    writer.write(good, "y");
  }
  loop.run_once(std::chrono::milliseconds(50));
  EXPECT_TRUE(writer.is_full());
  EXPECT_TRUE(problems.empty());
  release->set_value();
  while (!writer.is_empty()) loop.run_once();
  EXPECT_EQ(problems, (std::vector<std::string>{std::to_string(hanging) + " gone"}));
  char byte = 0;
  EXPECT_EQ(::read(pipe.read_end.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
}

// One that cannot be killed has the pipe, and goes on writing.
TEST(Output, TheEndDoesNotWaitForAWriterThatNeverStops) {
  EventLoop loop;
  Output output(loop, {.only_rank = 1});
  output.begin(0, 1, 2);
  output.attach(0, Fd(::open("/dev/zero", O_RDONLY | O_CLOEXEC)), make_pipe().read_end);
  output.end();
}

}  // namespace
}  // namespace lockstep
