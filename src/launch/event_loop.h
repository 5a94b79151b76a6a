// EventLoop: one thread that waits for descriptors and for moments in time.
//
// Callbacks may watch, forget, add and cancel at will; what is forgotten is not called any more.
// They must not wait: other hosts take a launcher that is silent for lost. What may wait (a file
// server, a name server) is done on another thread, which has the loop call back through its
// Mailbox.
#pragma once

#include <poll.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/posix.h"

namespace lockstep {

// Runs `work`, which must not throw, on a thread that nobody waits for. Throws: SystemError.
template <typename Work>
void start_thread(Work work) {
  try {
    std::thread(std::move(work)).detach();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    throw_errno("cannot start a thread", "Raise the limit on processes (ulimit -u).");
  }
}

// What other threads ask the loop's thread to call. A thread may hold it longer than the loop
// lives; nothing is called then.
class Mailbox {
 public:
  Mailbox();
  void post(std::function<void()> call);  // from any thread

 private:
  friend class EventLoop;
  void call_all();

  const Fd event_;
  Mutex mutex_;
  std::vector<std::function<void()>> calls_ LOCKSTEP_GUARDED_BY(mutex_);
};

class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Timer = std::pair<Clock::time_point, int>;

  EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // `call` gets poll(2)'s revents whenever one of `events` has come, or the other end is gone.
  // Replaces what was watched for on `fd`.
  void watch(int fd, short events, std::function<void(short)> call);
  void forget(int fd) { watches_.erase(fd); }

  // Calls once, `delay` from now, unless cancelled before.
  Timer after(std::chrono::milliseconds delay, std::function<void()> call);
  void cancel(const Timer& timer) { timers_.erase(timer); }

  const std::shared_ptr<Mailbox>& mailbox() const { return mailbox_; }
  // Runs `work`, which may wait and must not throw, on a thread of its own; then calls `done` here.
  // The thread is left alone: it may still wait when the loop is gone. Throws: SystemError.
  void run_aside(std::function<void()> work, std::function<void()> done);

  // Waits for the next event, at most `longest`, and calls whoever waits for it.
  void run_once(std::chrono::milliseconds longest = std::chrono::hours(1));

 private:
  struct Watch {
    short events;
    std::shared_ptr<std::function<void(short)>> call;
  };
  std::map<int, Watch> watches_;
  std::map<Timer, std::function<void()>> timers_;
  int num_timers_ = 0;
  std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
};

}  // namespace lockstep
