// The memory of all ranks of a host together, and what a step takes with it.
//
//   build/release/bench/memory [--models gpt,gpt2] [--ranks 2,4,8] [--peers barrier,lockstep]
//   [--rounds N] [--json]
//
// Peers: `barrier` (ranks that train apart, with a barrier in each step), lockstep with replicas,
// with Shard::kOptimizer and with Shard::kGradients, and Python's DDP with ZeroRedundancyOptimizer
// on Gloo; all with fused AdamW. `bare` and `python_bare` have neither gradients nor states, and
// `bare` has its parameters once for all ranks: what is there besides is that of processes,
// activations and gradients on their way, and is taken off from what the others have. Each run is a
// fresh set of processes; in every round all peers have one, in alternating order. Steps are timed
// first; memory is looked at in some more (memory_watch.h).

#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <thread>

#include "base/text.h"
#include "memory_rows.h"
#include "ranks.h"
#include "shm/segment.h"
#include "training_run.h"

namespace {

using namespace lockstep;  // NOLINT: a program
using bench::MemoryPeer;
using bench::MemoryRow;
using bench::MemoryRows;

struct Amount {
  const char* model;
  std::int64_t parameters;
  int warm_up;
  int steps;
  int watched_steps;
  int rounds;
};
constexpr Amount kAmounts[] = {{"gpt", 10'795'776, 2, 6, 3, 1},
                               {"gpt2", 124'439'808, 2, 3, 2, 3},
                               {"gpt2_medium", 354'823'168, 1, 2, 2, 1}};

constexpr MemoryPeer kPeers[] = {{"barrier", 0, 16, 0, false},
                                 bench::kReplicated,
                                 {"lockstep_optimizer", 12, 4, 0, true},
                                 {"lockstep_gradients", 16, 0, 2, true},
                                 {"python_zero", 8, 8, 0, true}};

// Of the memory that is available, how much a run may take.
constexpr double kShare = 0.9;

struct Options {
  std::vector<std::string> models;
  std::vector<int> ranks = {2, 4, 8};
  std::vector<std::string> peers;
  int rounds = 0;  // 0, and -1 below: as in kAmounts
  int steps = 0;
  int warm_up = -1;
  int watched_steps = 0;
  bool is_json = false;
  std::string model;  // in a rank
  std::string peer;
};

std::vector<Amount> amounts_of(const Options& options) {
  std::vector<Amount> amounts;
  for (Amount amount : kAmounts) {
    if (std::ranges::find(options.models, amount.model) == options.models.end()) continue;
    if (options.rounds > 0) amount.rounds = options.rounds;
    if (options.steps > 0) amount.steps = options.steps;
    if (options.warm_up >= 0) amount.warm_up = options.warm_up;
    if (options.watched_steps > 0) amount.watched_steps = options.watched_steps;
    amounts.push_back(amount);
  }
  return amounts;
}

double available_bytes() {
  const auto limits = shm::memory_limits_here("");
  const auto least = std::ranges::min_element(limits, {}, &Limit::amount);
  return least == limits.end() ? 0 : least->amount;
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), amounts_(amounts_of(options)) {}

  int run() {
    print_heading();
    for (const Amount& amount : amounts_) {
      for (const int ranks : options_.ranks) measure(amount, ranks);
    }
    return bench::verdict(wrong_, failed_, options_.is_json);
  }

 private:
  void measure(const Amount& amount, int ranks) {
    MemoryRows all(amount.model, amount.parameters, ranks);
    for (const MemoryPeer& peer : kPeers) {
      if (std::ranges::find(options_.peers, peer.name) == options_.peers.end()) continue;
      if (!peer.is_python() || has_python_) all.rows.push_back({peer});
    }
    all.bare = {{bench::kBare}};
    if (std::ranges::any_of(all.rows, [](const MemoryRow& row) { return row.peer.is_python(); })) {
      all.bare.push_back({bench::kPythonBare});
    }
    for (int round = 0; round < amount.rounds; ++round) {
      for (MemoryRow& row : all.bare) take_turn(amount, all, row, 1);
      for (MemoryRow& row : all.rows) take_turn(amount, all, row, amount.steps);
      std::ranges::reverse(all.rows);
    }
    if (amount.rounds % 2 == 1) std::ranges::reverse(all.rows);
    for (const MemoryRow& row : all.bare) print(all.object_of(row));
    for (const MemoryRow& row : all.rows) {
      print(all.object_of(row));
      if (row.peer.has_replicas) wrong_ += all.wrong(row);
    }
  }

  void take_turn(const Amount& amount, const MemoryRows& all, MemoryRow& row, int steps) try {
    const double needed = all.needed(row.peer);
    const double available = available_bytes();
    if (row.no_room.empty() && needed > kShare * available) {
      row.no_room = text::format("does not fit: needs about {:.0f} MB, {:.0f} are available",
                                 needed / 1e6, available / 1e6);
    }
    if (!row.no_room.empty()) return;
    const auto result = bench::measure({.model = amount.model,
                                        .peer = row.peer.name,
                                        .warm_up = amount.warm_up,
                                        .steps = steps,
                                        .ranks = all.ranks(),
                                        .watched_steps = amount.watched_steps},
                                       python_);
    if (result.parameters != amount.parameters) {
      throw std::runtime_error(text::format("{} of {} has {} parameters, not {}", amount.model,
                                            row.peer.name, result.parameters, amount.parameters));
    }
    row.rounds.push_back(result);
  } catch (const std::exception& error) {
    text::print(stderr, "bench: {}\n", error.what());
    ++failed_;
  }

  void print(const nlohmann::json& row) const {
    const auto text_of = [&](const char* name) { return row.at(name).get<std::string>(); };
    const auto number = [&](const char* name, int digits) {
      const auto& value = row.at(name);
      return value.is_null() ? "-" : text::format("{:.{}f}", value.get<double>(), digits);
    };
    const bool is_paper = !row.at("x_replicated").is_null() && !row.at("is_replicated_measured");
    if (options_.is_json) {
      text::print("{}\n", row.dump());
    } else if (row.at("pss_mb").is_null()) {
      text::print(" {:<13}{:<19}{:>5}{:>10}{:>12}{:>11}  {}\n", text_of("model"), text_of("peer"),
                  row.at("ranks").get<int>(), "-", "-", number("formula_mb", 0),
                  row.contains("no_room") ? text_of("no_room") : "failed");
    } else {
      text::print(" {:<13}{:<19}{:>5}{:>10}{:>12}{:>11}{:>11}{:>14}{:>8}{:>13}{:>13}{:>11}{:>7}\n",
                  text_of("model"), text_of("peer"), row.at("ranks").get<int>(),
                  number("pss_mb", 0), number("above_bare_mb", 0), number("formula_mb", 0),
                  number("x_formula", 2), (is_paper ? "~" : "") + number("x_replicated", 2),
                  number("x_replicated_total", 2), number("page_tables_mb", 1),
                  number("ms_per_step", 1), number("x_barrier", 2), number("wrong", 0));
    }
    std::fflush(stdout);
  }

  void print_heading() const {
    std::FILE* const out = options_.is_json ? stderr : stdout;
    if (!has_python_) {
      text::print(out, "# Without Python's peers: there is no {}. Set LOCKSTEP_PYTHON.\n", python_);
    }
    if (options_.is_json) return;
    text::print(
        "# Training with fused AdamW on one host, one thread for each rank. CPU: {}, {} cores, "
        "{:.0f} MB of memory are available. LibTorch {}, lockstep {}.\n"
        "# Fresh processes for each run, peers take turns. Warm-up + steps + watched steps x "
        "rounds:",
        bench::cpu_name(), std::thread::hardware_concurrency(), available_bytes() / 1e6,
        TORCH_VERSION, LOCKSTEP_VERSION);
    for (const Amount& amount : amounts_) {
      text::print(" {} {} + {} + {} x {}.", amount.model, amount.warm_up, amount.steps,
                  amount.watched_steps, amount.rounds);
    }
    text::print(
        "\n# pss: the most that each rank had in watched steps, of all ranks. above_bare: of it, "
        "what "
        "bare ranks do not have, and the parameters. formula: the same on paper.\n"
        "# x_replicated: above_bare against that of `lockstep`; ~: against its formula, as it does "
        "not fit. total: pss against that of `lockstep`. page_tables: not in pss.\n"
        "# ms_per_step: median of a run's steps, slowest rank, median over rounds; no memory is "
        "looked at meanwhile. wrong: elements in which replicas differ, or shared "
        "ones from replicas.\n");
    const auto line = [](auto... column) {
      text::print("#{:<13}{:<19}{:>5}{:>10}{:>12}{:>11}{:>11}{:>14}{:>8}{:>13}{:>13}{:>11}{:>7}\n",
                  column...);
    };
    line("model", "peer", "ranks", "pss", "above_bare", "formula", "x_formula", "x_replicated",
         "total", "page_tables", "ms_per_step", "x_barrier", "wrong");
    line("", "", "", "(MB)", "(MB)", "(MB)", "(x)", "(x)", "(x)", "(MB)", "(ms)", "(x)", "");
    std::fflush(stdout);
  }

  Options options_;
  std::vector<Amount> amounts_;
  std::string python_ = bench::python_program();
  bool has_python_ = ::access(python_.c_str(), X_OK) == 0;
  std::int64_t wrong_ = 0;
  int failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  std::vector<std::string> models, peers;
  for (const Amount& amount : kAmounts) models.emplace_back(amount.model);
  for (const MemoryPeer& peer : kPeers) peers.emplace_back(peer.name);
  options.models = models;
  options.peers = peers;
  CLI::App app("The memory of all ranks of a host together");
  app.add_option("--models", options.models, "Which models")
      ->delimiter(',')
      ->check(CLI::IsMember(models));
  app.add_option("--ranks", options.ranks, "How many, in turn")
      ->delimiter(',')
      ->check(CLI::Range(1, 64));
  app.add_option("--peers", options.peers, "Which peers, besides bare ones")
      ->delimiter(',')
      ->check(CLI::IsMember(peers));
  app.add_option("--rounds", options.rounds, "Runs of each peer");
  app.add_option("--steps", options.steps, "Steps that are timed in a run");
  app.add_option("--warm-up", options.warm_up, "Steps before that");
  app.add_option("--watched-steps", options.watched_steps, "Steps in which memory is looked at");
  app.add_flag("--json", options.is_json, "One JSON object per row");
  app.add_option("--model", options.model)->group("");  // of a rank
  app.add_option("--peer", options.peer)->group("");
  CLI11_PARSE(app, argc, argv);
  if (!options.model.empty()) {
    bench::be_rank({.model = options.model,
                    .peer = options.peer,
                    .warm_up = options.warm_up,
                    .steps = options.steps,
                    .watched_steps = options.watched_steps});
    return 0;
  }
  if (std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr) {
    options.models = {"gpt"};
    options.ranks = {2};
    options.rounds = options.steps = options.warm_up = options.watched_steps = 1;
  }
  return Bench(options).run();
} catch (const std::exception& error) {
  text::print(stderr, "{}\n", error.what());
  return 1;
}
