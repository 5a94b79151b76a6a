// StepStats: what DdpStats says of the last step, and the clock behind it.
#pragma once

#include <lockstep/ddp.h>

#include <chrono>
#include <optional>

#include "ddp/bucket.h"
#include "ddp/step_numbers.h"

namespace lockstep {

class StepStats {
 public:
  using Clock = std::chrono::steady_clock;

  std::int64_t steps() const { return stats_.steps; }
  const DdpStats& get() const { return stats_; }

  void set_buckets(const std::vector<Bucket>& buckets);

  // The moments of a step, in their order. `hook_bytes` is what hooks have sent so far in all.
  void begin_backward(std::int64_t hook_bytes);
  void post();
  double ms_since_last_step() const;
  void end(const StepNumbers& numbers, int num_ranks, const std::vector<Bucket>& buckets,
           std::int64_t hook_bytes, Clock::time_point wait_began, Clock::time_point all_done);
  void end_step() { last_end_ = Clock::now(); }
  Clock::time_point last_end() const { return last_end_; }

 private:
  DdpStats stats_;
  std::int64_t hook_bytes_ = 0;  // when the step began
  Clock::time_point last_end_ = Clock::now();
  Clock::time_point backward_began_ = {};
  std::optional<Clock::time_point> first_posted_;
};

}  // namespace lockstep
