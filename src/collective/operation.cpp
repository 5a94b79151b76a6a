#include "collective/operation.h"

#include <lockstep/error.h>

#include "base/text.h"
#include "collective/reduce.h"
#include "collective/runner.h"

namespace lockstep::collective {

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"barrier",    "all_reduce", "reduce",  "broadcast",
                                           "all_gather", "gather",     "scatter", "reduce_scatter",
                                           "all_to_all", "reduce_once"};
  const auto index = static_cast<std::size_t>(kind);
  return index < sizeof kNames / sizeof *kNames ? kNames[index] : "unknown operation";
}

Activity Signature::activity() const {
  Activity result{name_of(kind), name_of(kind)};
  if (kind != Kind::kBarrier) {
    result.text +=
        text::format(" of {}[{}], {} bytes", name_of(type), count, count * size_of(type));
    if (reduction != Reduction::kNone && reduction != Reduction::kSum) {
      result.text += text::format(", {}", name_of(reduction));
    }
    if (root != 0) result.text += text::format(", root {}", root);
  }
  if (purpose == Purpose::kNone) return result;
  return {name_of(purpose), text::format("{} ({})", name_of(purpose), result.text)};
}

Activity Message::activity(int peer_rank) const {
  return {name(),
          text::format("{} of {} bytes {} {} with tag {}", name(), bytes, is_send ? "to" : "from",
                       peer == kAnyRank ? "any rank" : text::format("rank {}", peer_rank), tag)};
}

namespace {

// Whether some element of one is another element of the other.
bool overlap_shifted(const Operation& operation) {
  const auto input = reinterpret_cast<std::uintptr_t>(operation.input.part(0));
  const auto output = reinterpret_cast<std::uintptr_t>(operation.output.part(0));
  const std::size_t bytes = operation.count * size_of(operation.type);
  return input != output && input < output + bytes && output < input + bytes;
}

// Why the operation, a kReduceOnce, cannot be; empty if it can.
std::string why_not_once(const Operation& operation, const Runner& runner) {
  if (!runner.can_reduce_once()) {
    return "reduce_once is for ranks of one host that are connected by shared memory (engine "
           "'shm').\nUse all_reduce.";
  }
  if (operation.count == 0) return {};
  if (operation.input.is_empty() || operation.output.is_empty()) {
    return "reduce_once was given no input or no output.\nGive both on every rank.";
  }
  if (overlap_shifted(operation)) {
    return "reduce_once was given an input that overlaps the output.\nGive memory that is apart, "
           "or the same.";
  }
  return {};
}

}  // namespace

void check(const Operation& operation, const Runner& runner) {
  const int size = runner.size();
  const bool is_once = operation.kind == Kind::kReduceOnce;
  const auto refuse = [&](const std::string& message) {
    throw UsageError(
        {.rank = runner.global_rank(runner.rank()), .operation = name_of(operation.kind)}, message);
  };
  if (operation.root < 0 || operation.root >= size) {
    refuse(text::format("{} was given root {} in a world of {}.\nGive a rank from 0 to {}.",
                        name_of(operation.kind), operation.root, size, size - 1));
  }
  const bool is_reduction = is_once || operation.reduction != Reduction::kNone;
  if (is_reduction && !can_reduce(operation.type, operation.reduction)) {
    refuse(text::format("There is no {} of {} elements.\nUse another operation or type.",
                        name_of(operation.reduction), name_of(operation.type)));
  }
  if (!is_once) return;
  if (const std::string reason = why_not_once(operation, runner); !reason.empty()) refuse(reason);
}

void throw_mismatch(int rank, std::uint64_t number, int first, const Signature& of_first, int other,
                    const Signature& of_other) {
  throw MismatchError(
      {.rank = rank,
       .peer = rank == other ? first : other,
       .operation = (rank == other ? of_other : of_first).activity().operation},
      text::format("Operation {} is {} on rank {}, but {} on rank {}.\nMake the same calls in the "
                   "same order, with the same sizes and types, on all ranks.",
                   number, of_first.activity().text, first, of_other.activity().text, other));
}

void throw_ended(const Activity& activity, int rank) {
  throw PeerLostError(
      {.rank = rank, .operation = activity.operation},
      activity.text + " cannot end: a rank was lost.\nAn elastic job goes on without it.");
}

std::exception_ptr world_has_ended(int rank) {
  return std::make_exception_ptr(
      UsageError({.rank = rank, .operation = "end"},
                 "The world ended before all operations were done.\n"
                 "Wait for what was started, on all ranks, before it ends."));
}

}  // namespace lockstep::collective
