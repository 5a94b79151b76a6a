// Cause: an error as ranks tell each other. There is one way to do it, whatever carries the text.
//
// The first cause is everybody's error: a rank that is told of one passes it on as it is, so that
// all ranks name the same rank and the same reason.
#pragma once

#include <lockstep/error.h>

#include <exception>
#include <string>
#include <string_view>

namespace lockstep {

struct Cause {
  ErrorKind kind = ErrorKind::kSystem;
  int code = 0;   // errno of an ErrorKind::kSystem
  int rank = -1;  // where it was seen first
  int peer = -1;  // the rank that it is about, if it is known
  std::string operation = {};
  std::string message = {};
};

// What `error`, caught on `rank`, says to others: the cause that another rank has told, or a new
// one. An exception that is not lockstep's becomes `foreign`.
Cause cause_of(const std::exception_ptr& error, int rank, ErrorKind foreign = ErrorKind::kSystem);

// One text and back. The message is last, so that a text that was cut off loses only its end.
std::string to_text(const Cause& cause);
Cause cause_from(std::string_view text);

// Throws the cause on the rank of `place`, as "Because rank 2: ..." if another rank has seen it.
// `from` describes that rank, such as "rank 2 (host b7, pid 4121)"; empty: "rank 2".
[[noreturn]] void throw_cause(const Cause& cause, const ErrorPlace& place,
                              const std::string& from = {});

}  // namespace lockstep
