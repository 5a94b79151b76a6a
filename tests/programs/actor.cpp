// A program for the launcher's tests: does what its arguments say, one after the other.
//
//   actor "print hello" "@1 exit 3" "sleep 60"
//
// "@1 " in front: only rank 1 does it; "@gen0 ": only the first generation does.

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "base/cause.h"
#include "base/text.h"

namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

void sleep_for(double seconds) {
  timespec left{
      static_cast<time_t>(seconds),
      static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
  while (::nanosleep(&left, &left) != 0) {
  }
}

int code_when_caught = 0;
volatile std::sig_atomic_t num_caught = 0;

void leave(int) { ::_exit(code_when_caught); }
void count(int) { num_caught = num_caught + 1; }

// A child that has gone as far from its parent as it can.
void start_daemon() {
  int ends[2];
  if (::pipe(ends) != 0) std::abort();
  if (::fork() == 0) {
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    std::signal(SIGTERM, SIG_IGN);
    std::signal(SIGHUP, SIG_IGN);
    [[maybe_unused]] const ssize_t told = ::write(ends[1], "x", 1);
    sleep_for(600);
    ::_exit(0);
  }
  char ready = 0;
  [[maybe_unused]] const ssize_t got = ::read(ends[0], &ready, 1);
}

// Each is a child of nobody here any more when it ends.
void start_orphans(int count) {
  for (int i = 0; i < count; ++i) {
    const pid_t parent = ::fork();
    if (parent == 0) {
      if (::fork() == 0) sleep_for(0.1);
      ::_exit(0);
    }
    ::waitpid(parent, nullptr, 0);
  }
}

void act(const std::string& what, const std::string& argument) {
  const auto number = [&] { return std::atof(argument.c_str()); };
  if (what == "print") {
    std::cout << argument << std::endl;
  } else if (what == "error") {
    std::cerr << argument << std::endl;
  } else if (what == "raw") {
    std::cout << argument << std::flush;
  } else if (what == "bar") {
    std::cout << argument << '\r' << std::flush;
  } else if (what == "sleep") {
    sleep_for(number());
  } else if (what == "exit") {
    std::exit(static_cast<int>(number()));
  } else if (what == "raise") {
    std::raise(static_cast<int>(number()));
  } else if (what == "ignore") {
    std::signal(static_cast<int>(number()), SIG_IGN);
  } else if (what == "catch") {  // "catch 15 7": exit with 7
    std::istringstream numbers(argument);
    int signal = 0;
    numbers >> signal >> code_when_caught;
    std::signal(signal, leave);
  } else if (what == "count") {  // "count 10": wait for this signal, then say so
    std::signal(static_cast<int>(number()), count);
    std::cout << "ready" << std::endl;
    while (num_caught == 0) ::usleep(1000);
    std::cout << "caught " << argument << std::endl;
  } else if (what == "daemon") {
    start_daemon();
  } else if (what == "orphans") {
    start_orphans(static_cast<int>(number()));
  } else if (what == "told") {  // "told 0": throws what rank 0 has thrown, as on_rank0 does
    lockstep::throw_cause({.kind = lockstep::ErrorKind::kUsage,
                           .rank = static_cast<int>(number()),
                           .message = "the first cause"},
                          {.rank = std::atoi(variable("RANK").c_str()), .operation = "on_rank0"});
  } else if (what == "env") {
    std::cout << argument << "=" << variable(argument.c_str()) << std::endl;
  } else if (what == "pid") {
    std::cout << "pid " << ::getpid() << std::endl;
  } else if (what == "cpus") {
    cpu_set_t set;
    ::sched_getaffinity(0, sizeof set, &set);
    std::cout << "cpus " << CPU_COUNT(&set) << " first";
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &set)) continue;
      std::cout << " " << cpu << std::endl;
      break;
    }
  } else if (what == "fds") {
    int open = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      open += entry.path().filename() != "" ? 1 : 0;
    }
    std::cout << "fds " << open - 1 << std::endl;  // one reads the folder
  } else if (what == "blocked") {
    sigset_t blocked;
    ::sigprocmask(SIG_BLOCK, nullptr, &blocked);
    struct sigaction pipe {};
    ::sigaction(SIGPIPE, nullptr, &pipe);
    std::cout << "blocked " << ::sigismember(&blocked, SIGTERM) << ::sigismember(&blocked, SIGCHLD)
              << (pipe.sa_handler == SIG_IGN ? 1 : 0) << std::endl;
  } else if (what == "stdin") {
    std::string line;
    while (std::getline(std::cin, line)) std::cout << "read " << line << std::endl;
    std::cout << "end of input" << std::endl;
  } else if (what == "lines") {  // "lines 1000 80": so many lines of so many bytes
    std::istringstream numbers(argument);
    long count_of_lines = 0;
    std::size_t width = 0;
    numbers >> count_of_lines >> width;
    std::string line(width, static_cast<char>('a' + std::atoi(variable("RANK").c_str()) % 26));
    line.back() = '\n';
    for (long i = 0; i < count_of_lines; ++i) {
      const std::string head = lockstep::text::format("{:010}", i);
      line.replace(0, head.size(), head);
      std::fwrite(line.data(), 1, line.size(), stdout);
    }
    std::fflush(stdout);
  } else {
    std::cerr << "actor cannot '" << what << "'" << std::endl;
    std::exit(99);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string text = argv[i];
    bool is_mine = true;
    while (!text.empty() && text.front() == '@') {
      const std::size_t space = text.find(' ');
      const std::string who = text.substr(1, space - 1);
      is_mine &= who.starts_with("gen") ? variable("TORCHELASTIC_RESTART_COUNT") == who.substr(3)
                                        : variable("RANK") == who;
      text.erase(0, space + 1);
    }
    const std::size_t space = text.find(' ');
    if (is_mine)
      act(text.substr(0, space), space == std::string::npos ? "" : text.substr(space + 1));
  }
}
