#include "collective/operation.h"

#include <lockstep/error.h>

#include "base/text.h"
#include "collective/reduce.h"
#include "collective/runner.h"

namespace lockstep::collective {

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"barrier",   "all_reduce",     "reduce",
                                           "broadcast", "all_gather",     "gather",
                                           "scatter",   "reduce_scatter", "all_to_all"};
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

void check(const Operation& operation, int rank, int size) {
  const auto refuse = [&](const std::string& message) {
    throw UsageError({.rank = rank, .operation = name_of(operation.kind)}, message);
  };
  if (operation.root < 0 || operation.root >= size) {
    refuse(text::format("{} was given root {} in a world of {}.\nGive a rank from 0 to {}.",
                        name_of(operation.kind), operation.root, size, size - 1));
  }
  if (operation.reduction != Reduction::kNone && !can_reduce(operation.type, operation.reduction)) {
    refuse(text::format("There is no {} of {} elements.\nUse another operation or type.",
                        name_of(operation.reduction), name_of(operation.type)));
  }
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

std::exception_ptr world_has_ended(int rank) {
  return std::make_exception_ptr(
      UsageError({.rank = rank, .operation = "end"},
                 "The world ended before all operations were done.\n"
                 "Wait for what was started, on all ranks, before it ends."));
}

}  // namespace lockstep::collective
