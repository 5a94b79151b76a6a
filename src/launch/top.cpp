#include "launch/top.h"

#include <algorithm>
#include <cmath>

#include "base/printable.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr double kBadWait = 10;

// Of a rank, over the time between two looks.
struct Rates {
  double step_s = 0;   // 0: there was no step
  double work_s = 0;   // of it, without waiting at its end
  double waiting = 0;  // share
  double samples = 0;  // a second
};

struct Row {
  const RankStatus* status = nullptr;
  Rates rates = {};
};

const RankStatus* find(const std::vector<RankStatus>& all, const RankStatus& wanted) {
  const auto found = std::ranges::find_if(
      all, [&](const RankStatus& one) { return one.host == wanted.host && one.pid == wanted.pid; });
  return found == all.end() ? nullptr : &*found;
}

// Of the steps between two looks; if there were none, of all.
Rates rates_of(const RankStatus& now, const RankStatus* before) {
  static const RankStatus kNone;
  const bool has_stepped = before != nullptr && now.stepping_s > before->stepping_s;
  const RankStatus& then = has_stepped ? *before : kNone;
  Rates rates;
  const double stepping = now.stepping_s - then.stepping_s;
  if (stepping <= 0) return rates;
  // Steps of the run include those before this process.
  rates.step_s = has_stepped ? stepping / static_cast<double>(now.steps - then.steps) : now.step_s;
  rates.waiting = std::clamp((now.waited_s - then.waited_s) / stepping, 0.0, 1.0);
  rates.work_s = rates.step_s * (1 - rates.waiting);
  rates.samples = static_cast<double>(now.samples - then.samples) / stepping;
  return rates;
}

std::string cut(const std::string& text, std::size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

// A command line may be long.
std::string program_of(const JobStatus& job) { return cut(printable(job.program), 60); }

std::string duration_of(double seconds) {
  if (seconds < 60) return text::format("{:.0f} s", seconds);
  if (seconds < 3600) return text::format("{:.0f} min", seconds / 60);
  return text::format("{:.1f} h", seconds / 3600);
}

std::string ms_of(double seconds) {
  const double ms = seconds * 1000;
  return ms == 0 ? "-" : text::format("{:.{}f}", ms, ms < 10 ? 2 : ms < 100 ? 1 : 0);
}

std::string memory_of(std::int64_t bytes) {
  return bytes == 0 ? "-" : text::format("{:.0f} MB", static_cast<double>(bytes) / 1e6);
}

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// Who needs most time for its own work, and how much more than usual.
std::string slowest_of(const std::vector<Row>& rows) {
  std::vector<double> work;
  const Row* slowest = nullptr;
  for (const Row& row : rows) {
    if (row.rates.step_s == 0 || !row.status->end.empty()) continue;
    work.push_back(row.rates.work_s);
    if (slowest == nullptr || row.rates.work_s > slowest->rates.work_s) slowest = &row;
  }
  if (work.size() < 2) return {};
  const double more = slowest->rates.work_s - median_of(work);
  return text::format("slowest: rank {}, {} ms more than the median", slowest->status->rank,
                      ms_of(more) == "-" ? "0" : ms_of(more));
}

std::vector<std::string> head_of(const JobStatus& job, const std::vector<Row>& rows) {
  int num_alive = 0;
  std::int64_t steps = 0;
  const RankStatus* with_loss = nullptr;
  std::vector<double> step_s;
  double waiting = 0;
  double samples = 0;
  double since_step_s = -1;  // of the rank that has stepped last
  bool are_late = true;
  for (const Row& row : rows) {
    const RankStatus& its = *row.status;
    if (!its.end.empty()) continue;
    ++num_alive;
    steps = std::max(steps, its.steps);
    if (its.loss_step >= 0 && (with_loss == nullptr || its.loss_step > with_loss->loss_step)) {
      with_loss = &its;
    }
    samples += row.rates.samples;
    if (row.rates.step_s == 0) continue;
    are_late = are_late && is_late(its);
    since_step_s = since_step_s < 0 ? its.since_step_s : std::min(since_step_s, its.since_step_s);
    step_s.push_back(row.rates.step_s);
    waiting += row.rates.waiting;
  }
  std::vector<std::string> head = {text::format(
      "{}: job {} on {} host{}, {} rank{}, generation {}, up {}", program_of(job), job.job,
      job.num_hosts, job.num_hosts == 1 ? "" : "s", num_alive, num_alive == 1 ? "" : "s",
      std::max(job.generation, 0), duration_of(job.seconds))};
  std::vector<std::string> facts = {text::format("step {}", steps)};
  if (!step_s.empty() && are_late) {
    facts.push_back(text::format("no step for {}", duration_of(since_step_s)));
  } else if (!step_s.empty()) {
    const double usual = median_of(step_s);
    facts.push_back(text::format("{:.{}f} steps/s", 1 / usual, usual > 0.1 ? 2 : 0));
    facts.push_back(
        text::format("waiting {:.0f} %", 100 * waiting / static_cast<double>(step_s.size())));
    if (samples > 0) facts.push_back(text::format("{:.0f} samples/s", samples));
  }
  if (with_loss != nullptr) facts.push_back(text::format("loss {:.4g}", with_loss->loss));
  if (const std::string slowest = slowest_of(rows); !slowest.empty()) facts.push_back(slowest);
  head.push_back(text::join(facts, "   "));
  if (!job.note.empty()) head.push_back(job.note);
  return head;
}

// What matters most is within 80 columns.
constexpr const char* kLine = "{:>4} {:<10} {:<37} {:>8} {:>8} {:>7} {:>9} {:>8} {:>8}";

TopLine line_of(const Row& row) {
  const RankStatus& its = *row.status;
  const bool has_steps = row.rates.step_s > 0;
  const bool has_rate = row.rates.samples > 0 && !is_late(its);
  TopLine line;
  line.text = text::format(kLine, its.rank < 0 ? "-" : std::to_string(its.rank),
                           cut(text::format("{} {}", its.host, printable(its.host_name)), 10),
                           cut(describe_state(its), 37), its.steps, ms_of(row.rates.step_s),
                           has_steps ? text::format("{:.0f} %", 100 * row.rates.waiting) : "-",
                           has_rate ? text::format("{:.0f}", row.rates.samples) : "-",
                           memory_of(its.memory_bytes), its.pid);
  line.is_bad = (!its.end.empty() && its.end != "exited with code 0") || its.waits_s > kBadWait;
  return line;
}

}  // namespace

TopView view_of(const JobStatus& now, const std::optional<JobStatus>& before,
                const TopOptions& options) {
  std::vector<Row> rows;
  for (const RankStatus& one : now.ranks) {
    const RankStatus* const then = before ? find(before->ranks, one) : nullptr;
    rows.push_back({&one, rates_of(one, then)});
  }
  TopView view;
  view.head = head_of(now, rows);
  view.columns = text::format(kLine, "rank", "host", "state", "step", "ms/step", "waiting",
                              "samples/s", "memory", "pid");
  // Each begins with those that matter.
  const auto key = [&](const Row& row) {
    switch (options.sort) {
      case TopSort::kHost:
        return static_cast<double>(row.status->host);
      case TopSort::kWork:
        return -row.rates.work_s;
      case TopSort::kWaiting:
        return -row.rates.waiting - row.status->waits_s;
      case TopSort::kMemory:
        return -static_cast<double>(row.status->memory_bytes);
      case TopSort::kRank:
        break;
    }
    return row.status->rank < 0 ? 1e9 : static_cast<double>(row.status->rank);
  };
  std::ranges::stable_sort(rows, {}, key);
  if (options.is_reversed) std::ranges::reverse(rows);
  for (const Row& row : rows) {
    TopLine line = line_of(row);
    if (line.text.find(options.filter) != std::string::npos) view.ranks.push_back(std::move(line));
  }
  return view;
}

std::string to_text(const TopView& view) {
  std::string all;
  for (const std::string& line : view.head) all += line + "\n";
  all += view.columns + "\n";
  for (const TopLine& line : view.ranks) all += line.text + "\n";
  return all;
}

std::string list_jobs(const std::vector<JobStatus>& jobs) {
  std::string all = text::format("{:<16} {:>8} {:>6} {:>6} {:>10} {:>9}  {}\n", "job", "launcher",
                                 "hosts", "ranks", "step", "up", "program");
  for (const JobStatus& job : jobs) {
    std::int64_t steps = 0;
    for (const RankStatus& one : job.ranks) steps = std::max(steps, one.steps);
    all += text::format("{:<16} {:>8} {:>6} {:>6} {:>10} {:>9}  {}\n", printable(job.job), job.pid,
                        job.num_hosts, job.ranks.size(), steps, duration_of(job.seconds),
                        program_of(job));
  }
  return all;
}

}  // namespace lockstep
