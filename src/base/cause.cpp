#include "base/cause.h"

#include <fmt/format.h>

namespace lockstep {

Cause cause_of(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return {known.kind(), known.peer(), known.message()};
  } catch (const std::exception& other) {
    return {ErrorKind::kSystem, rank, other.what()};
  } catch (...) {
    return {ErrorKind::kSystem, rank, "an unknown error"};
  }
}

void throw_because(const std::string& from, const Cause& cause, const ErrorPlace& place) {
  const bool was_told = cause.message.starts_with("Because rank ");
  throw_error(cause.kind, {.rank = place.rank, .peer = cause.peer, .operation = place.operation},
              was_told ? cause.message : fmt::format("Because {}: {}", from, cause.message));
}

}  // namespace lockstep
