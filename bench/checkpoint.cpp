// Checkpoints: the speed of the disk against that of dd and cat, and what saving costs training.
//
//   build/release/bench/checkpoint [--json] [FOLDER]
//
// A model of 1 GB is saved and loaded in FOLDER (the current one), in turns with dd (with fsync)
// and cat of the same bytes; medians over rounds. Reading is measured after the kernel has
// forgotten the files, where it may be told to (root), and from its cache. Then 2 ranks train the
// GPT, and save it in the background: what a step waits for that.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <lockstep/checkpoint.h>
#include <lockstep/optim.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/posix.h"
#include "base/text.h"
#include "memory_watch.h"
#include "models.h"
#include "ranks.h"

namespace {

using namespace lockstep;  // NOLINT: a program
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

const bool is_quick = std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr;

double seconds_of(const std::function<void()>& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

double memory_mb(const std::string& name) {
  return bench::stated_bytes(read_small_file("/proc/self/status"), name) / (1 << 20);
}

bool forget_files() {
  ::sync();
  std::ofstream file("/proc/sys/vm/drop_caches");
  file << 3 << std::flush;
  return file.good();
}

nlohmann::json measure_disk(const std::string& folder) {
  const World world = World::join();
  std::vector<NamedTensor> tensors;
  const int count = is_quick ? 1 : 32;
  for (int i = 0; i < count; ++i) {
    tensors.push_back({text::format("layer{}.weight", i), at::randn({1 << 23})});  // 32 MiB each
  }
  Checkpointer checkpoints(folder + "/c", world, {.keep_last = 1});
  checkpoints.add(tensors);
  std::vector<double> save, dd, load, cat, load_cached, cat_cached;
  double extra_mb = 0;
  bool is_cold = true;
  for (int round = 0; round < (is_quick ? 1 : 5); ++round) {
    std::ofstream("/proc/self/clear_refs") << 5 << std::flush;  // the peak begins anew
    const double before = memory_mb("VmRSS");
    save.push_back(seconds_of([&] { checkpoints.save(round); }));
    extra_mb = std::max(extra_mb, memory_mb("VmHWM") - before);
    const std::string path = text::format("{}/c/{}-step-{}", folder, round, round);
    const std::string file = path + "/tensors-0-of-1.safetensors";
    const std::string copy = folder + "/copy";
    dd.push_back(seconds_of(
        [&] { run(text::format("dd if={} of={} bs=1M conv=fsync 2>/dev/null", file, copy)); }));
    fs::remove(copy);
    is_cold = forget_files();
    cat.push_back(seconds_of([&] { run(text::format("cat {} >/dev/null", file)); }));
    cat_cached.push_back(seconds_of([&] { run(text::format("cat {} >/dev/null", file)); }));
    forget_files();
    load.push_back(seconds_of([&] { checkpoints.load(path); }));
    load_cached.push_back(seconds_of([&] { checkpoints.load(path); }));
  }
  return {{"bench", "checkpoint"},
          {"what", "disk"},
          {"mb", count * 33.554432},
          {"save_s", median(save)},
          {"dd_s", median(dd)},
          {"save_vs_dd", median(dd) / median(save)},
          {"is_cold", is_cold},
          {"load_s", median(load)},
          {"cat_s", median(cat)},
          {"load_vs_cat", median(cat) / median(load)},
          {"load_cached_s", median(load_cached)},
          {"cat_cached_s", median(cat_cached)},
          {"extra_mb", extra_mb}};
}

// A rank that trains: prints the median times of a step, of a step while the last checkpoint is
// still being written, and of the call that saves.
void be_rank(const std::string& folder) {
  const World world = World::join();
  at::set_num_threads(1);
  bench::bind_to_core(world.rank(), world.size());
  auto workload = bench::make_workload(is_quick ? "mlp" : "gpt", world.rank());
  DistributedDataParallel ddp(workload.model, world);
  optim::AdamW optimizer(workload.model->parameters(), torch::optim::AdamWOptions(1e-4));
  Checkpointer checkpoints(folder + "/t", world, {.keep_last = 1});
  checkpoints.add(workload.model).add(optimizer).add(ddp);
  const auto step = [&] {
    optimizer.zero_grad();
    workload.loss().backward();
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) step();
  checkpoints.save_async(0);  // memory for copies is made
  checkpoints.wait();
  std::vector<double> steps, calls;
  for (int round = 1; round <= (is_quick ? 2 : 15); ++round) {
    world.barrier();
    steps.push_back(seconds_of(step));
    world.barrier();
    calls.push_back(seconds_of([&] { checkpoints.save_async(round); }));
    step();
    checkpoints.wait();
  }
  text::print("{} {}\n", median(steps) * 1000, median(calls) * 1000);
}

nlohmann::json measure_training(const std::string& folder) {
  std::vector<std::string> outputs;
  if (bench::run_ranks(2, {bench::this_program(), "--rank", folder}, {}, &outputs) != 0) {
    std::exit(1);
  }
  double step = 0;
  double call = 0;
  for (const std::string& output : outputs) {
    double values[2] = {};
    if (std::sscanf(output.c_str(), "%lf %lf", &values[0], &values[1]) != 2) std::exit(1);
    step = std::max(step, values[0]);
    call = std::max(call, values[1]);
  }
  return {{"bench", "checkpoint"},
          {"what", "training"},
          {"step_ms", step},
          {"save_async_ms", call},
          {"percent", 100 * call / step}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--rank") == 0) {
    be_rank(argv[2]);
    return 0;
  }
  const bool is_json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  const std::string parent = argc > (is_json ? 2 : 1) ? argv[is_json ? 2 : 1] : ".";
  std::string folder = parent + "/lockstep-bench-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) {
    text::print(stderr, "checkpoint: cannot write to {}\n", parent);
    return 1;
  }
  const auto disk = measure_disk(folder);
  const auto training = measure_training(folder);
  fs::remove_all(folder);
  if (is_json) {
    text::print("{}\n{}\n", disk.dump(), training.dump());
    return 0;
  }
  const auto value = [&](const char* name) { return disk.at(name).get<double>(); };
  text::print("# {:.0f} MB, checksums included; medians, seconds\n", value("mb"));
  text::print("#{:<28}{:>10}{:>10}{:>10}\n", "", "lockstep", "peer", "ratio");
  text::print(" {:<28}{:>10.3f}{:>10.3f}{:>10.2f}\n", "save, dd conv=fsync", value("save_s"),
              value("dd_s"), value("save_vs_dd"));
  text::print(" {:<28}{:>10.3f}{:>10.3f}{:>10.2f}\n",
              disk.at("is_cold").get<bool>() ? "load, cat, from the disk" : "load, cat",
              value("load_s"), value("cat_s"), value("load_vs_cat"));
  text::print(" {:<28}{:>10.3f}{:>10.3f}{:>10.2f}\n", "load, cat, from the cache",
              value("load_cached_s"), value("cat_cached_s"),
              value("cat_cached_s") / value("load_cached_s"));
  text::print("# Memory beyond the model while saving: {:.1f} MB.\n", value("extra_mb"));
  text::print("# save_async of the GPT on 2 ranks: {:.1f} ms of a step of {:.0f} ms, {:.1f} %.\n",
              training.at("save_async_ms").get<double>(), training.at("step_ms").get<double>(),
              training.at("percent").get<double>());
}
