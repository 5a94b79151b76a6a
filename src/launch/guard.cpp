#include "launch/guard.h"

#include <lockstep/error.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <optional>
#include <set>
#include <thread>

#include "base/posix.h"
#include "base/process.h"
#include "base/text.h"
#include "launch/event_loop.h"

namespace lockstep {
namespace {

// What an interrupted launcher may take besides the ranks' grace: it kills twice (kSweepDeadline),
// tells other hosts (3 s), and shows what the ranks have said last (5 s).
constexpr auto kOwnTime = std::chrono::seconds(20);
constexpr auto kImpatience = std::chrono::seconds(5);  // and the second time, all in all
// For the worker to see by itself that the guard is dead, and to tell other hosts.
constexpr auto kOrphanTime = std::chrono::seconds(2);

constexpr int kKilled = 128 + SIGKILL;  // an exit code

// On a thread of the worker: `guard` ends when the guard does. Then the worker kills its ranks and
// leaves; if it does not, this does.
void end_with_guard(const Fd& guard, std::chrono::milliseconds stop_grace) {
  char byte = 0;
  while (::read(guard.get(), &byte, 1) < 0 && errno == EINTR) {
  }
  std::this_thread::sleep_for(kOrphanTime);
  if (!living_descendants().empty()) {
    kill_all_children(kSweepDeadline);
    ::_exit(kKilled);
  }
  std::this_thread::sleep_for(stop_grace + kOwnTime);  // ranks of other hosts have theirs
  ::_exit(kKilled);
}

[[noreturn]] void be_worker(const std::function<int()>& work, pid_t guard, Fd guard_life,
                            std::chrono::milliseconds stop_grace) {
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
    start_thread([life = std::move(guard_life), stop_grace] { end_with_guard(life, stop_grace); });
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

// Says why the ranks were killed, and whether all are gone. Signals work as usual meanwhile: nobody
// may read this.
void say_killed(const std::string& why, bool are_gone, const sigset_t& signals) {
  ::sigprocmask(SIG_UNBLOCK, &signals, nullptr);
  text::print(stderr, "lockstep: the launcher's process {}; {}\n", why,
              are_gone ? "all ranks were killed"
                       : "some processes do not end, not even when killed: see ps and dmesg");
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

int run_guarded(const std::function<int()>& work, std::chrono::milliseconds stop_grace) {
  ::signal(SIGCHLD, SIG_DFL);  // whoever started this may have ignored it
  const sigset_t signals = launcher_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  // A shell that becomes this program leaves it children: of `lockstep run ... > >(gzip)` the gzip.
  const std::set<pid_t> of_others = children();
  adopt_orphans();
  Pipe life = make_pipe();
  const pid_t guard = ::getpid();
  const pid_t worker = ::fork();
  if (worker < 0)
    throw_errno("cannot start a process", "Raise the limit on processes (ulimit -u).");
  if (worker == 0) {
    life.write_end.reset();
    be_worker(work, guard, std::move(life.read_end), stop_grace);
  }
  life.read_end.reset();

  int first_interrupt = 0;  // the signal
  EventLoop::Clock::time_point last_interrupt;
  std::optional<EventLoop::Clock::time_point> deadline;  // for the worker to end
  while (true) {
    if (const auto end = look_at_end(worker)) {
      const bool are_gone = kill_all_children(kSweepDeadline, of_others);
      if (end->signal == 0) return end->code;
      say_killed(text::format("{} {}", worker, end->text()), are_gone, signals);
      return 128 + end->signal;
    }
    if (deadline && EventLoop::Clock::now() >= *deadline) {
      // With the ranks: the worker may be unable to die, too.
      const bool are_gone = kill_all_children(kSweepDeadline, of_others);
      say_killed(text::format("{} did not end in time after signal {}", worker, first_interrupt),
                 are_gone, signals);
      return 128 + first_interrupt;
    }
    siginfo_t info{};
    const timespec pause{.tv_sec = 1, .tv_nsec = 0};
    const int signal =
        deadline ? ::sigtimedwait(&signals, &info, &pause) : ::sigwaitinfo(&signals, &info);
    const auto now = EventLoop::Clock::now();
    // A terminal that is closed, and some batch systems, say so twice.
    const bool is_echo = (signal == SIGTERM || signal == SIGHUP) && first_interrupt != 0 &&
                         now - last_interrupt < std::chrono::seconds(1);
    if (signal <= 0 || is_echo) continue;
    if (signal != SIGCHLD) ::kill(worker, signal);
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT) {
      const bool is_urgent = first_interrupt != 0 || signal == SIGQUIT;
      const auto limit = is_urgent ? now + kImpatience : now + stop_grace + kOwnTime;
      deadline = std::min(limit, deadline.value_or(limit));
      if (first_interrupt == 0) first_interrupt = signal;
      last_interrupt = now;
    }
    if (signal == SIGTSTP) ::raise(SIGSTOP);  // the ranks stop as well; SIGCONT wakes all
  }
}

}  // namespace lockstep
