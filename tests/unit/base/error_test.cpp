#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <unistd.h>

#include <cerrno>

#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

TEST(Error, SaysWhereThenWhatThenWhatToDo) {
  const TimeoutError error({.rank = 3, .peer = 1, .step = 418, .operation = "backward"},
                           "all_reduce waited 30.0 s for rank 1.\nSee dmesg.");
  EXPECT_EQ(std::string(error.what()),
            text::format("lockstep error on rank 3 (host {}, pid {}), step 418, backward:\n"
                         "  all_reduce waited 30.0 s for rank 1.\n  See dmesg.",
                         host_name(), ::getpid()));
  EXPECT_EQ(error.rank(), 3);
  EXPECT_EQ(error.peer(), 1);
  EXPECT_EQ(error.step(), 418);
  EXPECT_EQ(error.operation(), "backward");
}

TEST(Error, LeavesOutWhatIsNotKnown) {
  const UsageError error({}, "No.");
  EXPECT_EQ(std::string(error.what()),
            text::format("lockstep error (host {}, pid {}):\n  No.", host_name(), ::getpid()));
}

TEST(Error, KindDecidesTheClass) {
  EXPECT_THROW(throw_error(ErrorKind::kUsage, {}, ""), UsageError);
  EXPECT_THROW(throw_error(ErrorKind::kMismatch, {}, ""), MismatchError);
  EXPECT_THROW(throw_error(ErrorKind::kPeerLost, {}, ""), PeerLostError);
  EXPECT_THROW(throw_error(ErrorKind::kTimeout, {}, ""), TimeoutError);
  EXPECT_THROW(throw_error(ErrorKind::kSystem, {}, ""), SystemError);
}

TEST(Error, OfTheSystemCarriesErrno) {
  try {
    duplicate(-1);
    FAIL();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), EBADF);
    EXPECT_NE(error.message().find("descriptor -1: Bad file descriptor."), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep
