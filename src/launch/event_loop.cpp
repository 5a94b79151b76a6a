#include "launch/event_loop.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace lockstep {

Mailbox::Mailbox() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw_errno("cannot make an event", "Raise the limit on open files (ulimit -n).");
}

void Mailbox::post(std::function<void()> call) {
  const MutexLock lock(mutex_);
  calls_.push_back(std::move(call));
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t told = ::write(event_.get(), &one, sizeof one);
}

void Mailbox::call_all() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  std::vector<std::function<void()>> calls;
  {
    const MutexLock lock(mutex_);
    calls.swap(calls_);
  }
  for (const auto& call : calls) call();
}

EventLoop::EventLoop() {
  watch(mailbox_->event_.get(), POLLIN, [this](short) { mailbox_->call_all(); });
}

void EventLoop::run_aside(std::function<void()> work, std::function<void()> done) {
  start_thread([mailbox = mailbox_, work = std::move(work), done = std::move(done)]() mutable {
    work();
    mailbox->post(std::move(done));
  });
}

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
