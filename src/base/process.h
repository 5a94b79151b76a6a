// Processes: start one by fork + exec, name one so that a reused pid is not mistaken, see it end.
//
// Threading: safe from any thread, but see spawn(). Only async-signal-safe calls happen between
// fork and exec.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/posix.h"

namespace lockstep {

// A process of this host: the kernel reuses pids, but not together with the time of the start.
struct ProcessId {
  pid_t pid = 0;
  std::uint64_t start_time = 0;  // clock ticks since boot, from /proc/<pid>/stat
  bool operator==(const ProcessId&) const = default;
};

ProcessId this_process();

// The process that now has `pid`; start_time is 0 if there is none.
ProcessId find_process(pid_t pid);

// False once the process has ended, even while nobody has waited for it.
bool is_alive(const ProcessId& process);

// True from the moment in which the process can do nothing any more: it may still be taken apart.
bool is_ending(const ProcessId& process);

// Somebody has stopped it (SIGSTOP), or debugs it.
bool is_stopped(pid_t pid);

// What became of a process that is not alive: "was killed by signal 9 (Killed)" as long as its
// parent has not waited for it, later only "has ended".
std::string describe_end(const ProcessId& process);

pid_t parent_of(pid_t pid);

// How a process ended.
struct ExitStatus {
  int code = 0;
  int signal = 0;  // 0: it exited by itself

  static ExitStatus from_wait(int wait_status);
  bool is_ok() const { return code == 0 && signal == 0; }
  std::string text() const;  // "exited with code 3", "was killed by signal 9 (Killed)"
};

struct Command {
  std::vector<std::string> arguments = {};            // the program first; searched for in PATH
  std::map<std::string, std::string> variables = {};  // set over this process's environment
  std::vector<std::string> removed_variables = {};
  std::vector<int> inherited_fds = {};  // keep their numbers
  int stdin_fd = -1;                    // -1: this process's, as for the two below
  int stdout_fd = -1;
  int stderr_fd = -1;
  std::vector<int> cpus = {};             // to run on; empty: those of this process
  std::optional<rlim_t> open_files = {};  // its limit on them; nothing: this process's
};

// Starts the command in a process group of its own, with no signal blocked and SIGPIPE as usual; it
// is killed if this process dies.
// Requires: the calling thread outlives the command, which is killed with it as well.
// Throws SystemError if the program cannot be started, with its name and the reason.
pid_t spawn(const Command& command);

// The same without waiting for exec: a program on a file server that is gone takes for ever.
struct Starting {
  pid_t pid = 0;
  Fd outcome;  // to be read by wait_for_exec(), which does not wait once poll(2) says so
};
Starting begin_spawn(const Command& command);
// Throws SystemError if there was no exec; the process is then about to exit.
void wait_for_exec(const Fd& outcome, const std::string& program);

// How `child` has ended; nothing while it runs. It stays a zombie, so that others can see its end.
std::optional<ExitStatus> look_at_end(pid_t child);

// From now on, processes whose parent dies become children of this one if it was an ancestor.
void adopt_orphans();

// How long kill_all_children() may take.
inline constexpr std::chrono::seconds kSweepDeadline{5};

// Kills all descendants of this process until none is left; orphans are among them if it has
// adopted them. Gives up at the deadline: a process that the kernel cannot end (a dead file server)
// does not hold up the caller for ever. Returns whether all are gone. `spared` and their
// descendants are left alone.
bool kill_all_children(std::chrono::milliseconds deadline, std::set<pid_t> spared = {});

// One round of it: reaps the dead, kills the living. True if there was nothing to do; there may be
// something again as long as there are children.
bool kill_children_once(std::set<pid_t>& spared);

// Of this process, dead ones too.
std::set<pid_t> children();
bool has_children();
// Children, their children and so on, but no zombies.
std::set<pid_t> living_descendants(const std::set<pid_t>& spared = {});

// Allows this process as many open files as the system lets it have. Returns what was allowed
// before, for commands: a program may count on the usual number.
std::optional<rlim_t> raise_open_files_limit();

}  // namespace lockstep
