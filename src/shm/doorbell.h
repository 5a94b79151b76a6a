// Doorbell: how a rank that has nothing to do sleeps until a peer changes something.
//
// A sleeper says that it sleeps, looks once more, and then waits on its own futex. A peer publishes
// its change first and then looks who sleeps. With a full fence on both sides, either the sleeper
// sees the change or the peer sees the sleeper: no wake-up is lost.
#pragma once

#include <atomic>
#include <chrono>

#include "shm/layout.h"

namespace lockstep::shm {

// Memory order: what was written before is seen by the rank that wakes up.
void ring(Control& peer);  // only if it sleeps
void ring_even_if_awake(Control& peer);

class Sleep {
 public:
  // Announces that this rank is going to sleep. Look for changes after this, then call nap().
  explicit Sleep(Control& self);
  ~Sleep();
  // Returns when the doorbell rings, has rung since the constructor, or after `limit`.
  void nap(std::chrono::nanoseconds limit);

 private:
  Control& self_;
  std::uint32_t seen_;
};

// Tells the processor that this is a spin loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace lockstep::shm
