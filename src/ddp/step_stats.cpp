#include "ddp/step_stats.h"

#include <algorithm>

namespace lockstep {
namespace {

double ms_between(StepStats::Clock::time_point from, StepStats::Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

}  // namespace

void StepStats::set_buckets(const std::vector<Bucket>& buckets) {
  stats_.buckets = static_cast<int>(buckets.size());
  stats_.bytes = 0;
  for (const Bucket& bucket : buckets) {
    stats_.bytes += static_cast<std::int64_t>(bucket.own.nbytes());
  }
}

void StepStats::begin_backward(std::int64_t hook_bytes) {
  backward_began_ = Clock::now();
  first_posted_.reset();
  hook_bytes_ = hook_bytes;
}

void StepStats::post() {
  if (!first_posted_) first_posted_ = Clock::now();
}

double StepStats::ms_since_last_step() const { return ms_between(last_end_, Clock::now()); }

void StepStats::end(const StepNumbers& numbers, int num_ranks, const std::vector<Bucket>& buckets,
                    std::int64_t hook_bytes, Clock::time_point wait_began,
                    Clock::time_point all_done) {
  ++stats_.steps;
  stats_.backward_ms = ms_between(backward_began_, all_done);
  stats_.communication_ms = first_posted_ ? ms_between(*first_posted_, all_done) : 0;
  stats_.waiting_ms = ms_between(wait_began, all_done);
  stats_.overlap_percent =
      stats_.communication_ms > 0
          ? 100 * std::max(0.0, 1 - stats_.waiting_ms / stats_.communication_ms)
          : 0;
  stats_.bytes_sent = hook_bytes - hook_bytes_;
  for (const Bucket& bucket : buckets) stats_.bytes_sent += bucket.bytes_given;
  stats_.step_ms.clear();
  for (int rank = 0; rank < num_ranks; ++rank) stats_.step_ms.push_back(numbers.step_ms(rank));
  stats_.slowest_rank =
      static_cast<int>(std::ranges::max_element(stats_.step_ms) - stats_.step_ms.begin());
}

}  // namespace lockstep
