#include "launch/event_loop.h"

#include <algorithm>
#include <vector>

namespace lockstep {

void EventLoop::watch(int fd, short events, std::function<void(short)> call) {
  watches_[fd] = {events, std::make_shared<std::function<void(short)>>(std::move(call))};
}

EventLoop::Timer EventLoop::after(std::chrono::milliseconds delay, std::function<void()> call) {
  const Timer timer(Clock::now() + delay, num_timers_++);
  timers_.emplace(timer, std::move(call));
  return timer;
}

void EventLoop::run_once(std::chrono::milliseconds longest) {
  std::vector<pollfd> ready;
  for (const auto& [fd, watch] : watches_) ready.push_back({fd, watch.events, 0});
  auto wait = longest;
  if (!timers_.empty()) {
    // Rounded up: waking a moment too early would only cost time.
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now());
    wait = std::clamp(left, std::chrono::milliseconds(0), longest);
  }
  if (::poll(ready.data(), ready.size(), static_cast<int>(wait.count())) > 0) {
    for (const pollfd& one : ready) {
      if (one.revents == 0) continue;
      const auto found = watches_.find(one.fd);
      if (found == watches_.end()) continue;
      const auto call = found->second.call;  // lives on if the callback forgets itself
      (*call)(one.revents);
    }
  }
  while (!timers_.empty() && timers_.begin()->first.first <= Clock::now()) {
    const auto call = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    call();
  }
}

}  // namespace lockstep
