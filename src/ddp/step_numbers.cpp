#include "ddp/step_numbers.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep {

constexpr double kMaxMs = 60000;  // a time that fits every type of number

std::int64_t StepNumbers::count() const { return present_at(num_slots_); }

void StepNumbers::set_step_ms(double ms) {
  at(time_at(rank_)) = static_cast<float>(std::min(ms, kMaxMs));
}

void StepNumbers::write_to(const at::Tensor& memory) {
  memory.copy_(at::from_blob(values_.data(), {count()}, at::kFloat));
}

void StepNumbers::read_from(const at::Tensor& memory) {
  at::from_blob(values_.data(), {count()}, at::kFloat).copy_(memory);
  for (int player = num_players_ - 1; player >= 0; --player) {
    if (is_active(player)) first_active_ = player;
  }
}

int StepNumbers::num_active() const {
  int count = 0;
  for (int player = 0; player < num_players_; ++player) count += is_active(player) ? 1 : 0;
  return count;
}

}  // namespace lockstep
