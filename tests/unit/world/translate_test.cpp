#include "world/translate.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <stdexcept>

#include "base/process.h"
#include "world/hosts.h"

namespace lockstep {
namespace {

Member this_member(int rank) {
  const ProcessId self = this_process();
  return {.rank = rank,
          .host = "here",
          .host_id = this_host_id(),
          .pid = self.pid,
          .start_time = self.start_time};
}

template <typename Expected>
std::string translated(const std::string& cause, const std::vector<Member>& members) {
  try {
    rethrow_translated(std::make_exception_ptr(std::runtime_error(cause)), members, 0, "all_reduce",
                       "float[3], 12 bytes");
  } catch (const Expected& error) {
    return error.message();
  }
}

TEST(Translate, NamesTheRankThatIsGone) {
  Member dead = this_member(1);
  dead.start_time -= 1;  // another process had this pid
  const auto text = translated<PeerLostError>("Connection closed by peer", {this_member(0), dead});
  EXPECT_NE(text.find("all_reduce of float[3], 12 bytes lost rank 1 (host here"), std::string::npos)
      << text;
}

TEST(Translate, ABrokenConnectionToAnotherHostIsALostPeer) {
  Member remote = this_member(1);
  remote.host_id = "elsewhere";
  translated<PeerLostError>("Connection reset by peer", {this_member(0), remote});
}

TEST(Translate, ATimeoutWithAllAliveIsATimeout) {
  const auto text =
      translated<TimeoutError>("Timed out waiting 100ms", {this_member(0), this_member(1)});
  EXPECT_NE(text.find("same calls in the same order"), std::string::npos);
}

TEST(Translate, ConnectingIsBoundedByTheTimeToJoin) {
  for (const char* operation : {"join", "duplicate", "all_reduce"}) {
    try {
      rethrow_translated(std::make_exception_ptr(std::runtime_error("Timed out waiting 100ms")),
                         {this_member(0), this_member(1)}, 0, operation, "the engine 'gloo'");
    } catch (const TimeoutError& error) {
      const char* const option =
          operation == std::string("all_reduce") ? "JoinOptions::timeout." : "join_timeout.";
      EXPECT_NE(error.message().find(option), std::string::npos) << error.message();
    }
  }
}

TEST(Translate, AnythingElseIsARefusedCall) {
  const auto text =
      translated<UsageError>("Invalid scalar type\nException raised from x", {this_member(0)});
  EXPECT_NE(text.find("was refused: Invalid scalar type.\n"), std::string::npos) << text;
}

TEST(Translate, OwnErrorsPass) {
  EXPECT_THROW(rethrow_translated(std::make_exception_ptr(MismatchError({}, "x")), {this_member(0)},
                                  0, "a", "b"),
               MismatchError);
}

}  // namespace
}  // namespace lockstep
