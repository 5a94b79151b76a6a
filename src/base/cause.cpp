#include "base/cause.h"

#include <charconv>

#include "base/blame.h"
#include "base/text.h"

namespace lockstep {
namespace {

// An exception that was thrown because another rank told a cause keeps it.
struct Told {
  explicit Told(Cause told, int rank) : cause(std::move(told)) {
    if (cause.rank == rank) return;
    leave_blame(rank, cause.peer >= 0 && cause.peer != rank ? cause.peer : cause.rank);
  }
  Cause cause;
};

template <typename Kind>
struct ToldError final : Kind, Told {
  template <typename... Args>
  explicit ToldError(Cause told, const ErrorPlace& place, Args&&... args)
      : Kind(place, std::forward<Args>(args)...), Told(std::move(told), place.rank) {}
};

// Takes the text up to `end`, and `end` itself, off the front of `text`.
std::string_view take_until(std::string_view& text, char end) {
  const std::size_t size = std::min(text.find(end), text.size());
  const std::string_view taken = text.substr(0, size);
  text.remove_prefix(std::min(size + 1, text.size()));
  return taken;
}

}  // namespace

Cause cause_of(const std::exception_ptr& error, int rank, ErrorKind foreign) {
  Cause cause{.kind = foreign, .rank = rank, .peer = rank};
  try {
    std::rethrow_exception(error);
  } catch (const Told& told) {
    return told.cause;
  } catch (const Error& known) {
    cause.kind = known.kind();
    cause.peer = known.peer();
    cause.operation = known.operation();
    cause.message = known.message();
    if (const auto* system = dynamic_cast<const SystemError*>(&known)) cause.code = system->code();
  } catch (const std::exception& other) {
    cause.message = other.what();
  } catch (...) {
    cause.message = "an exception that is not a std::exception";
  }
  return cause;
}

std::string to_text(const Cause& cause) {
  return text::format("{} {} {} {} {}\n{}", static_cast<int>(cause.kind), cause.code, cause.rank,
                      cause.peer, cause.operation, cause.message);
}

Cause cause_from(std::string_view text) {
  Cause cause;
  const auto number = [&] {
    const std::string_view digits = take_until(text, ' ');
    int value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return value;
  };
  cause.kind = static_cast<ErrorKind>(number());
  cause.code = number();
  cause.rank = number();
  cause.peer = number();
  cause.operation = take_until(text, '\n');
  cause.message = text;
  return cause;
}

void throw_cause(const Cause& cause, const ErrorPlace& place, const std::string& from) {
  ErrorPlace here = place;
  if (here.peer < 0) here.peer = cause.peer;
  std::string message = cause.message;
  if (cause.rank != place.rank) {
    message = text::format("Because {}: {}",
                           from.empty() ? text::format("rank {}", cause.rank) : from, message);
  }
  switch (cause.kind) {
    case ErrorKind::kUsage:
      throw ToldError<UsageError>(cause, here, message);
    case ErrorKind::kMismatch:
      throw ToldError<MismatchError>(cause, here, message);
    case ErrorKind::kPeerLost:
      throw ToldError<PeerLostError>(cause, here, message);
    case ErrorKind::kTimeout:
      throw ToldError<TimeoutError>(cause, here, message);
    case ErrorKind::kSystem:
      break;
  }
  throw ToldError<SystemError>(cause, here, cause.code, message);
}

}  // namespace lockstep
