#include "launch/guard.h"

#include <lockstep/error.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <initializer_list>
#include <set>

#include "base/posix.h"
#include "base/process.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr int kImpatience = 5;  // seconds that an interrupted launcher may take the second time

[[noreturn]] void be_worker(const std::function<int()>& work, pid_t guard) {
  // A group of its own: what is typed at the terminal reaches the guard, which passes it on once.
  ::setpgid(0, 0);
  ::signal(SIGTTOU, SIG_IGN);  // and it may still write there
  ::signal(SIGPIPE, SIG_IGN);
  // Whatever it was started to ignore: this is how it learns that the guard is dead.
  ::signal(SIGQUIT, SIG_DFL);
  sigset_t quit;
  ::sigemptyset(&quit);
  ::sigaddset(&quit, SIGQUIT);
  ::sigprocmask(SIG_BLOCK, &quit, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGQUIT);
  if (::getppid() != guard) ::_exit(1);
  adopt_orphans();
  int code = 1;
  try {
    code = work();
  } catch (const Error& error) {
    text::print(stderr, "lockstep: {}\n", error.message());
    code = error.kind() == ErrorKind::kUsage ? 2 : 1;
  } catch (const std::exception& error) {
    text::print(stderr, "lockstep: {}\n", error.what());
  }
  kill_all_children(kSweepDeadline);
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

sigset_t launcher_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal :
       {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD, SIGTSTP, SIGCONT}) {
    struct sigaction before {};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  return set;
}

int run_guarded(const std::function<int()>& work) {
  ::signal(SIGCHLD, SIG_DFL);  // whoever started this may have ignored it
  const sigset_t signals = launcher_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  // A shell that becomes this program leaves it children: of `lockstep run ... > >(gzip)` the gzip.
  const std::set<pid_t> of_others = children();
  adopt_orphans();
  const pid_t guard = ::getpid();
  const pid_t worker = ::fork();
  if (worker < 0)
    throw_errno("cannot start a process", "Raise the limit on processes (ulimit -u).");
  if (worker == 0) be_worker(work, guard);

  int interrupts = 0;
  auto last_interrupt = std::chrono::steady_clock::now();
  while (true) {
    if (const auto end = look_at_end(worker)) {
      kill_all_children(kSweepDeadline, of_others);
      if (end->signal == 0) return end->code;
      text::print(stderr, "lockstep: the launcher's process {} {}; all ranks were killed\n", worker,
                  end->text());
      return 128 + end->signal;
    }
    siginfo_t info{};
    const timespec pause{.tv_sec = 1, .tv_nsec = 0};
    // Without end, unless the worker may be stuck: then it is looked after every second.
    const int signal =
        interrupts < 2 ? ::sigwaitinfo(&signals, &info) : ::sigtimedwait(&signals, &info, &pause);
    const auto now = std::chrono::steady_clock::now();
    // A terminal that is closed, and some batch systems, say so twice.
    const bool is_echo = (signal == SIGTERM || signal == SIGHUP) && interrupts > 0 &&
                         now - last_interrupt < std::chrono::seconds(1);
    if (signal > 0 && signal != SIGCHLD && !is_echo) ::kill(worker, signal);
    if ((signal == SIGINT || signal == SIGTERM || signal == SIGHUP) && !is_echo) {
      ++interrupts;
      last_interrupt = now;
    }
    if (interrupts >= 2 && now - last_interrupt > std::chrono::seconds(kImpatience)) {
      ::kill(worker, SIGKILL);
    }
    if (signal == SIGTSTP) ::raise(SIGSTOP);  // the ranks stop as well; SIGCONT wakes all
  }
}

}  // namespace lockstep
