// EventLoop: one thread that waits for descriptors and for moments in time.
//
// Callbacks may watch, forget, add and cancel at will; what is forgotten is not called any more.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <utility>

namespace lockstep {

class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Timer = std::pair<Clock::time_point, int>;

  // `call` gets poll(2)'s revents whenever one of `events` has come, or the other end is gone.
  // Replaces what was watched for on `fd`.
  void watch(int fd, short events, std::function<void(short)> call);
  void forget(int fd) { watches_.erase(fd); }

  // Calls once, `delay` from now, unless cancelled before.
  Timer after(std::chrono::milliseconds delay, std::function<void()> call);
  void cancel(const Timer& timer) { timers_.erase(timer); }

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
};

}  // namespace lockstep
