#include "base/blame.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "base/cause.h"
#include "base/posix.h"

namespace lockstep {
namespace {

// This process is rank 5, the third of its host.
class Blames : public testing::Test {
 protected:
  Blames() {
    ::setenv("RANK", "5", 1);
    ::setenv(kBlameVariable, blame_address(file_.get(), 2).c_str(), 1);
  }
  ~Blames() override {
    ::unsetenv("RANK");
    ::unsetenv(kBlameVariable);
  }
  int read(std::chrono::seconds later = {}) const {
    return read_blame(file_.get(), 2, ::getpid(), std::chrono::steady_clock::now() + later);
  }

  Fd file_ = make_memfd("blames");
};

TEST_F(Blames, AnErrorNamesTheRankThatItIsBecauseOf) {
  EXPECT_EQ(read(), -1);
  const PeerLostError lost({.rank = 5, .peer = 3}, "lost");
  EXPECT_EQ(read(), 3);
  const UsageError own({.rank = 5, .peer = 1}, "a wrong call");
  EXPECT_EQ(read(), -1);
  const TimeoutError late({.rank = 5, .peer = 4}, "late");
  EXPECT_EQ(read(), 4);
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(read_blame(file_.get(), 2, ::getpid() + 1, now), -1);
  EXPECT_EQ(read_blame(file_.get(), 1, ::getpid(), now), -1);
}

// The program has caught it and gone on: what ends it later has another reason.
TEST_F(Blames, AnErrorOfLongAgoIsNotWhyARankEnds) {
  const PeerLostError lost({.rank = 5, .peer = 3}, "lost");
  EXPECT_EQ(read(std::chrono::seconds(10)), 3);
  EXPECT_EQ(read(std::chrono::seconds(60)), -1);
}

TEST_F(Blames, ACauseNamesTheRankThatToldIt) {
  const auto told = [&](const Cause& cause) {
    EXPECT_THROW(throw_cause(cause, {.rank = 5}), Error);
    return read();
  };
  EXPECT_EQ(told({.kind = ErrorKind::kUsage, .rank = 0, .message = "thrown in on_rank0"}), 0);
  EXPECT_EQ(told({.kind = ErrorKind::kPeerLost, .rank = 0, .peer = 2, .message = "lost"}), 2);
  EXPECT_EQ(told({.kind = ErrorKind::kTimeout, .rank = 0, .peer = 5, .message = "late"}), 0);
  EXPECT_EQ(told({.kind = ErrorKind::kUsage, .rank = 5, .message = "my own"}), -1);
}

// Numbers of another world, a descriptor that is something else by now: nothing is written.
TEST_F(Blames, OnlyTheJobsOwnRanksAndFileCount) {
  const PeerLostError elsewhere({.rank = 1, .peer = 0}, "lost");
  EXPECT_EQ(read(), -1);
  const Fd other = make_memfd("a file of the program");
  ASSERT_EQ(::dup2(other.get(), file_.get()), file_.get());
  const PeerLostError lost({.rank = 5, .peer = 3}, "lost");
  EXPECT_EQ(::lseek(other.get(), 0, SEEK_END), 0);
}

}  // namespace
}  // namespace lockstep
