// metrics: how training goes: counts over all ranks, speed, files for plots, a progress bar.
//
// Files and bars are rank 0's: on the other ranks the same calls do nothing. World::mean() and
// sum() bring numbers of all ranks together.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>
#include <lockstep/world.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// The fraction correct over all ranks: exact also if ranks have different numbers of samples.
class LOCKSTEP_API Accuracy {
 public:
  // `scores`: a row for each sample, the largest is the answer; `targets`: the right ones.
  void add(const at::Tensor& scores, const at::Tensor& targets);
  void add(std::int64_t correct, std::int64_t total);
  // Of all that was added on all ranks; 0 if that is nothing. Collective.
  double over(const World& world) const;
  void clear() { correct_ = total_ = 0; }

 private:
  std::int64_t correct_ = 0;
  std::int64_t total_ = 0;
};

// The mean over all ranks, as World::mean(), for who wants training to stop when a loss is no
// longer a number. Collective. Throws on all ranks: UsageError that names the ranks whose value is
// not finite, and the values.
LOCKSTEP_API double finite_mean(const at::Tensor& loss, const World& world);

// The mean of a number that each turn has, such as its loss: the same bits on any number of ranks
// that play the same logical ranks. Without logical ranks, the mean over ranks.
//
//   TurnMean mean(world);
//   ...
//   const auto turn = ddp.play();
//   mean.add(turn.logical_rank, loss, batch_size);     // in each turn
//   if (!turn.is_last) continue;
//   const double shown = mean.take();                  // of the step
class LOCKSTEP_API TurnMean {
 public:
  explicit TurnMean(World world);

  // Several of one turn, or of several steps, are added up. Throws: UsageError for a weight that is
  // negative or not finite, or a logical rank that this rank does not play.
  void add(int logical_rank, const at::Tensor& value, double weight = 1);
  void add(int logical_rank, double value, double weight = 1);
  // Of all that was added on all ranks; 0 if that is nothing. Begins anew. Collective.
  double take();

 private:
  World world_;
  std::vector<double> sums_;     // by logical rank: of value times weight
  std::vector<double> weights_;  // by logical rank
};

// The time of a step, and samples a second, over the last steps.
class LOCKSTEP_API StepClock {
 public:
  // `num_ranks`: all take as many samples.
  explicit StepClock(int num_ranks = 1, std::size_t window = 50)
      : num_ranks_(num_ranks), window_(window) {}

  void step(std::int64_t samples);  // of this rank, now done
  double step_ms() const;           // 0 before the second step
  double samples_per_second() const;
  // Of all ranks, which may take different numbers of samples: num_ranks does not count.
  // Collective.
  double samples_per_second(const World& world) const;

 private:
  double own_samples_per_second() const;

  using Clock = std::chrono::steady_clock;
  int num_ranks_;
  std::size_t window_;
  std::deque<std::pair<Clock::time_point, std::int64_t>> steps_;
};

using Values = std::map<std::string, double>;

// What `lockstep top` shows of this rank. The files and the bar below call it with "loss".
LOCKSTEP_API void show_loss(std::int64_t step, double loss);

// One line of JSON for each call: {"step":7,"time":1700000000.123,"loss":0.5}. What is not a number
// is null. A file that is there is continued. Throws: SystemError if it cannot be written.
class LOCKSTEP_API JsonLines {
 public:
  JsonLines(const std::string& path, const World& world);
  void write(std::int64_t step, const Values& values);

 private:
  std::shared_ptr<std::FILE> file_;  // none on other ranks
  std::string path_;
};

// A file of events in `folder`, as TensorBoard reads them. Throws: SystemError as above.
class LOCKSTEP_API TensorBoard {
 public:
  TensorBoard(const std::string& folder, const World& world);
  void write(std::int64_t step, const Values& values);

 private:
  void record(const std::string& event);

  std::shared_ptr<std::FILE> file_;
  std::string path_;
};

// Steps, loss, samples a second and the time that is left, on standard error: a bar that is drawn
// over itself on a terminal (also under `lockstep run` on one), else a line now and then.
class LOCKSTEP_API ProgressBar {
 public:
  ProgressBar(std::int64_t total_steps, const World& world);
  ~ProgressBar() { finish(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(std::int64_t step, double loss, double samples_per_second);
  void finish();  // leaves the last state on the terminal

  // What would be shown now, without the bar itself when `width` is 0.
  std::string text(std::int64_t step, double loss, double samples_per_second, int width) const;

 private:
  using Clock = std::chrono::steady_clock;
  std::int64_t total_;
  bool is_shown_;
  int width_ = 0;  // of the terminal; 0: there is none
  Clock::time_point began_ = Clock::now();
  Clock::time_point last_shown_ = {};
  std::string last_text_;
};

}  // namespace lockstep
