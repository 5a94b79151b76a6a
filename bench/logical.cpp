// Logical ranks against plain DDP: what they add to a step's time and to a rank's memory.
//
//   build/release/bench/logical [--models mlp,cnn,gpt] [--ranks 1,2,3,4,8] [--rounds N] [--json]
//
// 8 logical ranks (JoinOptions::logical_ranks) on each number of ranks, against plain DDP with as
// many backwards in a rank's step (accumulate), and the same batches. 3 ranks play 3, 3 and 2:
// plain DDP has 3 backwards on each. All with fused AdamW, one thread for each rank. Each run is a
// fresh set of processes; in every round all have one, in alternating order. Steps are timed first;
// memory is looked at in some more (memory_watch.h), of models whose gradients are large enough.
// The weights at the end must have the same bits on any number of ranks.

#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <optional>
#include <thread>

#include "base/text.h"
#include "ranks.h"
#include "training_run.h"

namespace {

using namespace lockstep;  // NOLINT: a program

constexpr int kLogicalRanks = 8;

struct Amount {
  const char* model;
  int warm_up;
  int steps;
  int watched_steps;  // 0: gradients are too small to be seen in a process's memory
  int rounds;
};
constexpr Amount kAmounts[] = {
    {"mlp", 50, 400, 0, 5}, {"cnn", 3, 20, 0, 3}, {"gpt", 2, 6, 2, 3}, {"gpt2", 1, 2, 2, 1}};

struct Options {
  std::vector<std::string> models = {"mlp", "cnn", "gpt"};  // gpt2 on 8 ranks takes 20 GB
  std::vector<int> ranks = {1, 2, 3, 4, 8};
  int rounds = 0;  // 0, and -1 below: as in kAmounts
  int steps = 0;
  int warm_up = -1;
  int watched_steps = -1;
  bool is_json = false;
  std::string model;  // in a rank
  std::string peer;
  int micro_batches = 1;
  int logical_ranks = 0;
};

// One number of ranks: plain DDP, and the same number with logical ranks.
struct Row {
  int ranks;
  std::vector<bench::Measurement> plain = {};
  std::vector<bench::Measurement> logical = {};

  bool is_measured() const { return !plain.empty() && !logical.empty(); }
  // Of the rank that plays most.
  int turns() const { return (kLogicalRanks + ranks - 1) / ranks; }
  double times(double bench::Measurement::*member) const {
    return bench::median(logical, member) / bench::median(plain, member);
  }
  // Of the gradients, in each rank, that plain DDP does not have.
  std::optional<double> copies() const {
    const double more = bench::median(logical, &bench::Measurement::pss_bytes) -
                        bench::median(plain, &bench::Measurement::pss_bytes);
    if (logical.front().pss_bytes == 0) return {};
    return more / ranks / (4.0 * static_cast<double>(logical.front().parameters));
  }
  // What the times and the copies are to be at most, where that was promised.
  std::optional<double> most_times() const {
    if (ranks == kLogicalRanks) return 1.03;
    return ranks == 2 ? std::optional(1.05) : std::nullopt;
  }
  std::optional<double> most_copies() const {
    if (kLogicalRanks % ranks != 0) return {};
    return std::bit_width(static_cast<unsigned>(turns()));
  }
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    for (Amount amount : kAmounts) {
      if (std::ranges::find(options.models, amount.model) == options.models.end()) continue;
      if (options.rounds > 0) amount.rounds = options.rounds;
      if (options.steps > 0) amount.steps = options.steps;
      if (options.warm_up >= 0) amount.warm_up = options.warm_up;
      if (options.watched_steps >= 0) amount.watched_steps = options.watched_steps;
      amounts_.push_back(amount);
    }
  }

  int run() {
    if (!options_.is_json) print_heading();
    for (const Amount& amount : amounts_) table(amount);
    return bench::verdict(wrong_, failed_, options_.is_json);
  }

 private:
  void table(const Amount& amount) {
    std::vector<Row> rows;
    for (const int ranks : options_.ranks) rows.push_back({ranks});
    for (int round = 0; round < amount.rounds; ++round) {
      for (Row& row : rows) {
        const bool is_plain_first = round % 2 == 0;
        take_turn(amount, row, !is_plain_first);
        take_turn(amount, row, is_plain_first);
      }
      std::ranges::reverse(rows);
    }
    std::ranges::sort(rows, {}, &Row::ranks);
    std::erase_if(rows, [](const Row& row) { return !row.is_measured(); });
    for (const Row& row : rows) {
      // The bits are those of most ranks, of which each plays one if there are 8.
      print(amount.model, row,
            bench::count_wrong("lockstep_logical", row.logical, rows.back().logical));
    }
  }

  void take_turn(const Amount& amount, Row& row, bool is_logical) try {
    (is_logical ? row.logical : row.plain)
        .push_back(bench::measure({.model = amount.model,
                                   .peer = is_logical ? "lockstep_logical" : "lockstep",
                                   .warm_up = amount.warm_up,
                                   .steps = amount.steps,
                                   .ranks = row.ranks,
                                   .watched_steps = amount.watched_steps,
                                   .micro_batches = is_logical ? 1 : row.turns(),
                                   .logical_ranks = is_logical ? kLogicalRanks : 0},
                                  bench::python_program()));
  } catch (const std::exception& error) {
    text::print(stderr, "bench: {}\n", error.what());
    ++failed_;
  }

  void print(const std::string& model, const Row& row, std::int64_t wrong) {
    using bench::Measurement;
    wrong_ += wrong;
    const double plain_ms = bench::median(row.plain, &Measurement::ms_per_step);
    const double ms = bench::median(row.logical, &Measurement::ms_per_step);
    const double times = row.times(&Measurement::ms_per_step);
    const double quiet_times = row.times(&Measurement::quiet_ms);
    if (options_.is_json) {
      const auto value = [](std::optional<double> number) {
        return number ? nlohmann::json(*number) : nlohmann::json();
      };
      const nlohmann::json object = {{"bench", "logical"},
                                     {"model", model},
                                     {"ranks", row.ranks},
                                     {"logical_ranks", kLogicalRanks},
                                     {"turns", row.turns()},
                                     {"plain_ms", plain_ms},
                                     {"ms", ms},
                                     {"times", times},
                                     {"quiet_times", quiet_times},
                                     {"most_times", value(row.most_times())},
                                     {"copies", value(row.copies())},
                                     {"most_copies", value(row.most_copies())},
                                     {"wrong", wrong}};
      text::print("{}\n", object.dump());
    } else {
      const auto number = [](std::optional<double> value) {
        return value ? text::format("{:.2f}", *value) : "-";
      };
      text::print(" {:<7}{:>5}{:>7}{:>12.3f}{:>12.3f}{:>8.3f}{:>8.3f}{:>7}{:>8}{:>7}{:>7}\n", model,
                  row.ranks, row.turns(), plain_ms, ms, times, quiet_times,
                  number(row.most_times()), number(row.copies()),
                  row.copies() ? number(row.most_copies()) : "-", wrong);
    }
    std::fflush(stdout);
  }

  void print_heading() const {
    text::print(
        "# {} logical ranks against plain DDP with as many backwards, fused AdamW, one thread for "
        "each rank. CPU: {}, {} cores. LibTorch {}, lockstep {}.\n"
        "# Fresh processes for each run, in turns. Warm-up + steps + watched steps x rounds:",
        kLogicalRanks, bench::cpu_name(), std::thread::hardware_concurrency(), TORCH_VERSION,
        LOCKSTEP_VERSION);
    for (const Amount& amount : amounts_) {
      text::print(" {} {} + {} + {} x {}.", amount.model, amount.warm_up, amount.steps,
                  amount.watched_steps, amount.rounds);
    }
    text::print(
        "\n# turns: backwards in a step, of the rank that has most. plain, logical: median of a "
        "run's steps, slowest rank, median over rounds. times: logical / plain; quiet: the same "
        "with the 2nd percentile of steps.\n"
        "# copies: peak memory of a rank above plain DDP's, in gradients. most: the limits, where "
        "there is one. wrong: elements in which ranks differ, or all of a run whose weights are "
        "not those of the run with most ranks.\n");
    const auto line = [](auto... column) {
      text::print("#{:<7}{:>5}{:>7}{:>12}{:>12}{:>8}{:>8}{:>7}{:>8}{:>7}{:>7}\n", column...);
    };
    line("model", "ranks", "turns", "plain", "logical", "times", "quiet", "most", "copies", "most",
         "wrong");
    line("", "", "", "(ms)", "(ms)", "(x)", "(x)", "(x)", "", "", "");
    std::fflush(stdout);
  }

  Options options_;
  std::vector<Amount> amounts_;
  std::int64_t wrong_ = 0;
  int failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  std::vector<std::string> models;
  for (const Amount& amount : kAmounts) models.emplace_back(amount.model);
  CLI::App app("Logical ranks against plain DDP");
  app.add_option("--models", options.models, "Which models")
      ->delimiter(',')
      ->check(CLI::IsMember(models));
  app.add_option("--ranks", options.ranks, "How many, in turn")
      ->delimiter(',')
      ->check(CLI::Range(1, kLogicalRanks));
  app.add_option("--rounds", options.rounds, "Runs of each");
  app.add_option("--steps", options.steps, "Steps that are timed in a run");
  app.add_option("--warm-up", options.warm_up, "Steps before that");
  app.add_option("--watched-steps", options.watched_steps, "Steps in which memory is looked at");
  app.add_flag("--json", options.is_json, "One JSON object per row");
  app.add_option("--model", options.model)->group("");  // of a rank
  app.add_option("--peer", options.peer)->group("");
  app.add_option("--micro-batches", options.micro_batches)->group("");
  app.add_option("--logical-ranks", options.logical_ranks)->group("");
  CLI11_PARSE(app, argc, argv);
  if (!options.model.empty()) {
    bench::be_rank({.model = options.model,
                    .peer = options.peer,
                    .warm_up = options.warm_up,
                    .steps = options.steps,
                    .watched_steps = options.watched_steps,
                    .micro_batches = options.micro_batches,
                    .logical_ranks = options.logical_ranks});
    return 0;
  }
  if (std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr) {
    options.models = {"mlp"};
    options.ranks = {2, 3, 8};
    options.rounds = 1;
    if (options.steps == 0) options.steps = 50;
    if (options.warm_up < 0) options.warm_up = 10;
  }
  return Bench(options).run();
} catch (const std::exception& error) {
  text::print(stderr, "{}\n", error.what());
  return 1;
}
