#include "support/late_streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <deque>
#include <random>
#include <string>
#include <thread>

namespace lockstep::test::late {
namespace {

constexpr std::size_t kNumStreams = 33;  // the default one, and a pool

struct Shared {
  std::mutex mutex;
  Delays delays;
  std::string first_error;
};
Shared& shared() {
  static auto* const one = new Shared;
  return *one;
}
std::atomic<std::int64_t> syncs = 0;
thread_local c10::StreamId current = 0;

class Queue {
 public:
  explicit Queue(std::size_t id) : id_(id), thread_([this] { run(); }) { thread_.detach(); }

  void push(std::function<void()> task, When when) {
    const std::lock_guard lock(mutex_);
    tasks_.emplace_back(std::move(task), when);
    changed_.notify_one();
  }

 private:
  void run() {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const at::NoGradGuard no_grad;
    while (true) {
      std::pair<std::function<void()>, When> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        next = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (next.second == When::kLate) std::this_thread::sleep_for(delay());
      try {
        next.first();
      } catch (const std::exception& error) {
        const std::lock_guard lock(shared().mutex);
        if (shared().first_error.empty()) shared().first_error = error.what();
      }
    }
  }

  std::chrono::microseconds delay() {
    const std::lock_guard lock(shared().mutex);
    const Delays& delays = shared().delays;
    if (seed_ != delays.seed) random_.seed(delays.seed * kNumStreams + id_);
    seed_ = delays.seed;
    std::uniform_int_distribution<int> any(0, delays.max_us);
    return std::chrono::microseconds(delays.fixed_us + any(random_));
  }

  const std::size_t id_;
  std::uint64_t seed_ = 0;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::function<void()>, When>> tasks_;
  std::thread thread_;  // last: it uses the others
};

// Made when first used, which is in a rank: threads do not survive a fork.
Queue& queue_of(c10::StreamId stream) {
  static std::mutex mutex;
  static std::array<Queue*, kNumStreams> queues{};
  const std::lock_guard lock(mutex);
  const auto index = static_cast<std::size_t>(stream);
  Queue*& queue = queues.at(index);
  if (queue == nullptr) queue = new Queue(index);
  return *queue;
}

void throw_first_error() {
  const std::lock_guard lock(shared().mutex);
  const std::string error = std::exchange(shared().first_error, {});
  TORCH_CHECK(error.empty(), "An operation of the late device failed: ", error);
}

}  // namespace

void set_delays(const Delays& delays) {
  const std::lock_guard lock(shared().mutex);
  shared().delays = delays;
}

void Mark::reach() {
  const std::lock_guard lock(mutex_);
  is_reached_ = true;
  time_ = Clock::now();
  changed_.notify_all();
}

bool Mark::is_reached() const {
  const std::lock_guard lock(mutex_);
  return is_reached_;
}

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_reached_; });
}

bool Mark::wait_until(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return is_reached_; });
}

Clock::time_point Mark::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

c10::StreamId current_stream() { return current; }
c10::StreamId exchange_stream(c10::StreamId stream) { return std::exchange(current, stream); }

c10::StreamId stream_from_pool() {
  static std::atomic<std::size_t> next = 0;
  return static_cast<c10::StreamId>(1 + next++ % (kNumStreams - 1));
}

void enqueue(c10::StreamId stream, std::function<void()> task, When when) {
  queue_of(stream).push(std::move(task), when);
}

std::shared_ptr<Mark> mark(c10::StreamId stream) {
  auto one = std::make_shared<Mark>();
  enqueue(
      stream, [one] { one->reach(); }, When::kAtOnce);
  return one;
}

void block(c10::StreamId stream, std::shared_ptr<const Mark> mark) {
  enqueue(
      stream, [mark = std::move(mark)] { mark->wait(); }, When::kAtOnce);
}

void synchronize(const Mark& mark) {
  ++syncs;
  mark.wait();
  throw_first_error();
}

bool synchronize_until(const Mark& mark, Clock::time_point deadline) {
  ++syncs;
  return mark.wait_until(deadline);
}

void synchronize(c10::StreamId stream) { synchronize(*mark(stream)); }

void synchronize_all() {
  for (std::size_t i = 0; i < kNumStreams; ++i) synchronize(static_cast<c10::StreamId>(i));
}

std::int64_t num_syncs() { return syncs; }

}  // namespace lockstep::test::late
