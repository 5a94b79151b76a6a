// StepNumbers: the few numbers by which all ranks take the same decisions at the end of a step:
// flags, who has data, how long each rank took, and who has a gradient for which slot. They travel
// behind the last bucket, so that they need no round trip of their own; on their own, in main
// memory, where there is a comm hook or a device (Reducer::are_numbers_apart_).
//
// Each rank writes its own, the reduction makes the mean over ranks of each, and all read the same.
// Threading: none; the reducer's lock guards it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep {

class StepNumbers {
 public:
  // More than 0 after the reduction if any rank has set it.
  enum Flag : std::int64_t {
    kProblem,
    kWeighted,
    kLate,
    kNeedsState,
    kStop,
    kDiffers,
    kEndsEarly,  // out of data, and all are to stop for that
    kFollowed,   // another model of the same backward is finished after this one
    kSkips,      // without data in this step, but not in join(): it may have some in the next
    kReform,     // an elastic job is to change its ranks at the end of this step
    kBroken,     // not all collectives of the step could be started on a device
    kNumFlags
  };

  // A player has data of its own: a rank, or, with logical ranks, one of these.
  StepNumbers(int rank, int num_ranks, int num_players)
      : rank_(rank), num_ranks_(num_ranks), num_players_(num_players), divisor_(num_ranks) {}
  // What the reduction divides sums by, if not by the number of ranks.
  void set_divisor(int divisor) { divisor_ = divisor; }
  void set_num_slots(std::size_t num_slots) { num_slots_ = num_slots; }
  std::int64_t count() const;

  // This rank's own, then into the memory that is reduced.
  void clear() { values_.assign(static_cast<std::size_t>(count()), 0.0F); }
  void set(Flag flag, bool value) { at(flag) = value ? 1.0F : 0.0F; }
  void set_active(int player) { at(kNumFlags + player) = 1.0F; }  // it has data in this step
  void set_step_ms(double ms);
  void set_present(std::size_t slot) { at(present_at(slot)) = 1.0F; }
  void write_to(const at::Tensor& memory);

  // All ranks', once they are reduced.
  void read_from(const at::Tensor& memory);
  bool any(Flag flag) const { return at(flag) > 0; }
  bool is_active(int player) const { return at(kNumFlags + player) > 0; }
  int num_active() const;
  // The first player that had data, in this step or, if nobody has any more, in the last one.
  int first_active() const { return first_active_; }
  double step_ms(int rank) const { return at(time_at(rank)) * static_cast<float>(divisor_); }
  bool is_present(std::size_t slot) const { return at(present_at(slot)) > 0; }

 private:
  std::int64_t time_at(int rank) const { return kNumFlags + num_players_ + rank; }
  std::int64_t present_at(std::size_t slot) const {
    return kNumFlags + num_players_ + num_ranks_ + static_cast<std::int64_t>(slot);
  }
  float& at(std::int64_t index) { return values_[static_cast<std::size_t>(index)]; }
  float at(std::int64_t index) const { return values_[static_cast<std::size_t>(index)]; }

  const int rank_;
  const int num_ranks_;
  const int num_players_;
  int divisor_;
  std::size_t num_slots_ = 0;
  std::vector<float> values_;
  int first_active_ = 0;
};

}  // namespace lockstep
