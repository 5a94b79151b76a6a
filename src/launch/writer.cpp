#include "launch/writer.h"

#include <lockstep/error.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <deque>
#include <map>

namespace lockstep {
namespace {

constexpr std::size_t kFullBytes = 1 << 20;
constexpr std::size_t kTaskBytes = 64 << 10;

// Empty, or why it could not be written. In pieces that a pipe takes as a whole, of whole lines if
// there are any: others may write to the same pipe.
std::string write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    std::string_view piece = text.substr(0, PIPE_BUF);
    if (piece.size() < text.size()) piece = piece.substr(0, piece.rfind('\n') + 1);
    if (piece.empty()) piece = text.substr(0, PIPE_BUF);
    const ssize_t count = ::write(fd, piece.data(), piece.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN) {  // somebody who shares the stream has made it so
      pollfd one{fd, POLLOUT, 0};
      ::poll(&one, 1, -1);
    } else if (errno != EINTR) {
      return std::strerror(errno);
    }
  }
  return {};
}

}  // namespace

struct Writer::Task {
  int file = 0;
  Open open = {};  // or else:
  std::string text = {};
};

struct Writer::State {
  // Constant after construction.
  std::shared_ptr<Mailbox> mailbox;
  // Of the loop's thread.
  Callbacks callbacks;
  bool is_alive = true;
  bool has_thread = false;
  bool was_full = false;

  Mutex mutex;
  Condition changed;
  std::deque<Task> tasks LOCKSTEP_GUARDED_BY(mutex);
  Unfinished unfinished LOCKSTEP_GUARDED_BY(mutex);
  std::size_t bytes LOCKSTEP_GUARDED_BY(mutex) = 0;       // of these
  std::size_t num_untold LOCKSTEP_GUARDED_BY(mutex) = 0;  // problems
  bool is_over LOCKSTEP_GUARDED_BY(mutex) = false;
};

Writer::Writer(EventLoop& loop, Callbacks callbacks) : state_(std::make_shared<State>()) {
  state_->mailbox = loop.mailbox();
  state_->callbacks = std::move(callbacks);
}

Writer::~Writer() {
  state_->is_alive = false;
  const MutexLock lock(state_->mutex);
  state_->is_over = true;
  state_->changed.notify_one();
}

int Writer::add(Open open) {
  add_task({.file = num_files_, .open = std::move(open)});
  return num_files_++;
}

void Writer::write(int file, std::string_view text) {
  {
    const MutexLock lock(state_->mutex);
    std::deque<Task>& tasks = state_->tasks;
    if (!tasks.empty() && tasks.back().file == file && !tasks.back().open &&
        tasks.back().text.size() < kTaskBytes) {
      tasks.back().text += text;
      state_->bytes += text.size();
      state_->was_full |= state_->bytes >= kFullBytes;
      return;
    }
  }
  add_task({.file = file, .text = std::string(text)});
}

void Writer::add_task(Task task) {
  if (!state_->has_thread) start_thread([state = state_] { run(state); });
  state_->has_thread = true;
  const MutexLock lock(state_->mutex);
  state_->bytes += task.text.size();
  state_->was_full |= state_->bytes >= kFullBytes;
  ++state_->unfinished[task.file];
  state_->tasks.push_back(std::move(task));
  state_->changed.notify_one();
}

bool Writer::is_full() const {
  const MutexLock lock(state_->mutex);
  return state_->bytes >= kFullBytes;
}

bool Writer::is_empty() const {
  const MutexLock lock(state_->mutex);
  return state_->unfinished.empty() && state_->num_untold == 0;
}

Writer::Unfinished Writer::unfinished() const {
  const MutexLock lock(state_->mutex);
  return state_->unfinished;
}

void Writer::run(const std::shared_ptr<State>& state) {
  std::map<int, Fd> files;  // those that are open
  while (true) {
    Task task;
    {
      const MutexLock lock(state->mutex);
      while (state->tasks.empty() && !state->is_over) state->changed.wait(state->mutex);
      if (state->tasks.empty()) return;
      task = std::move(state->tasks.front());
      state->tasks.pop_front();
    }
    std::string problem;
    if (task.open) {
      try {
        files[task.file] = task.open();
      } catch (const Error& error) {
        problem = error.message();
      }
    } else if (const auto file = files.find(task.file); file != files.end()) {
      problem = write_all(file->second.get(), task.text);
    }
    if (!problem.empty()) files.erase(task.file);
    finish(state, task, problem);
  }
}

void Writer::tell(State& state, int file, bool is_open, const std::string& problem) {
  if (!state.is_alive) return;
  if (!problem.empty()) state.callbacks.failed(file, is_open, problem);
  {
    const MutexLock lock(state.mutex);
    if (!problem.empty()) --state.num_untold;
    if (state.bytes >= kFullBytes) return;
  }
  if (std::exchange(state.was_full, false)) state.callbacks.has_room();
}

// Has the loop told if there is something that it may wait for.
void Writer::finish(const std::shared_ptr<State>& state, const Task& task,
                    const std::string& problem) {
  {
    const MutexLock lock(state->mutex);
    const bool was_full = state->bytes >= kFullBytes;
    state->bytes -= task.text.size();
    if (--state->unfinished[task.file] == 0) state->unfinished.erase(task.file);
    if (!problem.empty()) ++state->num_untold;
    const bool has_room = was_full && state->bytes < kFullBytes;
    if (!has_room && !state->unfinished.empty() && problem.empty()) return;
  }
  state->mailbox->post(
      [weak = std::weak_ptr(state), file = task.file, is_open = !task.open, problem] {
        if (const auto still = weak.lock()) tell(*still, file, is_open, problem);
      });
}

}  // namespace lockstep
