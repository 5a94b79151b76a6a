#include "support/run_ranks.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <stdexcept>

#include "base/posix.h"
#include "base/text.h"
#include "launch/rank_command.h"

namespace lockstep::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRankVariable = "LOCKSTEP_TEST_RANK";

// Of a rank that another launcher has started: which one it is.
int rank_from_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"}) {
    if (const char* rank = std::getenv(name)) return std::atoi(rank);
  }
  throw std::runtime_error("the launcher sets no rank");
}

std::string current_test() {
  const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
  return text::format("{}.{}", info->test_suite_name(), info->name());
}

// In a rank: runs the body instead of returning to the test.
int be_rank(int rank, const RankBody& body) {
  int code = 0;
  try {
    body(rank);
    if (testing::Test::HasFailure()) code = 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    code = 2;
  }
  std::cout.flush();
  return code;
}

// Libraries read these when they are loaded.
bool needs_exec(const Command& command) {
  return std::ranges::any_of(command.variables, [](const auto& one) {
    return one.first.starts_with("ASAN_") || one.first.starts_with("LD_") ||
           one.first.starts_with("MKL_") || (one.first == "OMP_NUM_THREADS" && one.second != "1");
  });
}

// A rank that is this process once more.
pid_t fork_rank(const Command& command, int rank, const RankBody& body) {
  std::cout.flush();
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw_errno("cannot fork", "Allow more processes (ulimit -u).");
  if (child > 0) {
    ::setpgid(child, child);
    return child;
  }
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::dup2(command.stdout_fd, STDOUT_FILENO);
  ::dup2(command.stderr_fd, STDERR_FILENO);
  for (const std::string& name : command.removed_variables) ::unsetenv(name.c_str());
  for (const auto& [name, value] : command.variables) ::setenv(name.c_str(), value.c_str(), 1);
  const int code = be_rank(rank, body);
  // LibTorch's static objects, and the search for leaks, take longer than most tests. A rank that
  // failed ends as programs do: the others may say how.
  if (code == 0 && soak(0, 1) == 0) {
    std::fflush(nullptr);
    ::_exit(code);
  }
  std::exit(code);
}

}  // namespace

struct Ranks::Impl {
  struct Child {
    pid_t pid = 0;
    Fd output;
    bool has_ended = false;
    RankResult result;
  };

  std::vector<Child> children;
  Clock::time_point start = Clock::now();
  Clock::time_point deadline;

  // Reads what is there, waits a moment if nothing is, and collects ranks that have ended.
  void pump() {
    std::vector<pollfd> fds;
    for (const Child& child : children) fds.push_back({child.output.get(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), 10);  // milliseconds; a closed one is negative and is skipped
    for (std::size_t i = 0; i < children.size(); ++i) {
      if ((fds[i].revents & (POLLIN | POLLHUP)) != 0) read_from(children[i]);
      look_at(children[i]);
    }
    if (Clock::now() < deadline) return;
    for (Child& child : children) {
      if (child.has_ended) continue;
      child.result.was_late = true;
      ::kill(-child.pid, SIGKILL);
    }
  }

  static void read_from(Child& child) {
    char buffer[4096];
    const ssize_t count = ::read(child.output.get(), buffer, sizeof buffer);
    if (count > 0) child.result.output.append(buffer, static_cast<std::size_t>(count));
    if (count == 0) child.output.reset();
  }

  // The rank stays a zombie until all have ended: so long the others can see how it ended.
  void look_at(Child& child) const {
    if (child.has_ended) return;
    const auto status = look_at_end(child.pid);
    if (!status) return;
    child.has_ended = true;
    child.result.status = *status;
    child.result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  }

  bool is_running() const {
    for (const Child& child : children) {
      if (!child.has_ended || child.output) return true;
    }
    return false;
  }
};

Ranks::Ranks(int size, const RankBody& body, const RankOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (const char* rank = std::getenv(kRankVariable)) {
    std::exit(be_rank(*rank == '\0' ? rank_from_launcher() : std::atoi(rank), body));
  }
  const Fd store = make_memfd("lockstep-test-store");
  impl_->deadline = impl_->start + options.deadline;
  const bool is_launched = !options.launchers.empty();
  const int count = is_launched ? static_cast<int>(options.launchers.size()) : size;
  for (int rank = 0; rank < count; ++rank) {
    Pipe pipe = make_pipe();
    const std::vector<std::string> self = {std::filesystem::read_symlink("/proc/self/exe"),
                                           "--gtest_filter=" + current_test(), "--gtest_brief=1"};
    Command command;
    if (is_launched) {
      command.arguments = options.launchers[static_cast<std::size_t>(rank)];
      command.arguments.insert(command.arguments.end(), self.begin(), self.end());
    } else if (options.has_place) {
      command = rank_command(self, rank, size, store.get());
    } else {
      command.arguments = self;
    }
    for (const auto& [name, value] : options.variables) command.variables[name] = value;
    command.variables[kRankVariable] = is_launched ? "" : std::to_string(rank);
    // Ranks share the machine's few cores: one thread each, as a launcher would set it.
    command.variables.emplace("OMP_NUM_THREADS", "1");
    if (options.rank_variables) {
      for (const auto& [name, value] : options.rank_variables(rank)) {
        command.variables[name] = value;
      }
    }
    command.stdout_fd = command.stderr_fd = pipe.write_end.get();
    Impl::Child child;
    const bool must_exec = is_launched || options.must_exec || needs_exec(command);
    child.pid = must_exec ? spawn(command) : fork_rank(command, rank, body);
    child.output = std::move(pipe.read_end);
    impl_->children.push_back(std::move(child));
  }
}

Ranks::~Ranks() {
  for (Impl::Child& child : impl_->children) {
    ::kill(-child.pid, SIGKILL);  // and what it has left behind
    ::waitpid(child.pid, nullptr, 0);
  }
}

void Ranks::kill(int rank, int signal) {
  ::kill(impl_->children[static_cast<std::size_t>(rank)].pid, signal);
}

void Ranks::wait_for_output(int rank, const std::string& text) {
  const Impl::Child& child = impl_->children[static_cast<std::size_t>(rank)];
  while (child.result.output.find(text) == std::string::npos) {
    if (child.has_ended || Clock::now() >= impl_->deadline) {
      throw std::runtime_error(
          text::format("rank {} never wrote '{}' but:\n{}", rank, text, child.result.output));
    }
    impl_->pump();
  }
}

RankResults Ranks::wait() {
  while (impl_->is_running()) impl_->pump();
  RankResults results;
  for (Impl::Child& child : impl_->children) results.push_back(std::move(child.result));
  return results;
}

RankOptions on_hosts(const std::string& layout) {
  RankOptions options;
  options.rank_variables = [layout](int rank) {
    return std::map<std::string, std::string>{
        {"LOCKSTEP_HOST_ID", layout.substr(static_cast<std::size_t>(rank), 1)}};
  };
  return options;
}

bool is_rank() { return std::getenv(kRankVariable) != nullptr; }

RankResults run_ranks(int size, const RankBody& body, const RankOptions& options) {
  return Ranks(size, body, options).wait();
}

RankOptions mpirun(int size, const std::vector<std::string>& more) {
  RankOptions options;
  std::vector<std::string> command = {"mpirun", "-n", std::to_string(size)};
  command.insert(command.end(), more.begin(), more.end());
  options.launchers = {std::move(command)};
  // As tests run as root in containers and on few cores; only OpenMPI reads these.
  options.variables = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                       {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                       {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                       {"OMPI_MCA_hwloc_base_binding_policy", "none"},
                       {"ASAN_OPTIONS", "detect_leaks=0"}};  // OpenMPI has some
  return options;
}

std::string show(const RankResults& results) {
  std::string text;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const RankResult& result = results[rank];
    text += text::format("--- rank {} {}{} after {:.2f} s\n{}\n", rank, result.status.text(),
                         result.was_late ? " at the deadline" : "", result.seconds, result.output);
  }
  return text;
}

testing::AssertionResult all_passed(const RankResults& results) {
  for (const RankResult& result : results) {
    if (!result.status.is_ok()) return testing::AssertionFailure() << "\n" << show(results);
  }
  return testing::AssertionSuccess();
}

int soak(int count_in_ci, int count_in_full) {
  return std::getenv("LOCKSTEP_SOAK") == nullptr ? count_in_ci : count_in_full;
}

}  // namespace lockstep::test
