#include "training_run.h"

#include <ATen/Parallel.h>
#include <lockstep/ddp.h>
#include <lockstep/optim.h>
#include <lockstep/world.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "base/env.h"
#include "base/posix.h"
#include "base/text.h"
#include "models.h"
#include "peers/c10d_reducer.h"
#include "ranks.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

// An ordinary training loop, and what the peer puts around it.
class Training {
 public:
  explicit Training(const TrainingRun& run, int rank)
      : workload_(make_workload(run.model, rank)),
        parameters_(workload_.model->parameters()),
        optimizer_(parameters_, torch::optim::AdamWOptions(1e-4)) {  // and Python's defaults
    if (run.peer.starts_with("lockstep") || run.peer == "world_of_one") {
      world_ = World::join();
      DdpOptions options;
      if (run.peer == "lockstep_bf16") options.hook = bf16_hook();
      ddp_.emplace(workload_.model, *world_, options);
    } else if (run.peer == "barrier") {
      world_ = World::join();
      has_barrier_ = true;
    } else if (run.peer == "c10d_reducer" || run.peer == "c10d_reducer_view") {
      world_ = World::join({.engine = "gloo"});
      reducer_.emplace(*world_, parameters_, run.peer == "c10d_reducer_view");
    }
  }

  void step() {
    workload_.model->zero_grad();
    if (reducer_) reducer_->before_forward();
    const auto loss = workload_.loss();
    if (reducer_) reducer_->before_backward();
    loss.backward();
    optimizer_.step();
    if (has_barrier_) world_->barrier();
  }

  std::int64_t count_parameters() const {
    std::int64_t sum = 0;
    for (const at::Tensor& parameter : parameters_) sum += parameter.numel();
    return sum;
  }

  // Elements that differ from rank 0's. Bits are compared: a NaN equals itself, 0 differs from -0.
  std::int64_t count_wrong() const {
    if (!ddp_ && !reducer_) return 0;
    std::int64_t wrong = 0;
    for (const at::Tensor& parameter : parameters_) {
      const auto mine = parameter.detach();
      const auto rank0s = world_->broadcast(mine.clone());
      wrong += mine.view(at::kInt).ne(rank0s.view(at::kInt)).sum().item<std::int64_t>();
    }
    return wrong;
  }

 private:
  Workload workload_;
  std::vector<at::Tensor> parameters_;
  optim::AdamW optimizer_;
  std::optional<World> world_;
  bool has_barrier_ = false;
  std::optional<DistributedDataParallel> ddp_;
  std::optional<C10dReducer> reducer_;
};

// A size in kB that the kernel states in a file of this process, as MB; 0 if it does not.
double stated_mb(const std::string& file, const std::string& name) {
  std::istringstream lines(read_small_file("/proc/self/" + file));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) / 1024;
  }
  return 0;
}

// The most memory that this process has had. Segments of shared memory, which all ranks see and
// which stay as they are from the start, count by this process's share.
double peak_mb() {
  return stated_mb("status", "VmHWM") - stated_mb("status", "RssShmem") +
         stated_mb("smaps_rollup", "Pss_Shmem");
}

double percentile(std::vector<double>& values, int percent) {
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(values.size()) * percent / 100;
  std::ranges::nth_element(values, nth);
  return *nth;
}

Measurement train(const TrainingRun& run, int rank, int size) {
  Training training(run, rank);
  bind_to_core(rank, size);
  for (int i = 0; i < run.warm_up; ++i) training.step();
  std::vector<double> times;
  const double sent_before = sent_mb();
  auto last = Clock::now();
  for (int i = 0; i < run.steps; ++i) {
    training.step();
    const auto now = Clock::now();
    times.push_back(std::chrono::duration<double, std::milli>(now - last).count());
    last = now;
  }
  Measurement result;
  result.wire_mb = (sent_mb() - sent_before) / run.steps;
  result.peak_mb = peak_mb();
  result.mean_ms = std::accumulate(times.begin(), times.end(), 0.0) / run.steps;
  result.ms_per_step = percentile(times, 50);
  result.quiet_ms = percentile(times, 2);
  result.parameters = training.count_parameters();
  result.wrong = training.count_wrong();
  return result;
}

std::vector<std::string> run_python(const TrainingRun& run, int num_ranks,
                                    const std::string& python, int& failed) {
  const Fd store = make_memfd("lockstep-bench-store");
  std::vector<Command> commands;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Command command;
    command.arguments = python_rank(run, python);
    command.arguments.insert(command.arguments.end(),
                             {"--store", text::format("/proc/{}/fd/{}", ::getpid(), store.get())});
    command.variables = {{"OMP_NUM_THREADS", "1"},
                         {"GLOO_SOCKET_IFNAME", "lo"},
                         {"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(num_ranks)}};
    commands.push_back(command);
  }
  std::vector<std::string> outputs;
  failed = run_and_wait(std::move(commands), &outputs);
  return outputs;
}

}  // namespace

void be_rank(const TrainingRun& run) {
  at::set_num_threads(1);
  const auto environment = Environment::of_process();
  const auto result = train(run, environment.get_int("RANK").value_or(0),
                            environment.get_int("WORLD_SIZE", 1).value_or(1));
  text::print("{}\n", nlohmann::json(result).dump());
}

Measurement measure(const TrainingRun& run, const std::string& python) {
  const auto* const peer =
      std::ranges::find_if(kPeers, [&](const Peer& one) { return run.peer == one.name; });
  if (peer == std::end(kPeers)) {
    throw std::runtime_error(text::format("there is no peer '{}'", run.peer));
  }
  int failed = 0;
  std::vector<std::string> outputs;
  if (run.peer.starts_with("python_")) {
    outputs = run_python(run, peer->ranks, python, failed);
  } else {
    failed = run_ranks(
        peer->ranks,
        {this_program(), "--model", run.model, "--peer", run.peer, "--warm-up",
         std::to_string(run.warm_up), "--steps", std::to_string(run.steps)},
        {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_LOG", "warning"}, {"LOCKSTEP_BENCH_RANK", "1"}},
        &outputs);
  }
  if (failed != 0) {
    throw std::runtime_error(text::format("the run of {} on {} failed", run.peer, run.model));
  }
  std::vector<Measurement> ranks;
  for (const std::string& output : outputs) ranks.push_back(nlohmann::json::parse(output));
  return put_together(ranks);
}

double sent_mb() {
  const std::string bytes = read_small_file("/sys/class/net/cable/statistics/tx_bytes");
  return bytes.empty() ? 0 : std::stod(bytes) / 1e6;
}

std::string python_program() {
  const char* const given = std::getenv("LOCKSTEP_PYTHON");
  return given != nullptr ? given : LOCKSTEP_BENCH_DIR "/../build/venv/bin/python3";
}

std::vector<std::string> python_rank(const TrainingRun& run, const std::string& python) {
  std::vector<std::string> arguments = {
      python,      LOCKSTEP_BENCH_DIR "/peers/ddp.py", "--model", run.model,
      "--warm-up", std::to_string(run.warm_up),        "--steps", std::to_string(run.steps)};
  if (run.peer == "python_ddp_view") arguments.push_back("--bucket-view");
  return arguments;
}

Measurement put_together(const std::vector<Measurement>& ranks) {
  Measurement all;
  for (const Measurement& one : ranks) {
    all.ms_per_step = std::max(all.ms_per_step, one.ms_per_step);
    all.quiet_ms = std::max(all.quiet_ms, one.quiet_ms);
    all.mean_ms = std::max(all.mean_ms, one.mean_ms);
    all.peak_mb = std::max(all.peak_mb, one.peak_mb);
    all.wire_mb = std::max(all.wire_mb, one.wire_mb);
    all.parameters = one.parameters;
    all.wrong += one.wrong;
  }
  return all;
}

}  // namespace lockstep::bench
