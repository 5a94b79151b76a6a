// Translation: what LibTorch and its engines throw, as errors that name operation, rank and remedy.
#pragma once

#include <lockstep/backend.h>

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "engine/hosts.h"

namespace lockstep {

// LibTorch appends a stack trace to its messages; people need the first line.
std::string first_line(std::string_view text);

// Throws the error that fits: PeerLostError if a rank of this host is gone or a connection broke,
// TimeoutError, else UsageError. An error of lockstep's own passes unchanged.
// `rank` is this one's place in `members`. `operation` is "all_reduce", `subject` is "float[3, 4],
// 48 bytes".
[[noreturn]] void rethrow_translated(std::exception_ptr error, const std::vector<Member>& members,
                                     int rank, const std::string& operation,
                                     const std::string& subject);

}  // namespace lockstep
