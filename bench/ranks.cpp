#include "ranks.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "base/posix.h"
#include "base/text.h"
#include "launch/rank_command.h"

namespace lockstep::bench {

void bind_to_core(int rank, int size) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  if (CPU_COUNT(&allowed) < size) return;
  int nth = rank;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || nth-- != 0) continue;
    cpu_set_t mine;
    CPU_ZERO(&mine);
    CPU_SET(core, &mine);
    ::sched_setaffinity(0, sizeof mine, &mine);
  }
}

std::string cpu_name() {
  const std::string text = read_small_file("/proc/cpuinfo");
  const std::size_t at = text.find("model name");
  if (at == std::string::npos) return "unknown";
  const std::size_t begin = text.find(": ", at) + 2;
  return text.substr(begin, text.find('\n', begin) - begin);
}

std::string this_program() { return text::format("/proc/{}/exe", ::getpid()); }

int run_and_wait(std::vector<Command> commands, std::vector<std::string>* outputs,
                 const OnStarted& on_started) {
  std::vector<Fd> files;  // not pipes: nobody need read while the commands write
  std::vector<pid_t> running;
  for (Command& command : commands) {
    if (outputs != nullptr) {
      files.push_back(make_memfd("lockstep-bench-output"));
      command.stdout_fd = files.back().get();
    }
    running.push_back(spawn(command));
  }
  if (on_started) on_started(running);
  int worst = 0;
  while (!running.empty()) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    if (ended < 0) break;
    std::erase(running, ended);
    const auto exit_status = ExitStatus::from_wait(status);
    if (exit_status.is_ok() || worst != 0) continue;
    text::print(stderr, "bench: a process {}\n", exit_status.text());
    worst = 1;
    std::this_thread::sleep_for(std::chrono::seconds(2));  // the others may say what they know
    for (const pid_t other : running) ::kill(other, SIGKILL);
  }
  if (outputs != nullptr) {
    outputs->clear();
    for (const Fd& file : files) {
      outputs->push_back(read_small_file(text::format("/proc/self/fd/{}", file.get())));
    }
  }
  return worst;
}

int run_ranks(int num_ranks, const std::vector<std::string>& arguments,
              const std::map<std::string, std::string>& variables,
              std::vector<std::string>* outputs, const OnStarted& on_started) {
  const Fd store = make_memfd("lockstep-bench-store");
  std::vector<Command> commands;
  for (int rank = 0; rank < num_ranks; ++rank) {
    commands.push_back(rank_command(arguments, rank, num_ranks, store.get()));
    commands.back().variables.insert(variables.begin(), variables.end());
  }
  return run_and_wait(std::move(commands), outputs, on_started);
}

int verdict(std::int64_t wrong, std::int64_t failed, bool is_json) {
  const bool is_good = wrong == 0 && failed == 0;
  if (!is_json) {
    text::print("# Wrong values: {}, failed runs: {}. {}\n\n", wrong, failed,
                is_good ? "OK" : "FAILED");
  }
  return is_good ? 0 : 1;
}

}  // namespace lockstep::bench
