// All-reduce over the engines of this build: time and bandwidth by size, wrong values counted.
//
//   build/release/bench/allreduce [--ranks 2] [--json]
//
// The ranks are this program again. Engines take turns within a size, so that all of them meet the
// same state of the machine; ratios between rows of one run are results, absolute times are not.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/posix.h"
#include "launch/rank_command.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 5;
constexpr std::int64_t kSizes[] = {8, 1 << 10, 64 << 10, 1 << 20, 25 << 20};

struct Options {
  int ranks = 2;
  bool is_json = false;
};

int repeats_for(std::int64_t bytes) { return bytes < (1 << 20) ? 200 : 20; }

struct Measured {
  double p50_us = 0;
  double p99_us = 0;
  std::int64_t wrong = 0;
};

// The slowest rank's time counts for each repeat.
Measured measure(const lockstep::World& world, std::int64_t bytes) {
  std::vector<at::Tensor> tensors = {at::empty({bytes / 4}, at::kFloat)};
  const double expected = world.size() * (world.size() + 1) / 2.0;
  std::vector<double> times;
  Measured measured;
  for (int i = 0; i < kWarmUp + repeats_for(bytes); ++i) {
    tensors[0].fill_(world.rank() + 1);
    world.barrier();
    const auto start = Clock::now();
    world.backend()->allreduce(tensors)->wait();
    const std::chrono::duration<double, std::micro> took = Clock::now() - start;
    if (i >= kWarmUp) times.push_back(took.count());
    measured.wrong += tensors[0].ne(expected).sum().item<std::int64_t>();
  }
  const auto slowest = world.all_reduce(at::tensor(times, at::kDouble), lockstep::ReduceOp::MAX);
  const auto sorted = std::get<0>(slowest.sort());
  const std::int64_t last = sorted.numel() - 1;
  measured.p50_us = sorted[last / 2].item<double>();
  measured.p99_us = sorted[last * 99 / 100].item<double>();
  measured.wrong = world.all_reduce(at::tensor(measured.wrong, at::kLong)).item<std::int64_t>();
  return measured;
}

std::string cpu_name() {
  const std::string text = lockstep::read_small_file("/proc/cpuinfo");
  const std::size_t at = text.find("model name");
  if (at == std::string::npos) return "unknown";
  const std::size_t begin = text.find(": ", at) + 2;
  return text.substr(begin, text.find('\n', begin) - begin);
}

void print_heading(const Options& options) {
  if (options.is_json) return;
  fmt::print("# all_reduce, float, {} ranks. CPU: {}, {} cores. LibTorch {}, lockstep {}.\n",
             options.ranks, cpu_name(), std::thread::hardware_concurrency(), TORCH_VERSION,
             LOCKSTEP_VERSION);
  fmt::print("# Warm-up {}, repeats 200 (20 from 1 MiB); the slowest rank counts.\n", kWarmUp);
  fmt::print("#{:>7}{:>7}{:>12}{:>12}{:>12}{:>10}{:>8}\n", "engine", "ranks", "bytes", "p50", "p99",
             "algbw", "wrong");
  fmt::print("#{:>7}{:>7}{:>12}{:>12}{:>12}{:>10}{:>8}\n", "", "", "(B)", "(us)", "(us)", "(GB/s)",
             "");
}

void print_row(const Options& options, const std::string& engine, std::int64_t bytes,
               const Measured& measured) {
  const double bandwidth = static_cast<double>(bytes) / measured.p50_us / 1e3;
  if (options.is_json) {
    const nlohmann::json row = {{"bench", "allreduce"},
                                {"engine", engine},
                                {"ranks", options.ranks},
                                {"bytes", bytes},
                                {"dtype", "f32"},
                                {"p50_us", measured.p50_us},
                                {"p99_us", measured.p99_us},
                                {"algbw_gbs", bandwidth},
                                {"wrong", measured.wrong}};
    fmt::print("{}\n", row.dump());
  } else {
    fmt::print("{:>8}{:>7}{:>12}{:>12.1f}{:>12.1f}{:>10.2f}{:>8}\n", engine, options.ranks, bytes,
               measured.p50_us, measured.p99_us, bandwidth, measured.wrong);
  }
  std::fflush(stdout);
}

int be_rank(const Options& options) {
  at::set_num_threads(1);
  std::vector<lockstep::World> worlds;
  for (const lockstep::EngineInfo& info : lockstep::engines()) {
    if (!info.unavailable.empty() || (info.name == "solo") != (options.ranks == 1)) continue;
    worlds.push_back(lockstep::World::join({.engine = info.name}));
  }
  const bool is_speaker = worlds.front().rank() == 0;
  if (is_speaker) print_heading(options);
  std::int64_t wrong = 0;
  for (const std::int64_t bytes : kSizes) {
    for (const lockstep::World& world : worlds) {
      const Measured measured = measure(world, bytes);
      wrong += measured.wrong;
      if (is_speaker) print_row(options, world.backend()->getBackendName(), bytes, measured);
    }
  }
  if (is_speaker && !options.is_json) {
    fmt::print("# Wrong values: {} {}\n", wrong, wrong == 0 ? "OK" : "FAILED");
  }
  return wrong == 0 ? 0 : 1;
}

int start_ranks(const Options& options, std::vector<std::string> arguments) {
  const lockstep::Fd store = lockstep::make_memfd("lockstep-bench-store");
  arguments[0] = "/proc/self/exe";
  for (int rank = 0; rank < options.ranks; ++rank) {
    lockstep::Command command = lockstep::rank_command(arguments, rank, options.ranks, store.get());
    command.variables["OMP_NUM_THREADS"] = "1";
    command.variables["LOCKSTEP_LOG"] = "warning";
    lockstep::spawn(command);
  }
  int worst = 0;
  for (int status = 0; ::wait(&status) > 0;) {
    const auto exit_status = lockstep::ExitStatus::from_wait(status);
    if (!exit_status.is_ok()) {
      fmt::print(stderr, "bench: a rank {}\n", exit_status.text());
      worst = 1;
    }
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app("All-reduce over the engines of this build");
  app.add_option("--ranks", options.ranks, "How many ranks")->check(CLI::Range(1, 64));
  app.add_flag("--json", options.is_json, "One JSON object per row");
  CLI11_PARSE(app, argc, argv);
  return std::getenv("LOCKSTEP_STORE") != nullptr
             ? be_rank(options)
             : start_ranks(options, std::vector<std::string>(argv, argv + argc));
} catch (const std::exception& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 1;
}
