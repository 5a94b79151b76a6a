// Lifeline: a lock in memory of the launcher that a rank of an elastic job holds as long as it
// lives.
//
// A process that is killed is taken apart before its parent hears of it, which takes some 80 ms for
// each GB of memory. The kernel frees a robust lock first, and wakes who waits for it: so the
// launcher knows of a death at once, however large the rank is.
// Threading: watch() waits on a thread of its own.
#pragma once

#include <functional>

#include "base/posix.h"

namespace lockstep {

inline constexpr const char* kLifelineVariable = "LOCKSTEP_LIFELINE";  // its descriptor's number

// The launcher's, one for each rank. Throws SystemError.
Fd make_lifeline();
// Calls `call` once, from another thread, when the rank does not hold it any more.
// Requires: the rank has taken it. Throws SystemError.
void watch_lifeline(int fd, std::function<void()> call);

// A rank's: takes it, if it has not before, and holds it until the calling thread ends. Throws
// SystemError.
void hold_lifeline(int fd);

}  // namespace lockstep
