// Errors: one class per thing a caller can do about it, each with the place where it happened.
//
// The text always says what happened, on which rank, and one action to take (docs/errors.md).
// Needs only the standard library.
#pragma once

#include <lockstep/export.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep {

// What a program exits with that was told to stop and has saved its state: `lockstep run` knows it,
// and schedulers that go by exit codes can (sysexits.h: "try again later").
inline constexpr int kExitPreempted = 75;

enum class ErrorKind { kUsage, kMismatch, kPeerLost, kTimeout, kSystem };

// Where an error happened. Negative or empty means that it is not known.
struct ErrorPlace {
  int rank = -1;
  int peer = -1;
  std::int64_t step = -1;
  std::string operation = {};
};

class LOCKSTEP_API Error : public std::runtime_error {
 public:
  // `message`: one line or several: what happened, then what to do.
  Error(ErrorKind kind, ErrorPlace place, std::string message);

  ErrorKind kind() const noexcept { return kind_; }
  int rank() const noexcept { return place_.rank; }
  int peer() const noexcept { return place_.peer; }
  std::int64_t step() const noexcept { return place_.step; }
  const std::string& operation() const noexcept { return place_.operation; }

  // The text without the heading that names rank, host and process; what() has both.
  const std::string& message() const noexcept { return message_; }

 private:
  ErrorKind kind_;
  ErrorPlace place_;
  std::string message_;
};

// The call or its environment is wrong: fix it.
class LOCKSTEP_API UsageError : public Error {
 public:
  UsageError(ErrorPlace place, std::string message)
      : Error(ErrorKind::kUsage, std::move(place), std::move(message)) {}
};

// Ranks disagree; the text shows both sides.
class LOCKSTEP_API MismatchError : public Error {
 public:
  MismatchError(ErrorPlace place, std::string message)
      : Error(ErrorKind::kMismatch, std::move(place), std::move(message)) {}
};

// A rank is gone; peer() says which, where it is known.
class LOCKSTEP_API PeerLostError : public Error {
 public:
  PeerLostError(ErrorPlace place, std::string message)
      : Error(ErrorKind::kPeerLost, std::move(place), std::move(message)) {}
};

// A deadline passed; peer() says who was missing, where it is known.
class LOCKSTEP_API TimeoutError : public Error {
 public:
  TimeoutError(ErrorPlace place, std::string message)
      : Error(ErrorKind::kTimeout, std::move(place), std::move(message)) {}
};

// The operating system refused something; code() is its errno.
class LOCKSTEP_API SystemError : public Error {
 public:
  SystemError(ErrorPlace place, int code, std::string message)
      : Error(ErrorKind::kSystem, std::move(place), std::move(message)), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

// Throws the class that belongs to `kind`.
[[noreturn]] LOCKSTEP_API void throw_error(ErrorKind kind, ErrorPlace place, std::string message);

}  // namespace lockstep
