// Several hosts: lockstep's hierarchical engine against flat Gloo and Python's DDP.
//
//   build/release/bench/hosts [--hosts 2] [--ranks 2] [--rate 1gbit] [--rounds 3] [--only gpt]
//   [--json]
//
// Hosts are network namespaces of this machine, with a cable of the given rate to a switch (root,
// iproute2); `lockstep run` starts the ranks on each, also Python's. In every round all peers have
// a fresh set of processes, in alternating order. One more run, with offloading of segments off,
// counts bytes at the cable of the host that sent most, with the headers of all packets.

#include <ATen/Parallel.h>
#include <lockstep/backend.h>
#include <lockstep/world.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "base/text.h"
#include "ranks.h"
#include "support/net_hosts.h"
#include "training_run.h"

namespace {

using namespace lockstep;  // NOLINT: a program
using bench::Measurement;

struct Options {
  int hosts = 2;
  int ranks = 2;
  std::string rate = "1gbit";
  int rounds = 3;
  std::string only;
  std::vector<std::string> peers;  // empty: all
  bool is_json = false;
  std::string model;  // in a rank
  std::string peer;
  int warm_up = 0;
  int steps = 0;
};

// What is measured, with which peers; the first one is lockstep.
struct Job {
  const char* model;  // of bench/models.h, or an all-reduce of so many MiB
  const char* what;
  int warm_up;
  int steps;
  std::vector<std::string> peers;
};
const std::vector<Job> kJobs = {
    {"all_reduce_1", "all-reduce of 1 MiB", 5, 40, {"hierarchical", "gloo"}},
    {"all_reduce_25", "all-reduce of 25 MiB", 2, 10, {"hierarchical", "gloo"}},
    {"gpt",
     "GPT, 10.8 M parameters",
     3,
     8,
     {"lockstep", "lockstep_bf16", "lockstep_gradients", "limit", "c10d_reducer_view", "python_ddp",
      "python_ddp_view"}},
};

constexpr int kStepsForBytes = 3;

constexpr const char* kAllReduce = "all_reduce_";

// A rank: one all-reduce as a step.
void all_reduce(const Options& options) {
  at::set_num_threads(1);
  const World world = World::join({.engine = options.peer});
  const std::int64_t count =
      std::atol(options.model.c_str() + std::string(kAllReduce).size()) * (1 << 20) / 4;
  c10d::Backend& engine = *world.backend();
  at::Tensor tensor = engine.supportsTensorAlloc(-1) ? engine.allocateTensor(count, at::kFloat)
                                                     : at::empty({count}, at::kFloat);
  tensor.fill_(world.rank() + 1);
  const auto step = [&] { world.all_reduce(tensor, ReduceOp::AVG); };
  for (int i = 0; i < options.warm_up; ++i) step();
  world.barrier();
  Measurement result;
  std::vector<double> times;
  const double sent_before = bench::sent_mb();
  for (int i = 0; i < options.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    times.push_back(taken.count());
  }
  std::ranges::sort(times);
  result.ms_per_step = times[times.size() / 2];
  world.barrier();
  result.wire_mb = (bench::sent_mb() - sent_before) / options.steps;
  result.parameters = count;
  const float mean = static_cast<float>(world.size() + 1) / 2;
  result.wrong = tensor.ne(mean).sum().item<std::int64_t>();
  text::print("{}\n", nlohmann::json(result).dump());
}

struct Row {
  std::string peer;
  std::vector<Measurement> rounds = {};
  double wire_mb = 0;

  double ms() const { return bench::median(rounds, &Measurement::ms_per_step); }
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        hosts_(options.hosts, options.rate),
        ranks_(options.hosts, options.ranks) {}

  int run() {
    print_heading();
    for (const Job& job : kJobs) {
      if (!options_.only.empty() && options_.only != job.model) continue;
      std::vector<Row> rows;
      for (const std::string& peer : job.peers) {
        const bool is_chosen = options_.peers.empty() ||
                               std::ranges::find(options_.peers, peer) != options_.peers.end();
        const bool can_run = !peer.starts_with("python_") || ::access(python_.c_str(), X_OK) == 0;
        if (is_chosen && can_run) rows.push_back({peer});
      }
      for (int round = 0; round < options_.rounds; ++round) {
        for (Row& row : rows) {
          if (const auto result = take_turn(job, row.peer, job.steps))
            row.rounds.push_back(*result);
        }
        std::ranges::reverse(rows);
      }
      hosts_.set_offload(false);
      for (Row& row : rows) {
        if (const auto result = take_turn(job, row.peer, kStepsForBytes))
          row.wire_mb = result->wire_mb;
      }
      hosts_.set_offload(true);
      if (options_.rounds % 2 == 1) std::ranges::reverse(rows);
      std::erase_if(rows, [](const Row& row) { return row.rounds.empty(); });
      for (const Row& row : rows) print(job, row, rows.front());
    }
    return bench::verdict(wrong_, failed_, options_.is_json);
  }

 private:
  std::optional<Measurement> take_turn(const Job& job, const std::string& peer, int steps) try {
    const bench::TrainingRun run{job.model, peer, job.warm_up, steps};
    const bool is_python = peer.starts_with("python_");
    std::vector<std::string> rank = is_python
                                        ? bench::python_rank(run, python_)
                                        : std::vector<std::string>{bench::this_program(),
                                                                   "--model",
                                                                   run.model,
                                                                   "--peer",
                                                                   run.peer,
                                                                   "--warm-up",
                                                                   std::to_string(run.warm_up),
                                                                   "--steps",
                                                                   std::to_string(run.steps)};
    std::vector<Command> commands;
    for (int host = 0; host < options_.hosts; ++host) {
      Command command;
      command.arguments = hosts_.launcher(host, ranks_);
      command.arguments.insert(command.arguments.end(), rank.begin(), rank.end());
      command.variables = {{"LOCKSTEP_SECRET", "VGhlIHNlY3JldCBvZiB0aGUgdGVzdHMsIGluIGJhc2U2NA=="},
                           {"LOCKSTEP_LOG", "warning"},
                           {"OMP_NUM_THREADS", "1"}};
      if (is_python) {
        command.variables["GLOO_SOCKET_IFNAME"] = "cable";
        command.variables["TORCH_CPP_LOG_LEVEL"] = "ERROR";
      }
      commands.push_back(command);
    }
    std::vector<std::string> outputs;
    if (bench::run_and_wait(std::move(commands), &outputs) != 0) {
      throw std::runtime_error(text::format("the run of {} failed", peer));
    }
    std::vector<Measurement> measured;
    for (const std::string& output : outputs) {
      std::istringstream lines(output);  // "[0] {...}"
      for (std::string line; std::getline(lines, line);) {
        if (const std::size_t brace = line.find('{'); brace != std::string::npos) {
          measured.push_back(nlohmann::json::parse(line.substr(brace)));
        }
      }
    }
    const Measurement result = bench::put_together(measured);
    wrong_ += peer == "limit" ? 0 : result.wrong;
    return result;
  } catch (const std::exception& error) {
    text::print(stderr, "bench: {}\n", error.what());
    ++failed_;
    return std::nullopt;
  }

  // What each host must send at least: of the host's sum 2 (H - 1) / H.
  double bound_mb(const Row& row) const {
    if (row.peer == "limit") return 0;
    const double bytes = row.peer == "lockstep_bf16" ? 2 : 4;
    return 2.0 * (options_.hosts - 1) / options_.hosts * bytes *
           static_cast<double>(row.rounds.front().parameters) / 1e6;
  }

  void print(const Job& job, const Row& row, const Row& first) const {
    const double ms = row.ms();
    const double bound = bound_mb(row);
    const double ratio = ms / first.ms();
    if (options_.is_json) {
      nlohmann::json object = {{"bench", "hosts"},
                               {"what", job.model},
                               {"peer", row.peer},
                               {"hosts", options_.hosts},
                               {"ranks", options_.ranks},
                               {"rate", options_.rate},
                               {"ms", ms},
                               {"vs_lockstep", ratio},
                               {"wire_mb", row.wire_mb},
                               {"bound_mb", bound}};
      text::print("{}\n", object.dump());
    } else {
      text::print(" {:<24}{:<19}{:>9.1f}{:>13.2f}{:>9.2f}{:>10}\n", job.what, row.peer, ms, ratio,
                  row.wire_mb, bound > 0 ? text::format("{:.3f}", row.wire_mb / bound) : "-");
    }
    std::fflush(stdout);
  }

  void print_heading() const {
    if (options_.is_json) return;
    text::print(
        "# {} hosts of {} ranks (network namespaces of one machine), {} from each host. CPU: {}, "
        "{} cores. Median of {} rounds, slowest rank.\n"
        "# vs_lockstep: how many times the time of the first row. wire: what the host that sent "
        "most has sent in a step; bound: how many times what it must send at least.\n",
        options_.hosts, options_.ranks, options_.rate, bench::cpu_name(),
        std::thread::hardware_concurrency(), options_.rounds);
    text::print("#{:<24}{:<19}{:>9}{:>13}{:>9}{:>10}\n", "what", "peer", "ms", "vs_lockstep",
                "wire MB", "x bound");
    std::fflush(stdout);
  }

  Options options_;
  test::NetHosts hosts_;
  std::vector<int> ranks_;
  std::string python_ = bench::python_program();
  std::int64_t wrong_ = 0;
  int failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app("Several hosts: lockstep against flat Gloo and Python's DDP");
  app.add_option("--hosts", options.hosts, "How many")->check(CLI::Range(2, 4));
  app.add_option("--ranks", options.ranks, "On each host")->check(CLI::Range(1, 8));
  app.add_option("--rate", options.rate, "Of each cable, as tc(8) writes it");
  app.add_option("--rounds", options.rounds, "Runs of each peer")->check(CLI::PositiveNumber);
  std::vector<std::string> names;
  for (const Job& job : kJobs) names.emplace_back(job.model);
  app.add_option("--only", options.only, "Only this")->check(CLI::IsMember(names));
  app.add_option("--peers", options.peers, "Only these")->delimiter(',');
  app.add_flag("--json", options.is_json, "One JSON object per row");
  app.add_option("--model", options.model)->group("");  // of a rank
  app.add_option("--peer", options.peer)->group("");
  app.add_option("--warm-up", options.warm_up)->group("");
  app.add_option("--steps", options.steps)->group("");
  CLI11_PARSE(app, argc, argv);
  if (std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr) {
    options.rounds = 1;
    if (options.only.empty()) options.only = "all_reduce_1";
  }
  if (options.model.starts_with(kAllReduce)) {
    all_reduce(options);
  } else if (!options.model.empty()) {
    bench::be_rank({options.model, options.peer, options.warm_up, options.steps});
  } else if (const std::string reason = test::NetHosts::why_not(); !reason.empty()) {
    text::print(stderr, "bench: no hosts can be made here: {}\n", reason);
    return 1;
  } else {
    return Bench(options).run();
  }
  return 0;
} catch (const std::exception& error) {
  text::print(stderr, "{}\n", error.what());
  return 1;
}
