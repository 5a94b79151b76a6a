// Blame: by this a rank tells the launcher of its host that it fails because of another rank. So
// the launcher names the rank that failed first, not the one that ended first.
//
// The ranks of a host share a memory file with a note for each, which errors write (error.cpp,
// cause.cpp). A variable says where it is: LOCKSTEP_BLAME=FD:LOCAL_RANK:INODE; the program may have
// closed the descriptor and used its number again.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

namespace lockstep {

inline constexpr const char* kBlameVariable = "LOCKSTEP_BLAME";

// The variable's value for a rank.
std::string blame_address(int fd, int local_rank);

// `rank`, this one, fails because of `blamed`; -1: by itself. Does nothing without the variable, or
// if this process has another rank in the job: worlds of some ranks have numbers of their own.
void leave_blame(int rank, int blamed) noexcept;

// What the rank that was the process `pid`, and has ended at `end`, has left; -1 if nothing. What
// it left long before is no reason for its end: it has caught that error.
int read_blame(int fd, int local_rank, pid_t pid, std::chrono::steady_clock::time_point end);

}  // namespace lockstep
