// Streams and events of the late device (late_device.h).
//
// A stream is a queue and a thread that runs what is in it, in order, each operation after a delay.
// The host goes on meanwhile: what it does not order by an event runs in any order. Threading:
// everything here may be called by any thread. Nothing is ever destroyed: threads of streams
// outlive main().
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace lockstep::test::late {

using Clock = std::chrono::steady_clock;

// Before each operation: `fixed_us`, and a random time of up to `max_us`.
struct Delays {
  std::uint64_t seed = 1;
  int max_us = 60;
  int fixed_us = 0;
};
void set_delays(const Delays& delays);

// A place in a stream, reached once all that was queued before it is done.
class Mark {
 public:
  void reach();
  bool is_reached() const;
  void wait() const;
  bool wait_until(Clock::time_point deadline) const;
  Clock::time_point time() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_reached_ = false;
  Clock::time_point time_ = {};
};

// Of this thread. 0 is the default stream.
c10::StreamId current_stream();
c10::StreamId exchange_stream(c10::StreamId stream);
c10::StreamId stream_from_pool();

enum class When { kLate, kAtOnce };  // kAtOnce: without a delay of its own
void enqueue(c10::StreamId stream, std::function<void()> task, When when = When::kLate);
std::shared_ptr<Mark> mark(c10::StreamId stream);
void block(c10::StreamId stream, std::shared_ptr<const Mark> mark);

// The host waits, which is counted. Throws what an operation has thrown.
void synchronize(c10::StreamId stream);
void synchronize(const Mark& mark);
bool synchronize_until(const Mark& mark, Clock::time_point deadline);
void synchronize_all();
std::int64_t num_syncs();

}  // namespace lockstep::test::late
