// Training steps, lockstep against what else there is: time over the bound, and peak memory.
//
//   build/release/bench/ddp [--models mlp,cnn] [--peers limit,lockstep] [--rounds N] [--json]
//   build/release/bench/ddp --model gpt --peer lockstep [--steps N]      one run, as JSON
//
// Peers of 2 ranks x 1 thread: `limit` (two processes that train apart), `barrier` (the same with a
// barrier in each step: the bound for synchronous training), lockstep on shared memory, the same
// with the optimizer's steps in backward (DdpOptions::optimizer) and with one memory for all ranks
// (Shard::kGradients), LibTorch's c10d::Reducer on Gloo
// and Python's DistributedDataParallel on Gloo, the last two with and without
// gradient_as_bucket_view. In one process: `plain` LibTorch against a world of one. Each run is a
// fresh set of processes; in every round all peers have one, in alternating order, so that they
// meet the same state of the machine. Same models (models.h), batches and fused AdamW. Ratios
// between rows of one run are results; absolute times are not.

#include <lockstep/backend.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <thread>

#include "base/text.h"
#include "ranks.h"
#include "training_run.h"

namespace {

using namespace lockstep;  // NOLINT: a program

// Enough steps for a median, enough warm-up for buckets to be settled and memory to be faulted in.
struct Amount {
  const char* model;
  int warm_up;
  int steps;
  int rounds;
};
constexpr Amount kAmounts[] = {{"mlp", 100, 1000, 5},
                               {"cnn", 5, 30, 3},
                               {"gpt", 3, 10, 3},
                               {"gpt2", 2, 4, 2},
                               {"many", 20, 200, 3}};

struct Options {
  std::vector<std::string> models;
  std::vector<std::string> peers;
  std::string model;
  std::string peer;
  int rounds = 0;  // 0, and -1 below: as in kAmounts
  int steps = 0;
  int warm_up = -1;
  bool is_json = false;
};

struct Row {
  bench::Peer peer;
  std::vector<bench::Measurement> rounds = {};

  double median(double bench::Measurement::*member) const { return bench::median(rounds, member); }
  double ms_per_step() const { return median(&bench::Measurement::ms_per_step); }
};

bench::TrainingRun make_run(const Options& options, const Amount& amount, const bench::Peer& peer) {
  return {.model = amount.model,
          .peer = peer.name,
          .warm_up = options.warm_up >= 0 ? options.warm_up : amount.warm_up,
          .steps = options.steps > 0 ? options.steps : amount.steps,
          .ranks = peer.ranks};
}

// What the command prints; empty if it fails.
std::string output_of(const std::vector<std::string>& arguments) try {
  std::vector<std::string> outputs;
  Command command;
  command.arguments = arguments;
  if (bench::run_and_wait({command}, &outputs) != 0) return {};
  return outputs.front().substr(0, outputs.front().find('\n'));
} catch (const std::exception&) {
  return {};
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    // Asks for the version without importing torch, which takes seconds.
    if (::access(python_.c_str(), X_OK) == 0) {
      python_torch_ =
          output_of({python_, "-c", "import importlib.metadata as m; print(m.version('torch'))"});
    }
    for (const EngineInfo& engine : engines()) {
      if (engine.name == "gloo") no_gloo_ = engine.unavailable;
    }
  }

  int run() {
    print_heading();
    for (const Amount& amount : chosen_amounts()) table(amount);
    return bench::verdict(wrong_, failed_, options_.is_json);
  }

 private:
  std::vector<Amount> chosen_amounts() const {
    std::vector<Amount> chosen;
    std::ranges::copy_if(kAmounts, std::back_inserter(chosen), [&](const Amount& amount) {
      return std::ranges::find(options_.models, amount.model) != options_.models.end();
    });
    return chosen;
  }

  int rounds_of(const Amount& amount) const {
    return options_.rounds > 0 ? options_.rounds : amount.rounds;
  }

  bool can_run(const bench::Peer& peer) const {
    const std::string name = peer.name;
    if (std::ranges::find(options_.peers, name) == options_.peers.end()) return false;
    if (name.starts_with("python_")) return !python_torch_.empty();
    return !name.starts_with("c10d_") || no_gloo_.empty();
  }

  void table(const Amount& amount) {
    std::vector<Row> rows;
    for (const bench::Peer& peer : bench::kPeers) {
      if (can_run(peer)) rows.push_back({peer});
    }
    for (int round = 0; round < rounds_of(amount); ++round) {
      for (Row& row : rows) take_turn(amount, row);
      std::ranges::reverse(rows);
    }
    if (rounds_of(amount) % 2 == 1) std::ranges::reverse(rows);
    std::erase_if(rows, [](const Row& row) { return row.rounds.empty(); });
    check_parameters(rows);
    for (const Row& row : rows) print(amount.model, row, rows);
  }

  void take_turn(const Amount& amount, Row& row) try {
    row.rounds.push_back(bench::measure(make_run(options_, amount, row.peer), python_));
  } catch (const std::exception& error) {
    text::print(stderr, "bench: {}\n", error.what());
    ++failed_;
  }

  // The same model everywhere, as far as counting tells.
  void check_parameters(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      if (row.rounds.front().parameters == rows.front().rounds.front().parameters) continue;
      text::print(stderr, "bench: {} has another number of parameters than {}\n", row.peer.name,
                  rows.front().peer.name);
      ++failed_;
    }
  }

  void print(const std::string& model, const Row& row, const std::vector<Row>& rows) {
    const auto find = [&](const std::string& name) {
      const auto found =
          std::ranges::find_if(rows, [&](const Row& one) { return name == one.peer.name; });
      return found == rows.end() ? nullptr : &*found;
    };
    const Row* const bound = find(row.peer.ranks == 1 ? "plain" : "barrier");
    const auto over_bound = [&](double bench::Measurement::*member) -> std::optional<double> {
      if (bound == nullptr) return {};
      return (row.median(member) / bound->median(member) - 1) * 100;
    };
    const auto over = over_bound(&bench::Measurement::ms_per_step);
    const auto quiet_over = over_bound(&bench::Measurement::quiet_ms);
    const Row* const lockstep = row.peer.ranks == 1 ? nullptr : find("lockstep");
    const double ms = row.ms_per_step();
    const double quiet_ms = row.median(&bench::Measurement::quiet_ms);
    const double peak_mb = row.median(&bench::Measurement::peak_mb);
    const double mean_ms = row.median(&bench::Measurement::mean_ms);
    const std::int64_t wrong = bench::count_wrong(
        row.peer.name, row.rounds,
        lockstep != nullptr ? lockstep->rounds : std::vector<bench::Measurement>());
    wrong_ += wrong;
    if (options_.is_json) {
      nlohmann::json object = {{"bench", "ddp"},        {"model", model},
                               {"peer", row.peer.name}, {"ranks", row.peer.ranks},
                               {"ms_per_step", ms},     {"over_bound", nullptr},
                               {"quiet_ms", quiet_ms},  {"quiet_over_bound", nullptr},
                               {"mean_ms", mean_ms},    {"vs_lockstep", nullptr},
                               {"peak_mb", peak_mb},    {"wrong", nullptr}};
      if (over) object["over_bound"] = *over;
      if (quiet_over) object["quiet_over_bound"] = *quiet_over;
      if (lockstep != nullptr) object["vs_lockstep"] = ms / lockstep->ms_per_step();
      if (row.peer.has_replicas) object["wrong"] = wrong;
      text::print("{}\n", object.dump());
    } else {
      const auto percent = [](std::optional<double> value) {
        return value ? text::format("{:+.1f}", *value) : "-";
      };
      text::print(" {:<7}{:<22}{:>5}{:>13.3f}{:>12}{:>11.3f}{:>12}{:>13}{:>10.1f}{:>7}\n", model,
                  row.peer.name, row.peer.ranks, ms, percent(over), quiet_ms, percent(quiet_over),
                  lockstep != nullptr ? text::format("{:.2f}", ms / lockstep->ms_per_step()) : "-",
                  peak_mb, row.peer.has_replicas ? std::to_string(wrong) : "-");
    }
    std::fflush(stdout);
  }

  void print_heading() const {
    std::FILE* const out = options_.is_json ? stderr : stdout;
    if (python_torch_.empty()) {
      text::print(out,
                  "# Without Python's peers: {} has no torch. Set LOCKSTEP_PYTHON to one that "
                  "has it.\n",
                  python_);
    }
    if (!no_gloo_.empty()) text::print(out, "# Without c10d::Reducer: {}.\n", no_gloo_);
    if (options_.is_json) return;
    text::print(
        "# Training with fused AdamW, one thread and one core for each rank. CPU: {}, {} cores. "
        "LibTorch {}, lockstep {}{}.\n",
        bench::cpu_name(), std::thread::hardware_concurrency(), TORCH_VERSION, LOCKSTEP_VERSION,
        python_torch_.empty() ? "" : ", Python's torch " + python_torch_);
    text::print("# Fresh processes for each run, peers take turns. Warm-up + steps x rounds:");
    const char* separator = " ";
    for (const Amount& amount : chosen_amounts()) {
      const auto run = make_run(options_, amount, bench::kPeers[0]);
      text::print("{}{} {} + {} x {}", separator, run.model, run.warm_up, run.steps,
                  rounds_of(amount));
      separator = ", ";
    }
    text::print(".\n");
    text::print(
        "# ms_per_step: median of a run's steps, slowest rank, median over rounds; over_bound: "
        "against `barrier`, with one rank against `plain`.\n"
        "# quiet_ms: the same with the 2nd percentile of steps: what it costs where nothing else "
        "runs. A step that waits for all ranks is as slow as the one that is disturbed.\n"
        "# vs_lockstep: how many times lockstep's time. peak_mb: resident memory of the largest "
        "process. wrong: elements in which replicas differ, or shared ones from replicas.\n");
    const auto line = [](auto... column) {
      text::print("#{:<7}{:<22}{:>5}{:>13}{:>12}{:>11}{:>12}{:>13}{:>10}{:>7}\n", column...);
    };
    line("model", "peer", "ranks", "ms_per_step", "over_bound", "quiet_ms", "over_bound",
         "vs_lockstep", "peak_mb", "wrong");
    line("", "", "", "(ms)", "(%)", "(ms)", "(%)", "(x)", "(MB)", "");
    std::fflush(stdout);
  }

  Options options_;
  std::string python_ = bench::python_program();
  std::string python_torch_;  // its version; empty: Python's peers cannot run
  std::string no_gloo_;       // why c10d::Reducer cannot run; empty: it can
  std::int64_t wrong_ = 0;
  int failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  std::vector<std::string> models, peers;
  for (const Amount& amount : kAmounts) models.emplace_back(amount.model);
  for (const bench::Peer& peer : bench::kPeers) peers.emplace_back(peer.name);
  options.models = models;
  options.peers = peers;
  CLI::App app("Training steps, lockstep against what else there is");
  app.add_option("--models", options.models, "Which models")
      ->delimiter(',')
      ->check(CLI::IsMember(models));
  app.add_option("--peers", options.peers, "Which peers")
      ->delimiter(',')
      ->check(CLI::IsMember(peers));
  app.add_option("--rounds", options.rounds, "Runs of each peer");
  app.add_option("--steps", options.steps, "Steps that are measured in a run");
  app.add_option("--warm-up", options.warm_up, "Steps before that");
  app.add_flag("--json", options.is_json, "One JSON object per row");
  auto* const model = app.add_option("--model", options.model, "With --peer: do one run")
                          ->check(CLI::IsMember(models));
  app.add_option("--peer", options.peer, "With --model: do one run")
      ->check(CLI::IsMember(peers))
      ->needs(model);
  CLI11_PARSE(app, argc, argv);
  if (std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr) {
    options.models = {"mlp"};
    options.rounds = 1;
    if (options.steps == 0) options.steps = 50;
    if (options.warm_up < 0) options.warm_up = 10;
  }
  if (options.peer.empty()) return Bench(options).run();
  const auto& amount = *std::ranges::find_if(
      kAmounts, [&](const Amount& one) { return options.model == one.model; });
  const auto& peer = *std::ranges::find_if(
      bench::kPeers, [&](const bench::Peer& one) { return options.peer == one.name; });
  const auto run = make_run(options, amount, peer);
  if (std::getenv("LOCKSTEP_BENCH_RANK") != nullptr) {
    bench::be_rank(run);
  } else {
    const auto result = bench::measure(run, bench::python_program());
    text::print("{}\n", nlohmann::json(result).dump());
  }
  return 0;
} catch (const std::exception& error) {
  text::print(stderr, "{}\n", error.what());
  return 1;
}
