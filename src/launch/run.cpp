#include "launch/run.h"

#include <lockstep/error.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/text.h"
#include "launch/candidate.h"
#include "launch/control.h"
#include "launch/coordinator.h"
#include "launch/guard.h"
#include "launch/host.h"
#include "launch/status.h"

namespace lockstep {
namespace {

constexpr auto kGoodbye = std::chrono::seconds(3);    // for other hosts to hear of the end
constexpr auto kResigning = std::chrono::seconds(2);  // for etcd, whose lease ends by itself else
constexpr auto kReading = std::chrono::seconds(5);    // for readers, once told to stop
constexpr auto kLastWord = std::chrono::seconds(1);   // for them to hear what is not written

// By which people reach this job: its id on the first host, or, if that is elected, on each; with
// the host on others, which may be on the same machine.
std::unique_ptr<Control> open_control(EventLoop& loop, const RunOptions& options, std::string& name,
                                      const Control::Answer& answer) {
  name = options.job_id.empty() ? std::to_string(::getppid()) : options.job_id;
  const std::string with_host = text::format("{}.host{}", name, options.host_rank);
  if (options.num_hosts > 1 && options.coordinator.empty() && options.host_rank != 0) {
    name = with_host;
  }
  try {
    return std::make_unique<Control>(loop, name, answer);
  } catch (const SystemError&) {  // a scheduler's id may be that of several jobs
    name = options.num_hosts > 1 && name != with_host ? with_host
                                                      : text::format("{}.{}", name, ::getppid());
    return std::make_unique<Control>(loop, name, answer);
  }
}

}  // namespace

int run(const RunOptions& options) {
  const sigset_t signals = launcher_signals();
  const Fd signal_fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd) throw_errno("cannot watch signals", "Raise the limit on open files (ulimit -n).");
  EventLoop loop;
  Output output(loop, options.output);
  Host host(loop, output, options);
  bool is_interrupted = false;
  std::function<void(int)> on_signal;
  loop.watch(signal_fd.get(), POLLIN, [&](short) {
    signalfd_siginfo info{};
    while (::read(signal_fd.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      on_signal(static_cast<int>(info.ssi_signo));
    }
  });
  on_signal = [&](int signal) {
    switch (signal) {
      case SIGCHLD:
        host.look_for_ends();
        break;
      case SIGINT:
      case SIGTERM:
      case SIGHUP:
        is_interrupted = true;
        if (!host.exit_code()) host.interrupt(signal);
        break;
      case SIGQUIT:
        host.kill_now();
        is_interrupted = true;
        if (!host.exit_code()) host.interrupt(SIGKILL);
        break;
      case SIGTSTP:
        host.pass_on(SIGSTOP);
        break;
      default:
        host.pass_on(signal);
    }
  };
  std::unique_ptr<RemoteLeader> remote;
  std::unique_ptr<Coordinator> coordinator;
  std::unique_ptr<Candidate> candidate;
  if (!options.coordinator.empty()) {
    candidate = std::make_unique<Candidate>(loop, output, host, options);
  } else if (options.host_rank == 0) {
    coordinator = std::make_unique<Coordinator>(loop, output, host, options);
  } else {
    remote = std::make_unique<RemoteLeader>(loop, output, host, options);
  }
  const auto began = EventLoop::Clock::now();
  std::string name;
  const auto answer = [&](const Json& request) -> Json {
    Coordinator* const here = candidate ? candidate->coordinator() : coordinator.get();
    if (request.value("ask", "") == "status") {
      JobStatus status = here != nullptr
                             ? here->status()
                             : JobStatus{.note =
                                             "Another host coordinates this job: here are "
                                             "the ranks of this one.",
                                         .ranks = host.look()};
      status.job = name;
      std::vector<std::string> command = options.command;
      command.front() = command.front().substr(command.front().rfind('/') + 1);
      status.program = text::join(command, " ");
      status.pid = ::getppid();
      status.seconds = std::chrono::duration<double>(EventLoop::Clock::now() - began).count();
      status.is_elastic = options.is_elastic;
      return status;
    }
    if (!options.is_elastic) {
      throw UsageError({.operation = "scale"},
                       "The job is not elastic: its number of ranks is fixed.\nStart it with "
                       "lockstep run --elastic.");
    }
    if (here != nullptr) return here->elastic()->obey(request);
    throw UsageError({.operation = "scale"}, "Another host coordinates this job.\nAsk there.");
  };
  std::unique_ptr<Control> control;
  try {
    control = open_control(loop, options, name, answer);
  } catch (const Error& error) {
    if (options.is_elastic || options.is_verbose) {
      output.say("warning: lockstep top and scale cannot reach this job: " + error.message());
    }
  }
  while (!host.exit_code()) loop.run_once();
  const auto goodbye = EventLoop::Clock::now() + kGoodbye;
  Coordinator* const first = candidate ? candidate->coordinator() : coordinator.get();
  while (first != nullptr && !first->is_alone() && EventLoop::Clock::now() < goodbye) {
    loop.run_once(std::chrono::milliseconds(100));
  }
  if (candidate) {  // etcd forgets this job at once
    bool is_done = false;
    candidate->resign([&] { is_done = true; });
    const auto limit = EventLoop::Clock::now() + kResigning;
    while (!is_done && EventLoop::Clock::now() < limit) {
      loop.run_once(std::chrono::milliseconds(100));
    }
  }
  // As long as somebody reads, what the ranks have said is shown to the end, and log files that
  // take something get all of it; but who has told the job to stop does not wait long for either.
  if (std::exchange(is_interrupted, false)) loop.after(kReading, [&] { is_interrupted = true; });
  output.finish_logs();
  while (!is_interrupted && !output.is_empty()) loop.run_once();
  if (output.give_up_logs()) {
    const auto last_word = EventLoop::Clock::now() + kLastWord;
    while (!output.is_empty() && EventLoop::Clock::now() < last_word) {
      loop.run_once(std::chrono::milliseconds(100));
    }
  }
  return *host.exit_code();
}

std::string describe_run(const RunOptions& options) {
  std::string text;
  if (!options.coordinator.empty()) {
    text = text::format("host {} of {} listens at {}:{} (TLS 1.3) if it is elected at {}\n",
                        options.host_rank, options.num_hosts, options.master_host,
                        options.master_port, options.coordinator);
  } else if (options.num_hosts > 1) {
    text = text::format("host {} of {} {} {}:{} (TLS 1.3)\n", options.host_rank, options.num_hosts,
                        options.host_rank == 0 ? "listens at" : "connects to", options.master_host,
                        options.master_port);
  }
  const auto shares = split_cores(this_machine(), options.num_ranks, options.bind);
  const Generation generation = {.number = 0,
                                 .first_rank = 0,
                                 .world_size = options.num_ranks,
                                 .max_restarts = options.max_restarts};
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const Share& share = shares[static_cast<std::size_t>(rank)];
    auto variables = place_variables(options, generation, rank, options.master_port + 1);
    if (options.num_hosts > 1) {  // known only when all hosts have come
      variables.erase("RANK");
      variables.erase("WORLD_SIZE");
    } else {
      variables.erase("MASTER_PORT");
    }
    const char* const threads = ::getenv("OMP_NUM_THREADS");
    variables["OMP_NUM_THREADS"] = threads != nullptr ? threads : std::to_string(share.threads);
    text += text::format("local rank {}, {}:", rank,
                         share.cpus.empty() ? "not bound" : "cpus " + to_cpu_list(share.cpus));
    for (const auto& [name, value] : variables) text += text::format(" {}={}", name, value);
    text += text::format(" {}\n", text::join(options.command, " "));
  }
  return text;
}

}  // namespace lockstep
