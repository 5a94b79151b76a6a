// The heading of every error: rank, host, process, step and operation, as far as they are known.

#include <lockstep/error.h>

#include <unistd.h>

#include "base/blame.h"
#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

std::string with_heading(const ErrorPlace& place, const std::string& message) {
  std::string text = "lockstep error";
  if (place.rank >= 0) text += text::format(" on rank {}", place.rank);
  text += text::format(" (host {}, pid {})", host_name(), ::getpid());
  if (place.step >= 0) text += text::format(", step {}", place.step);
  if (!place.operation.empty()) text += ", " + place.operation;
  text += ":\n  ";
  for (const char c : message) {
    text += c;
    if (c == '\n') text += "  ";
  }
  return text;
}

}  // namespace

Error::Error(ErrorKind kind, ErrorPlace place, std::string message)
    : std::runtime_error(with_heading(place, message)),
      kind_(kind),
      place_(std::move(place)),
      message_(std::move(message)) {
  if (place_.rank < 0) return;
  const bool is_about_peer = kind == ErrorKind::kPeerLost || kind == ErrorKind::kTimeout;
  leave_blame(place_.rank, is_about_peer ? place_.peer : -1);
}

void throw_error(ErrorKind kind, ErrorPlace place, std::string message) {
  switch (kind) {
    case ErrorKind::kUsage:
      throw UsageError(std::move(place), std::move(message));
    case ErrorKind::kMismatch:
      throw MismatchError(std::move(place), std::move(message));
    case ErrorKind::kPeerLost:
      throw PeerLostError(std::move(place), std::move(message));
    case ErrorKind::kTimeout:
      throw TimeoutError(std::move(place), std::move(message));
    case ErrorKind::kSystem:
      break;
  }
  throw SystemError(std::move(place), 0, std::move(message));
}

}  // namespace lockstep
