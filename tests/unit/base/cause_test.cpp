#include "base/cause.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

template <typename Kind, typename... Args>
std::exception_ptr error(Args&&... args) {
  return std::make_exception_ptr(Kind(std::forward<Args>(args)...));
}

Cause travel(const Cause& cause) { return cause_from(to_text(cause)); }

TEST(Cause, ArrivesAsItWasTold) {
  const Cause cause = travel(cause_of(
      error<SystemError>(ErrorPlace{.peer = 4, .operation = "replica check"}, 28, "no\nroom"), 7));
  EXPECT_EQ(cause.kind, ErrorKind::kSystem);
  EXPECT_EQ(cause.code, 28);
  EXPECT_EQ(cause.rank, 7);
  EXPECT_EQ(cause.peer, 4);
  EXPECT_EQ(cause.operation, "replica check");
  EXPECT_EQ(cause.message, "no\nroom");
}

TEST(Cause, KeepsItsFirstRankHoweverOftenItIsPassedOn) {
  Cause cause = cause_of(error<PeerLostError>(ErrorPlace{.peer = 3}, "lost rank 3"), 1);
  for (const int rank : {2, 5}) {
    try {
      throw_cause(travel(cause), {.rank = rank, .operation = "barrier"});
    } catch (const PeerLostError& told) {
      EXPECT_EQ(told.rank(), rank);
      EXPECT_EQ(told.peer(), 3);
      EXPECT_EQ(told.operation(), "barrier");
      EXPECT_EQ(told.message(), "Because rank 1: lost rank 3");
      cause = cause_of(std::current_exception(), rank);
    }
    EXPECT_EQ(cause.rank, 1);
    EXPECT_EQ(cause.message, "lost rank 3");
  }
}

TEST(Cause, IsPlainOnItsOwnRankAndDescribedOnOthers) {
  const Cause cause{.kind = ErrorKind::kSystem, .code = 5, .rank = 1, .message = "broken"};
  try {
    throw_cause(cause, {.rank = 1, .peer = 0});
  } catch (const SystemError& own) {
    EXPECT_EQ(own.message(), "broken");
    EXPECT_EQ(own.code(), 5);
    EXPECT_EQ(own.peer(), 0);
  }
  try {
    throw_cause(cause, {.rank = 2}, "rank 1 (host b, pid 9)");
  } catch (const SystemError& told) {
    EXPECT_EQ(told.message(), "Because rank 1 (host b, pid 9): broken");
  }
}

TEST(Cause, OfAForeignExceptionIsWhatTheCallerSays) {
  const auto foreign = error<std::runtime_error>("no such file");
  EXPECT_EQ(cause_of(foreign, 3).kind, ErrorKind::kSystem);
  const Cause cause = cause_of(foreign, 3, ErrorKind::kUsage);
  EXPECT_EQ(cause.kind, ErrorKind::kUsage);
  EXPECT_EQ(cause.peer, 3);
  EXPECT_EQ(cause.message, "no such file");
}

TEST(Cause, ThatWasCutOffLosesOnlyItsEnd) {
  const std::string text = to_text({.rank = 12, .operation = "save", .message = "a long message"});
  const Cause cause = cause_from(text.substr(0, text.size() - 8));
  EXPECT_EQ(cause.rank, 12);
  EXPECT_EQ(cause.operation, "save");
  EXPECT_EQ(cause.message, "a long");
  for (std::size_t size = 0; size < text.size(); ++size) {
    static_cast<void>(cause_from(std::string_view(text).substr(0, size)));  // never throws
  }
}

}  // namespace
}  // namespace lockstep
