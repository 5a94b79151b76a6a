#include "world/membership.h"

#include <lockstep/error.h>

#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "base/env.h"
#include "base/lifeline.h"
#include "base/text.h"
#include "world/store.h"
#include "world/translate.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// A rank may learn of a death before the launcher does: through an engine between hosts by seconds.
constexpr auto kNoticeGrace = std::chrono::seconds(10);

Json ask(c10d::Store& line, const Json& question) try {
  return dynamic_cast<LauncherStore&>(line).ask(question);
} catch (const std::exception& error) {
  throw PeerLostError({.operation = "elastic"},
                      text::format("The launcher of this host does not answer: {}\nSee what it "
                                   "said last.",
                                   first_line(error.what())));
}

}  // namespace

Membership::Membership(c10::intrusive_ptr<c10d::Store> line, int notice_fd, JoinOptions options,
                       Placement placement)
    : line_(std::move(line)),
      notice_(notice_fd),
      options_(std::move(options)),
      placement_(std::move(placement)) {
  if (const auto lifeline = Environment::of_process().get_int(kLifelineVariable)) {
    hold_lifeline(*lifeline);
  }
}

void Membership::enter(int num_logical, const std::string& kind) {
  ask(*line_, {{"op", "elastic_enter"}, {"logical", num_logical}, {"kind", kind}});
}

void Membership::tell_step(int generation) {
  ask(*line_, {{"op", "elastic_step"}, {"generation", generation}});
}

void Membership::finish() {
  enum { kWait, kOver, kReform };  // as launch/roster.h numbers them
  const auto began = Clock::now();
  while (true) {
    const int answer = ask(*line_, {{"op", "elastic_finish"}}).at(0).get<int>();
    if (answer == kOver) return;
    if (answer == kReform) {
      throw PeerLostError({.operation = "elastic"},
                          "A rank was lost at the end of the training.\nThe others go on.");
    }
    if (Clock::now() - began > options_.timeout) {
      throw TimeoutError({.operation = "elastic"},
                         "Not all ranks have come to the end of the training.\nLook for a rank "
                         "that hangs, or raise JoinOptions::timeout.");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

NextGeneration Membership::wait_for_next(int from, bool is_planned, const std::string& kind) {
  const auto began = Clock::now();
  while (true) {
    const int formed = notice_.formed();
    const Json answer = ask(
        *line_, {{"op", "elastic_next"}, {"from", from}, {"planned", is_planned}, {"kind", kind}});
    const auto answered = static_cast<NextKind>(answer.at(0).get<int>());
    const auto waited = Clock::now() - began;
    if (answered == NextKind::kJoin) {
      return {.kind = answered,
              .number = answer.at(1),
              .rank = answer.at(2),
              .size = answer.at(3),
              .changes = answer.at(4)};
    }
    if (answered == NextKind::kRefused) {
      throw MismatchError({.operation = "elastic"},
                          text::format("This process cannot replace a rank of the job: it is\n{}\n"
                                       "and the ranks are\n{}\nStart the same program with the "
                                       "same options and variables on the same kind of machine.",
                                       kind, answer.at(1).get<std::string>()));
    }
    if (answered == NextKind::kLeave || (answered == NextKind::kIntact && waited > kNoticeGrace)) {
      return {.kind = answered};
    }
    // A newcomer may wait for long: the others admit it at the end of a step.
    if (from >= 0 && waited > options_.timeout) {
      throw TimeoutError(
          {.operation = "elastic"},
          text::format("A rank was lost, and after {:.0f} s not all others have come to form the "
                       "next generation.\nLook for a rank that hangs, or raise "
                       "JoinOptions::timeout.",
                       std::chrono::duration<double>(waited).count()));
    }
    const auto pause = pause_after(waited);
    const auto until = Clock::now() + pause;
    while (notice_.formed() == formed && Clock::now() < until) {
      std::this_thread::sleep_for(std::max<std::chrono::microseconds>(
          std::chrono::microseconds(500), pause / 16));  // one that waits for long looks seldom
    }
  }
}

}  // namespace lockstep
