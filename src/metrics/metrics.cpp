#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/metrics.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/env.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr auto kDrawEvery = std::chrono::milliseconds(200);
constexpr auto kLineEvery = std::chrono::seconds(10);

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  if (whole < 3600) return text::format("{}:{:02}", whole / 60, whole % 60);
  return text::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

// Columns of the terminal that standard error is, or that `lockstep run` says it is; 0: none.
int terminal_width() {
  if (const auto told = Environment::of_process().get("LOCKSTEP_TERMINAL")) {
    return std::max(0, std::atoi(told->c_str()));
  }
  if (::isatty(STDERR_FILENO) != 1) return 0;
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void write_all(const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t count = ::write(STDERR_FILENO, text.data() + at, text.size() - at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return;  // nobody looks
    at += static_cast<std::size_t>(count);
  }
}

}  // namespace

void Accuracy::add(const at::Tensor& scores, const at::Tensor& targets) {
  if (scores.dim() != 2 || targets.dim() != 1 || scores.size(0) != targets.size(0)) {
    throw UsageError(
        {.operation = "Accuracy"},
        text::format("The scores are {}, the targets {}.\nGive a row of scores for each "
                     "target.",
                     c10::str(scores.sizes()), c10::str(targets.sizes())));
  }
  add(scores.argmax(1).eq(targets).sum().item<std::int64_t>(), targets.numel());
}

void Accuracy::add(std::int64_t correct, std::int64_t total) {
  if (correct < 0 || correct > total) {
    throw UsageError(
        {.operation = "Accuracy"},
        text::format("{} of {} are said to be correct.\nGive counts.", correct, total));
  }
  correct_ += correct;
  total_ += total;
}

double Accuracy::over(const World& world) const {
  const std::vector<std::int64_t> mine = {correct_, total_};
  const at::Tensor all = world.all_reduce(at::tensor(mine, at::TensorOptions(at::kLong)));
  const auto total = all[1].item<std::int64_t>();
  return total == 0 ? 0 : all[0].item<double>() / static_cast<double>(total);
}

double finite_mean(const at::Tensor& loss, const World& world) {
  const at::Tensor all = world.all_gather(at::full({1}, loss.item<double>(), at::kDouble));
  std::string bad;
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto value = all.view({-1})[rank].item<double>();
    if (std::isfinite(value)) continue;
    bad += text::format("{}{} on rank {}", bad.empty() ? "" : ", ", value, world.global_rank(rank));
  }
  if (bad.empty()) return all.mean().item<double>();
  throw UsageError(
      {.rank = world.global_rank(), .operation = "finite_mean"},
      text::format("The loss is {}.\nTake a smaller learning rate, clip the gradients, "
                   "or look for bad samples in that rank's last batch.",
                   bad));
}

TurnMean::TurnMean(World world)
    : world_(std::move(world)),
      sums_(static_cast<std::size_t>(world_.logical_size())),
      weights_(sums_.size()) {}

void TurnMean::add(int logical_rank, const at::Tensor& value, double weight) {
  add(logical_rank, value.item<double>(), weight);
}

void TurnMean::add(int logical_rank, double value, double weight) {
  const LogicalRanks mine = world_.logical_ranks();
  if (logical_rank < mine.first || logical_rank >= mine.first + mine.count || !(weight >= 0) ||
      std::isinf(weight)) {
    throw UsageError(
        {.rank = world_.global_rank(), .operation = "TurnMean"},
        text::format("A number of logical rank {} with weight {} was given; this rank plays {} to "
                     "{}.\nGive what play() returned, and a number of samples.",
                     logical_rank, weight, mine.first, mine.first + mine.count - 1));
  }
  const auto place = static_cast<std::size_t>(logical_rank);
  if (weight == 0) return;  // whatever the value is
  sums_[place] += value * weight;
  weights_[place] += weight;
}

// What the others have is 0 here: adding it changes nothing, in whatever order an engine does.
double TurnMean::take() {
  std::vector<double> both = std::exchange(sums_, std::vector<double>(sums_.size()));
  both.insert(both.end(), weights_.begin(), weights_.end());
  weights_.assign(weights_.size(), 0);
  const at::Tensor all = world_.all_reduce(at::tensor(both, at::kDouble));
  const auto* const values = all.const_data_ptr<double>();
  const auto count = static_cast<std::ptrdiff_t>(sums_.size());
  const double weight = std::accumulate(values + count, values + 2 * count, 0.0);
  return weight == 0 ? 0 : std::accumulate(values, values + count, 0.0) / weight;
}

void StepClock::step(std::int64_t samples) {
  steps_.emplace_back(Clock::now(), samples);
  if (steps_.size() > window_ + 1) steps_.pop_front();
}

double StepClock::step_ms() const {
  if (steps_.size() < 2) return 0;
  const std::chrono::duration<double, std::milli> took = steps_.back().first - steps_.front().first;
  return took.count() / static_cast<double>(steps_.size() - 1);
}

double StepClock::samples_per_second() const { return own_samples_per_second() * num_ranks_; }

double StepClock::samples_per_second(const World& world) const {
  return world.sum(own_samples_per_second());
}

double StepClock::own_samples_per_second() const {
  const double ms = step_ms() * static_cast<double>(steps_.size() - 1);
  if (steps_.size() < 2 || ms <= 0) return 0;
  std::int64_t samples = 0;
  for (std::size_t i = 1; i < steps_.size(); ++i) samples += steps_[i].second;
  return static_cast<double>(samples) / ms * 1000;
}

ProgressBar::ProgressBar(std::int64_t total_steps, const World& world)
    : total_(total_steps), is_shown_(world.rank() == 0) {
  if (total_steps < 1) {
    throw UsageError({.rank = world.global_rank(), .operation = "ProgressBar"},
                     text::format("{} steps were announced.\nGive 1 or more.", total_steps));
  }
  if (is_shown_) width_ = terminal_width();
}

std::string ProgressBar::text(std::int64_t step, double loss, double samples_per_second,
                              int width) const {
  const double part = std::clamp(static_cast<double>(step) / static_cast<double>(total_), 0.0, 1.0);
  const std::chrono::duration<double> gone = Clock::now() - began_;
  const std::string left =
      part > 0 ? duration_text(gone.count() * (1 - part) / part) : std::string("?");
  const std::string facts = text::format("step {}/{}  loss {:.4f}  {:.0f} samples/s  {} left", step,
                                         total_, loss, samples_per_second, left);
  constexpr int kFrame = 8;  // "100% [" and "] "
  const int room = width - static_cast<int>(facts.size()) - kFrame - 1;
  if (room < 4)
    return facts.substr(0, width > 0 ? static_cast<std::size_t>(width - 1) : facts.size());
  const int bar = std::min(room, 40);
  const int full = static_cast<int>(part * bar);
  return text::format("{:3.0f}% [{}{}] {}", std::floor(part * 100),
                      std::string(static_cast<std::size_t>(full), '#'),
                      std::string(static_cast<std::size_t>(bar - full), '.'), facts);
}

void ProgressBar::update(std::int64_t step, double loss, double samples_per_second) {
  if (!is_shown_) return;
  show_loss(step, loss);
  const auto now = Clock::now();
  const auto every = width_ > 0 ? Clock::duration(kDrawEvery) : Clock::duration(kLineEvery);
  const bool is_last = step >= total_;
  if (now - last_shown_ < every && !is_last) return;
  last_shown_ = now;
  last_text_ = text(step, loss, samples_per_second, width_);
  write_all(width_ > 0 ? text::format("{}\x1b[K\r", last_text_) : last_text_ + "\n");
}

void ProgressBar::finish() {
  if (is_shown_ && width_ > 0 && !last_text_.empty()) write_all(last_text_ + "\x1b[K\n");
  is_shown_ = false;
}

}  // namespace lockstep
