#include "shm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace lockstep::shm {
namespace {

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, limit, nullptr,
            0);
}

}  // namespace

void ring_even_if_awake(Control& peer) {
  peer.doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex(peer.doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

void ring(Control& peer) {
  if (peer.is_asleep.load(std::memory_order_seq_cst) != 0) ring_even_if_awake(peer);
}

Sleep::Sleep(Control& self) : self_(self) {
  self_.is_asleep.fetch_add(1, std::memory_order_seq_cst);
  seen_ = self_.doorbell.load(std::memory_order_seq_cst);
}

Sleep::~Sleep() { self_.is_asleep.fetch_sub(1, std::memory_order_seq_cst); }

void Sleep::nap(std::chrono::nanoseconds limit) {
  const timespec duration = {.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000),
                             .tv_nsec = static_cast<long>(limit.count() % 1'000'000'000)};
  futex(self_.doorbell, FUTEX_WAIT, seen_, &duration);
}

}  // namespace lockstep::shm
