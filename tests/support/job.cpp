#include "support/job.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include "base/posix.h"
#include "base/text.h"

namespace lockstep::test {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct Job::Impl {
  pid_t pid = 0;
  std::string mark;  // in the environment of all of its processes
  std::string folder;
  Fd terminal;  // our end
  Fd streams[2];
  std::string texts[2];
  Clock::time_point deadline;
  bool is_over = false;
  ExitStatus status;

  void pump() {
    pollfd fds[2] = {{streams[0].get(), POLLIN, 0}, {streams[1].get(), POLLIN, 0}};
    ::poll(fds, 2, 5);
    for (int i = 0; i < 2; ++i) {
      if (fds[i].revents == 0) continue;
      static char buffer[1 << 16];
      const ssize_t count = ::read(streams[i].get(), buffer, sizeof buffer);
      if (count > 0) {
        texts[i].append(buffer, static_cast<std::size_t>(count));
      } else if (count == 0 || errno != EAGAIN) {
        streams[i].reset();  // a terminal ends with EIO
      }
    }
    int status_now = 0;
    if (!is_over && ::waitpid(pid, &status_now, WNOHANG) == pid) {
      is_over = true;
      status = ExitStatus::from_wait(status_now);
    }
  }

  void check_deadline(const std::string& what) {
    if (Clock::now() < deadline) return;
    throw std::runtime_error(
        text::format("{} before the deadline; it wrote:\n{}\n--\n{}", what, texts[0], texts[1]));
  }
};

Job::Job(std::vector<std::string> arguments, const JobOptions& options)
    : impl_(std::make_unique<Impl>()) {
  static std::atomic<int> count = 0;
  impl_->deadline = Clock::now() + options.deadline;
  impl_->mark = text::format("LOCKSTEP_TEST_JOB={}-{}", ::getpid(), count++);
  impl_->folder = fs::temp_directory_path() / ("lockstep-test-" + impl_->mark.substr(18));
  fs::create_directories(impl_->folder);
  Command command;
  command.arguments = options.prefix;
  command.arguments.emplace_back(LOCKSTEP_PROGRAM);
  for (std::string& one : arguments) {
    command.arguments.push_back(one == "ACTOR" ? LOCKSTEP_ACTOR : std::move(one));
  }
  command.variables = options.variables;
  command.variables["LOCKSTEP_TEST_JOB"] = impl_->mark.substr(18);
  command.variables["TMPDIR"] = impl_->folder;
  Pipe in = make_pipe();
  Fd theirs[2];
  if (options.has_terminal) {
    int master = -1;
    int slave = -1;
    if (::openpty(&master, &slave, nullptr, nullptr, nullptr) != 0) throw_errno("openpty", "");
    impl_->terminal = Fd(master);
    impl_->streams[0] = duplicate(master);
    theirs[0] = Fd(slave);
    command.stdin_fd = command.stdout_fd = command.stderr_fd = slave;
    // A session of its own, so that what is typed becomes signals.
    command.arguments.insert(command.arguments.begin(), {"setsid", "--ctty", "--wait"});
    ::fcntl(master, F_SETFD, FD_CLOEXEC);
  } else {
    for (int i = 0; i < 2; ++i) {
      Pipe pipe = make_pipe();
      impl_->streams[i] = std::move(pipe.read_end);
      theirs[i] = std::move(pipe.write_end);
    }
    command.stdin_fd = in.read_end.get();
    command.stdout_fd = theirs[0].get();
    command.stderr_fd = theirs[1].get();
  }
  impl_->pid = spawn(command);
  [[maybe_unused]] const ssize_t written =
      ::write(in.write_end.get(), options.input.data(), options.input.size());
}

Job::~Job() {
  for (const pid_t one : processes()) ::kill(one, SIGKILL);
  if (!impl_->is_over) ::waitpid(impl_->pid, nullptr, 0);
  std::error_code ignored;
  fs::remove_all(impl_->folder, ignored);
}

pid_t Job::pid() const { return impl_->pid; }
void Job::signal(int signal) { ::kill(impl_->pid, signal); }
const std::string& Job::out() const { return impl_->texts[0]; }
const std::string& Job::err() const { return impl_->texts[1]; }

void Job::type(const std::string& keys) {
  if (::write(impl_->terminal.get(), keys.data(), keys.size()) < 0)
    throw_errno("typing failed", "");
}

void Job::wait_for_output(const std::string& text, int times) {
  while (true) {
    int found = 0;
    for (const std::string& stream : impl_->texts) {
      for (std::size_t at = stream.find(text); at != std::string::npos;
           at = stream.find(text, at + 1)) {
        ++found;
      }
    }
    if (found >= times) return;
    if (impl_->is_over) impl_->deadline = Clock::now();
    impl_->check_deadline(text::format("'{}' was not written", text));
    impl_->pump();
  }
}

ExitStatus Job::wait() {
  while (!impl_->is_over || impl_->streams[0] || impl_->streams[1]) {
    impl_->check_deadline("the job did not end");
    impl_->pump();
  }
  return impl_->status;
}

std::vector<pid_t> Job::processes() const {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string variables = '\0' + read_small_file("/proc/" + name + "/environ");
    if (variables.find('\0' + impl_->mark + '\0') != std::string::npos) {
      found.push_back(static_cast<pid_t>(std::stol(name)));
    }
  }
  return found;
}

std::vector<std::string> Job::left_files() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(impl_->folder)) {
    names.push_back(entry.path());
  }
  return names;
}

JobResult run_job(const std::vector<std::string>& arguments, const JobOptions& options) {
  const auto start = Clock::now();
  Job job(arguments, options);
  const ExitStatus status = job.wait();
  return {.code = status.signal != 0 ? 128 + status.signal : status.code,
          .out = job.out(),
          .err = job.err(),
          .seconds = std::chrono::duration<double>(Clock::now() - start).count()};
}

}  // namespace lockstep::test
