#include "base/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <lockstep/error.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <sstream>

#include "base/posix.h"

namespace lockstep {
namespace {

struct Stat {
  char state = '\0';
  pid_t parent = 0;
  std::uint64_t start_time = 0;
  int exit_status = 0;  // as of wait(2); of a zombie
};

// The name of a process may hold spaces and brackets: the fields begin after the last ")".
Stat read_stat(pid_t pid) {
  const std::string text = read_small_file(fmt::format("/proc/{}/stat", pid));
  const std::size_t name_end = text.rfind(')');
  Stat stat;
  if (name_end == std::string::npos) return stat;
  std::istringstream fields(text.substr(name_end + 1));
  fields >> stat.state >> stat.parent;
  // proc(5) counts fields from 1: 4 is the parent, 22 the start time, 52 the exit status.
  std::string skipped;
  for (int field = 5; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  for (int field = 23; field < 52; ++field) fields >> skipped;
  fields >> stat.exit_status;
  return stat;
}

std::vector<std::string> merged_environment(const Command& command) {
  std::vector<std::string> merged;
  const auto is_replaced = [&](const std::string& name) {
    return command.variables.contains(name) ||
           std::ranges::find(command.removed_variables, name) != command.removed_variables.end();
  };
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    if (!is_replaced(text.substr(0, text.find('=')))) merged.push_back(text);
  }
  for (const auto& [name, value] : command.variables) merged.push_back(name + "=" + value);
  return merged;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// Runs in the child, between fork and exec. Returns only if something failed, with errno set.
void become(const Command& command, char** arguments, char** environment, pid_t parent) {
  ::setpgid(0, 0);
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // the parent died before the line above
  for (const int fd : command.inherited_fds) {
    if (::fcntl(fd, F_SETFD, 0) != 0) return;
  }
  if (command.stdout_fd >= 0 && ::dup2(command.stdout_fd, STDOUT_FILENO) < 0) return;
  if (command.stderr_fd >= 0 && ::dup2(command.stderr_fd, STDERR_FILENO) < 0) return;
  ::execvpe(arguments[0], arguments, environment);
}

}  // namespace

ProcessId this_process() { return find_process(::getpid()); }

ProcessId find_process(pid_t pid) { return {pid, read_stat(pid).start_time}; }

bool is_alive(const ProcessId& process) {
  const Stat stat = read_stat(process.pid);
  return stat.start_time == process.start_time && stat.start_time != 0 && stat.state != 'Z' &&
         stat.state != 'X';
}

std::string describe_end(const ProcessId& process) {
  const Stat stat = read_stat(process.pid);
  const bool is_zombie = stat.start_time == process.start_time && stat.state == 'Z';
  return is_zombie ? ExitStatus::from_wait(stat.exit_status).text() : "has ended";
}

pid_t parent_of(pid_t pid) { return read_stat(pid).parent; }

ExitStatus ExitStatus::from_wait(int wait_status) {
  if (WIFSIGNALED(wait_status)) return {.code = 0, .signal = WTERMSIG(wait_status)};
  return {.code = WEXITSTATUS(wait_status), .signal = 0};
}

std::string ExitStatus::text() const {
  if (signal == 0) return fmt::format("exited with code {}", code);
  return fmt::format("was killed by signal {} ({})", signal, ::strsignal(signal));
}

pid_t spawn(const Command& command) {
  std::vector<std::string> argument_texts = command.arguments;
  std::vector<std::string> variable_texts = merged_environment(command);
  std::vector<char*> arguments = pointers(argument_texts);
  std::vector<char*> environment = pointers(variable_texts);
  Pipe failure = make_pipe();  // closed by exec; carries errno if there was no exec
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("cannot start a process", "Raise the limit on processes (ulimit -u).");
  if (pid == 0) {
    become(command, arguments.data(), environment.data(), parent);
    const int code = errno;
    [[maybe_unused]] const ssize_t told = ::write(failure.write_end.get(), &code, sizeof code);
    ::_exit(127);
  }
  ::setpgid(pid, pid);  // also here: whoever of the two comes first
  failure.write_end.reset();
  int code = 0;
  ssize_t count = 0;
  do {
    count = ::read(failure.read_end.get(), &code, sizeof code);
  } while (count < 0 && errno == EINTR);
  if (count == static_cast<ssize_t>(sizeof code)) {
    ::waitpid(pid, nullptr, 0);
    errno = code;
    throw_errno(fmt::format("cannot start '{}'", command.arguments.front()),
                "Check that the program exists and may be executed.");
  }
  return pid;
}

}  // namespace lockstep
