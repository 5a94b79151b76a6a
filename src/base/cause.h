// Cause: an error as ranks tell it each other. The first cause is everybody's error: whoever is
// told of one passes it on as it is.
#pragma once

#include <lockstep/error.h>

#include <exception>
#include <string>

namespace lockstep {

struct Cause {
  ErrorKind kind = ErrorKind::kSystem;
  int peer = -1;  // the rank that it is about, if it is known
  std::string message = {};
};

// What `error`, thrown on `rank`, says to others.
Cause cause_of(const std::exception_ptr& error, int rank);

// Throws on the rank of `place` what another has told; `from` begins with "rank N".
[[noreturn]] void throw_because(const std::string& from, const Cause& cause,
                                const ErrorPlace& place);

}  // namespace lockstep
