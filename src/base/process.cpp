#include "base/process.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>

#include "base/text.h"

namespace lockstep {
namespace {

struct Stat {
  char state = '\0';
  pid_t parent = 0;
  unsigned flags = 0;
  std::uint64_t start_time = 0;
  int exit_status = 0;  // as of wait(2); of a zombie
};

// The name of a process may hold spaces and brackets: the fields begin after the last ")".
Stat read_stat(pid_t pid) {
  const std::string text = read_small_file(text::format("/proc/{}/stat", pid));
  const std::size_t name_end = text.rfind(')');
  Stat stat;
  if (name_end == std::string::npos) return stat;
  std::istringstream fields(text.substr(name_end + 1));
  fields >> stat.state >> stat.parent;
  // proc(5) counts fields from 1: 4 is the parent, 9 the flags, 22 the start time, 52 the exit
  // status.
  std::string skipped;
  for (int field = 5; field < 9; ++field) fields >> skipped;
  fields >> stat.flags;
  for (int field = 10; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  for (int field = 23; field < 52; ++field) fields >> skipped;
  fields >> stat.exit_status;
  return stat;
}

std::map<pid_t, Stat> all_processes() {
  std::map<pid_t, Stat> all;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::stol(name));
    all.emplace(pid, read_stat(pid));
  }
  return all;
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

// What sched_setaffinity(2) takes, of any length.
std::vector<std::byte> cpu_mask(const std::vector<int>& cpus) {
  if (cpus.empty()) return {};
  const int count = *std::ranges::max_element(cpus) + 1;
  std::vector<std::byte> mask(CPU_ALLOC_SIZE(count));
  for (const int cpu : cpus) CPU_SET_S(cpu, mask.size(), reinterpret_cast<cpu_set_t*>(mask.data()));
  return mask;
}

// Runs in the child, between fork and exec. Returns only if something failed, with errno set.
void become(const Command& command, char** arguments, char** environment,
            const std::vector<std::byte>& cpus, pid_t parent) {
  ::setpgid(0, 0);
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // the parent died before the line above
  for (const int fd : command.inherited_fds) {
    if (::fcntl(fd, F_SETFD, 0) != 0) return;
  }
  if (!cpus.empty() &&
      ::sched_setaffinity(0, cpus.size(), reinterpret_cast<const cpu_set_t*>(cpus.data())) != 0) {
    return;
  }
  if (command.open_files) {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = *command.open_files;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  }
  if (command.stdin_fd >= 0 && ::dup2(command.stdin_fd, STDIN_FILENO) < 0) return;
  if (command.stdout_fd >= 0 && ::dup2(command.stdout_fd, STDOUT_FILENO) < 0) return;
  if (command.stderr_fd >= 0 && ::dup2(command.stderr_fd, STDERR_FILENO) < 0) return;
  // What this process has done to its own signals would be inherited.
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  ::signal(SIGTTOU, SIG_DFL);
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

bool is_ending(const ProcessId& process) {
  constexpr unsigned kExiting = 0x4;  // PF_EXITING of the kernel's include/linux/sched.h
  return !is_alive(process) || (read_stat(process.pid).flags & kExiting) != 0;
}

bool is_stopped(pid_t pid) {
  const char state = read_stat(pid).state;
  return state == 'T' || state == 't';
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
  if (signal == 0) return text::format("exited with code {}", code);
  return text::format("was killed by signal {} ({})", signal, ::strsignal(signal));
}

Starting begin_spawn(const Command& command) {
  std::vector<std::string> argument_texts = command.arguments;
  std::vector<std::string> variable_texts = merged_environment(command);
  std::vector<char*> arguments = pointers(argument_texts);
  std::vector<char*> environment = pointers(variable_texts);
  const std::vector<std::byte> cpus = cpu_mask(command.cpus);
  Pipe failure = make_pipe();  // closed by exec; carries errno if there was no exec
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("cannot start a process", "Raise the limit on processes (ulimit -u).");
  if (pid == 0) {
    become(command, arguments.data(), environment.data(), cpus, parent);
    const int code = errno;
    [[maybe_unused]] const ssize_t told = ::write(failure.write_end.get(), &code, sizeof code);
    ::_exit(127);
  }
  ::setpgid(pid, pid);  // also here: whoever of the two comes first
  return {.pid = pid, .outcome = std::move(failure.read_end)};
}

void wait_for_exec(const Fd& outcome, const std::string& program) {
  int code = 0;
  ssize_t count = 0;
  do {
    count = ::read(outcome.get(), &code, sizeof code);
  } while (count < 0 && errno == EINTR);
  if (count == static_cast<ssize_t>(sizeof code)) {
    errno = code;
    throw_errno(text::format("cannot start '{}'", program),
                "Check that the program exists and may be executed.");
  }
}

pid_t spawn(const Command& command) {
  const Starting starting = begin_spawn(command);
  try {
    wait_for_exec(starting.outcome, command.arguments.front());
  } catch (const Error&) {
    ::waitpid(starting.pid, nullptr, 0);
    throw;
  }
  return starting.pid;
}

std::optional<ExitStatus> look_at_end(pid_t child) {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  if (info.si_code == CLD_EXITED) return ExitStatus{.code = info.si_status, .signal = 0};
  return ExitStatus{.code = 0, .signal = info.si_status};
}

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::set<pid_t> children() {
  std::set<pid_t> all;
  for (const auto& [pid, stat] : all_processes()) {
    if (stat.parent == ::getpid()) all.insert(pid);
  }
  return all;
}

bool has_children() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

std::set<pid_t> living_descendants(const std::set<pid_t>& spared) {
  const std::map<pid_t, Stat> all = all_processes();
  std::multimap<pid_t, pid_t> children_of;
  for (const auto& [pid, stat] : all) children_of.emplace(stat.parent, pid);
  std::set<pid_t> found;
  std::vector<pid_t> parents = {::getpid()};
  while (!parents.empty()) {
    const auto [first, last] = children_of.equal_range(parents.back());
    parents.pop_back();
    for (auto child = first; child != last; ++child) {
      if (spared.contains(child->second)) continue;
      if (found.insert(child->second).second) parents.push_back(child->second);
    }
  }
  std::erase_if(found, [&](pid_t pid) {
    const char state = all.at(pid).state;
    return state == 'Z' || state == 'X';
  });
  return found;
}

bool kill_children_once(std::set<pid_t>& spared) {
  // Dead ones go first: their children may become ours, and are found below.
  for (pid_t reaped = 0; (reaped = ::waitpid(-1, nullptr, WNOHANG)) > 0;) {
    spared.erase(reaped);  // the number may be given to another
  }
  if (!has_children()) return true;
  const std::set<pid_t> left = living_descendants(spared);
  for (const pid_t pid : left) ::kill(pid, SIGKILL);
  return left.empty();
}

bool kill_all_children(std::chrono::milliseconds deadline, std::set<pid_t> spared) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  int num_quiet = 0;  // rounds that found none but the spared: one may miss what is just being made
  while (true) {
    const bool is_quiet = kill_children_once(spared);
    if (!has_children()) return true;
    num_quiet = is_quiet && !spared.empty() ? num_quiet + 1 : 0;
    if (num_quiet == 3) return true;
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::optional<rlim_t> raise_open_files_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::nullopt;
  const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  return before;
}

}  // namespace lockstep
