#include "world/translate.h"

#include <lockstep/error.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <thread>

#include "base/text.h"

namespace lockstep {
namespace {

bool contains_any(const std::string& text, std::initializer_list<const char*> words) {
  return std::ranges::any_of(
      words, [&](const char* word) { return text.find(word) != std::string::npos; });
}

// A connection breaks a moment before the dying process is seen as dead: one that throws ends its
// threads first, which takes long on a busy machine.
constexpr auto kUntilDead = std::chrono::seconds(5);
std::optional<Member> find_dead(const std::vector<Member>& members, int rank,
                                std::chrono::seconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  const Member& here = members[static_cast<std::size_t>(rank)];
  do {
    const auto dead = std::ranges::find_if(
        members, [&](const Member& member) { return !seems_alive(member, here); });
    if (dead != members.end()) return *dead;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } while (std::chrono::steady_clock::now() < deadline);
  return std::nullopt;
}

}  // namespace

std::string first_line(std::string_view text) {
  const std::size_t trace = text.find("Exception raised from");
  text = text.substr(0, std::min(trace, text.find('\n')));
  while (!text.empty() && (text.back() == ' ' || text.back() == '.')) text.remove_suffix(1);
  return std::string(text) + ".";
}

void rethrow_translated(std::exception_ptr error, const std::vector<Member>& members, int rank,
                        const std::string& operation, const std::string& subject) {
  ErrorPlace place{.rank = members[static_cast<std::size_t>(rank)].rank, .operation = operation};
  std::string cause;
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& foreign) {
    cause = first_line(foreign.what());
  } catch (...) {
    cause = "an exception that is not a std::exception.";
  }
  const std::string what = text::format("{} of {}", operation, subject);
  const bool is_timeout = contains_any(cause, {"imed out", "imeout"});
  const bool is_broken =
      contains_any(cause, {"onnection", "closed", "reset by peer", "Broken pipe", "ocket"});
  if (is_timeout || is_broken) {
    if (const auto dead =
            find_dead(members, rank, is_timeout ? std::chrono::seconds(0) : kUntilDead)) {
      place.peer = dead->rank;
      throw PeerLostError(place, text::format("{} lost {}: its process has ended.\n"
                                              "Look at the last lines of rank {}, fix the cause "
                                              "and restart the job.",
                                              what, describe(*dead), dead->rank));
    }
    if (is_timeout) {
      throw TimeoutError(
          place,
          text::format("{} waited too long for another rank: {}\nCheck that all "
                       "ranks run the same program and make the same calls in the "
                       "same order, or raise JoinOptions::{}.",
                       what, cause,
                       operation == "join" || operation == "duplicate" || operation == "split"
                           ? "join_timeout"  // which bounds connecting
                           : "timeout"));
    }
    throw PeerLostError(place, text::format("{} lost its connection to another rank: {}\n"
                                            "Look for the rank that failed first.",
                                            what, cause));
  }
  throw UsageError(
      place, text::format("{} was refused: {}\nUse another type, size or engine.", what, cause));
}

}  // namespace lockstep
