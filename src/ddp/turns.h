// Turns: the logical ranks that a rank plays one after the other in a step, and the gradients that
// they have left.
//
// After each turn but the last, gradients are copied from the parameters or added to those of
// earlier turns as far as the tree over logical ranks allows (collective/leaves.h): with a power of
// two of turns at most log2(turns) copies are kept, else 2 log2(turns). The last turn's are in the
// buckets, where the rest is added to them. Every turn begins with the buffers that the step began
// with, and with random numbers that depend on the run's seed, the step and the logical rank alone.
// Threading: none; the reducer's lock guards it.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ddp.h>
#include <lockstep/world.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/bucket.h"
#include "engine/leaf_mean.h"

namespace lockstep {

class Turns {
 public:
  explicit Turns(const World& world);

  // Whether the world has logical ranks. If not, there is one turn, and nothing of this is used.
  bool are_on() const { return mean_ != nullptr; }
  const LeafMean& mean() const { return *mean_; }
  int num_turns() const { return are_on() ? mean_->held().count : 1; }
  int num_threads() const { return num_threads_; }  // when the model was wrapped
  int turn() const { return turn_; }
  bool is_last() const { return turn_ + 1 == num_turns(); }
  // A rank alone: what its sum over turns is still to be divided by.
  int divisor() const;
  // Buckets go through LeafMean, not through an all-reduce of the engine.
  bool are_exchanged() const { return are_on() && !mean_->is_all_reduce(); }

  // A backward of this turn is about to come: its random numbers, and, if it is the first of its
  // turn, the buffers of the step.
  void begin(int micro, std::uint64_t seed, std::int64_t step,
             const std::vector<NamedTensor>& buffers);
  bool has_begun() const { return has_begun_; }
  bool is_step_begun() const { return is_step_begun_; }
  void end_backward() { has_begun_ = false; }

  // The turn's gradient of a slot, in one run of memory; undefined: it has none.
  void add(std::size_t slot, const at::Tensor& gradient);
  // The turn is over. Without data it counts for nothing, whatever its weight.
  void add_weight(double weight, bool has_data);
  std::vector<int> with_data() const;       // the logical ranks of this rank that had some
  void end_early() { ends_early_ = true; }  // a turn without data is to end the training
  bool ends_early() const { return ends_early_; }
  double last_weight() const;  // of the logical rank whose turn it is, when it had data
  void note_buffers(const std::vector<NamedTensor>& buffers, bool are_averaged, bool has_data);
  void end_turn() {
    ++turn_;
    has_begun_ = false;
  }
  // What is wrong with a turn of this rank: the step is dropped at its end, on all ranks.
  void note_problem(const std::string& problem) {
    if (problem_.empty()) problem_ = problem;
  }
  const std::string& problem() const { return problem_; }

  // In the last turn: `place` becomes this turn's part of the slot's gradient, from `first` on,
  // with what earlier turns have of it. What is left are the roots before the last one. Both in one
  // run of memory; they may be the same.
  void fold(std::size_t slot, std::int64_t first, const at::Tensor& gradient,
            const at::Tensor& place) const;
  // The part from `first` on of root `index`, for a place like this; zeros if there is none.
  void copy_root(std::size_t slot, std::size_t index, std::int64_t first,
                 const at::Tensor& place) const;
  bool is_present(std::size_t slot) const { return slot < present_.size() && present_[slot]; }
  // By logical rank, of all ranks together: this rank's, zeros for the others'.
  std::vector<double> weights() const;
  bool is_weighted() const;
  // Makes them those of the first logical rank that had data, or the mean over all. Collective.
  void finish_buffers(const World& world, const std::vector<NamedTensor>& buffers,
                      bool are_averaged, int first_with_data);

  // The step does not count: buffers become those that it began with. `of_last_step`: of one that
  // is over, if no other has begun.
  void restore_buffers(const std::vector<NamedTensor>& buffers, bool of_last_step = false) const;
  // The step is over, or dropped.
  void reset();

 private:
  // Sums of subtrees, from left to right, in memory of its own.
  class Stack {
   public:
    // Puts the next one there, and adds up what is complete. An undefined one is zeros.
    void push(const at::Tensor& next, int merges);
    void clear();
    const std::vector<at::Tensor>& parts() const { return parts_; }

   private:
    at::Tensor copy_of(const at::Tensor& numbers);

    std::vector<at::Tensor> parts_;
    std::vector<at::Tensor> spare_;
  };

  static bool is_averaged(const at::Tensor& buffer);
  static at::Tensor numbers_of(const at::Tensor& buffer);

  // Constant after construction.
  std::shared_ptr<const LeafMean> mean_;  // null: the world has no logical ranks
  std::vector<std::uint8_t> merges_;      // by turn
  int num_threads_ = 1;

  int turn_ = 0;
  bool has_begun_ = false;
  std::string problem_;
  bool ends_early_ = false;
  std::vector<Stack> stacks_;              // by slot
  std::vector<bool> present_;              // by slot, in earlier turns
  std::vector<double> weights_;            // by turn
  std::vector<bool> has_data_;             // by turn
  std::vector<double> last_weights_;       // by turn, of steps with data; not of this step
  bool is_step_begun_ = false;             // a turn of it
  std::vector<at::Tensor> first_buffers_;  // as the step began, or the one that is over
  std::vector<at::Tensor> kept_buffers_;   // after the first turn with data
  std::vector<Stack> buffer_stacks_;       // by buffer
};

}  // namespace lockstep
