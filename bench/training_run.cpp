#include "training_run.h"

#include <ATen/Parallel.h>
#include <lockstep/ddp.h>
#include <lockstep/optim.h>
#include <lockstep/sharded.h>
#include <lockstep/world.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "base/env.h"
#include "base/hash.h"
#include "base/posix.h"
#include "base/text.h"
#include "collective/leaves.h"
#include "memory_watch.h"
#include "models.h"
#include "peers/bare.h"
#include "peers/c10d_reducer.h"
#include "ranks.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLearningRate = 1e-4;  // the optimizer's other options are Python's defaults, too

// An ordinary training loop, and what the peer puts around it.
class Training {
 public:
  // `batches`: those of a step.
  Training(const TrainingRun& run, const collective::Leaves& batches)
      : workloads_(make_workloads(run.model, batches)),
        parameters_(workloads_.front().model->parameters()),
        optimizer_(std::make_unique<optim::AdamW>(parameters_,
                                                  torch::optim::AdamWOptions(kLearningRate))) {
    if (run.peer.starts_with("lockstep") || run.peer == "world_of_one") {
      world_ = World::join({.logical_ranks = run.logical_ranks});
      DdpOptions options;
      if (run.peer == "lockstep_bf16") options.hook = bf16_hook();
      if (run.peer == "lockstep_in_backward") options.optimizer = optimizer_.get();
      if (run.peer == "lockstep_optimizer") options.shard = Shard::kOptimizer;
      if (run.peer == "lockstep_gradients") options.shard = Shard::kGradients;
      ddp_.emplace(workloads_.front().model, *world_, options);
      if (run.micro_batches > 1) ddp_->accumulate(run.micro_batches);
      if (options.shard != Shard::kNone) {
        optimizer_ = std::make_unique<optim::Sharded<optim::AdamW>>(
            parameters_, torch::optim::AdamWOptions(kLearningRate));
      }
    } else if (run.peer == "barrier" || run.peer == "bare") {
      world_ = World::join();
      has_barrier_ = true;
      if (run.peer == "bare") make_bare(*world_, parameters_);
    } else if (run.peer == "c10d_reducer" || run.peer == "c10d_reducer_view") {
      world_ = World::join({.engine = "gloo"});
      reducer_.emplace(*world_, parameters_, run.peer == "c10d_reducer_view");
    }
  }

  void step() {
    workloads_.front().model->zero_grad();
    for (const Workload& workload : workloads_) {
      if (world_ && world_->has_logical_ranks()) ddp_->play();
      if (reducer_) reducer_->before_forward();
      const auto loss = workload.loss();
      if (reducer_) reducer_->before_backward();
      loss.backward();
    }
    optimizer_->step();  // of lockstep_in_backward and bare: nothing is left to do
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

  std::uint64_t hash() const {
    std::uint64_t hash = 0;
    for (const at::Tensor& parameter : parameters_) {
      const at::Tensor dense = parameter.detach().contiguous();
      hash = hash_bytes(dense.const_data_ptr(), dense.nbytes(), hash);
    }
    return hash;
  }

 private:
  // One for each batch, all with the first one's model.
  static std::vector<Workload> make_workloads(const std::string& model,
                                              const collective::Leaves& batches) {
    std::vector<Workload> workloads;
    for (int batch = batches.first; batch < batches.end(); ++batch) {
      workloads.push_back(make_workload(model, batch));
      workloads.back().model = workloads.front().model;
    }
    return workloads;
  }

  std::vector<Workload> workloads_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<World> world_;
  bool has_barrier_ = false;
  std::optional<DistributedDataParallel> ddp_;
  std::optional<C10dReducer> reducer_;
};

// The most memory that this process has had. Segments of shared memory, which all ranks see and
// which stay as they are from the start, count by this process's share.
double peak_mb() {
  const std::string status = read_small_file("/proc/self/status");
  const double bytes = stated_bytes(status, "VmHWM") - stated_bytes(status, "RssShmem") +
                       stated_bytes(read_small_file("/proc/self/smaps_rollup"), "Pss_Shmem");
  return bytes / (1 << 20);
}

double percentile(std::vector<double>& values, int percent) {
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(values.size()) * percent / 100;
  std::ranges::nth_element(values, nth);
  return *nth;
}

Measurement train(const TrainingRun& run, int rank, int size) {
  const collective::Leaves plain{.first = rank * run.micro_batches, .count = run.micro_batches};
  Training training(
      run, run.logical_ranks > 0 ? collective::leaves_of(rank, size, run.logical_ranks) : plain);
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
  tell_watch();
  for (int i = 0; i < run.watched_steps; ++i) training.step();
  leave_watch();
  result.peak_mb = peak_mb();
  result.mean_ms = std::accumulate(times.begin(), times.end(), 0.0) / run.steps;
  result.ms_per_step = percentile(times, 50);
  result.quiet_ms = percentile(times, 2);
  result.parameters = training.count_parameters();
  result.wrong = training.count_wrong();
  result.hash = training.hash();
  return result;
}

using Variables = std::map<std::string, std::string>;

int run_python(const TrainingRun& run, const std::string& python, const Variables& variables,
               std::vector<std::string>* outputs, const OnStarted& on_started) {
  const Fd store = make_memfd("lockstep-bench-store");
  std::vector<Command> commands;
  for (int rank = 0; rank < run.ranks; ++rank) {
    Command command;
    command.arguments = python_rank(run, python);
    command.arguments.insert(command.arguments.end(),
                             {"--store", text::format("/proc/{}/fd/{}", ::getpid(), store.get())});
    command.variables = {{"OMP_NUM_THREADS", "1"},
                         {"GLOO_SOCKET_IFNAME", "lo"},
                         {"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(run.ranks)}};
    command.variables.insert(variables.begin(), variables.end());
    commands.push_back(command);
  }
  return run_and_wait(std::move(commands), outputs, on_started);
}

int run_ourselves(const TrainingRun& run, Variables variables, std::vector<std::string>* outputs,
                  const OnStarted& on_started) {
  std::vector<std::string> arguments = {this_program(),
                                        "--model",
                                        run.model,
                                        "--peer",
                                        run.peer,
                                        "--warm-up",
                                        std::to_string(run.warm_up),
                                        "--steps",
                                        std::to_string(run.steps)};
  if (run.watched_steps > 0) {
    arguments.insert(arguments.end(), {"--watched-steps", std::to_string(run.watched_steps)});
  }
  if (run.micro_batches > 1) {
    arguments.insert(arguments.end(), {"--micro-batches", std::to_string(run.micro_batches)});
  }
  if (run.logical_ranks > 0) {
    arguments.insert(arguments.end(), {"--logical-ranks", std::to_string(run.logical_ranks)});
  }
  variables.insert(
      {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_LOG", "warning"}, {"LOCKSTEP_BENCH_RANK", "1"}});
  return run_ranks(run.ranks, arguments, variables, outputs, on_started);
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
  MemoryWatch watch;
  Variables variables;
  OnStarted on_started;
  if (run.watched_steps > 0) {
    variables = watch.variables();
    on_started = [&](const std::vector<pid_t>& started) { watch.start(started); };
  }
  std::vector<std::string> outputs;
  const int failed = run.peer.starts_with("python_")
                         ? run_python(run, python, variables, &outputs, on_started)
                         : run_ourselves(run, variables, &outputs, on_started);
  watch.stop();
  if (failed != 0) {
    throw std::runtime_error(text::format("the run of {} on {} failed", run.peer, run.model));
  }
  std::vector<Measurement> ranks;
  for (const std::string& output : outputs) ranks.push_back(nlohmann::json::parse(output));
  Measurement result = put_together(ranks);
  result.pss_bytes = watch.pss_bytes();
  result.sampled_pss_bytes = watch.sampled_pss_bytes();
  result.page_table_bytes = watch.page_table_bytes();
  if (run.watched_steps > 0 && result.pss_bytes == 0) {
    throw std::runtime_error(text::format(
        "the watched steps of {} on {} were too short to see its memory", run.peer, run.model));
  }
  return result;
}

std::int64_t count_wrong(const std::string& peer, const std::vector<Measurement>& rounds,
                         const std::vector<Measurement>& expected) {
  const bool is_compared =
      peer == "lockstep_optimizer" || peer == "lockstep_gradients" || peer == "lockstep_logical";
  std::int64_t wrong = 0;
  for (const Measurement& one : rounds) {
    const bool differs = !expected.empty() && one.hash != expected.front().hash;
    wrong += is_compared && differs ? one.parameters : one.wrong;
  }
  return wrong;
}

double median(const std::vector<Measurement>& rounds, double Measurement::*member) {
  std::vector<double> values;
  for (const Measurement& one : rounds) values.push_back(one.*member);
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
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
  if (run.watched_steps > 0) {
    arguments.insert(arguments.end(), {"--watched-steps", std::to_string(run.watched_steps)});
  }
  if (run.peer == "python_ddp_view" || run.peer == "python_zero") {
    arguments.push_back("--bucket-view");
  }
  if (run.peer == "python_zero") arguments.push_back("--zero");
  if (run.peer == "python_bare") arguments.push_back("--bare");
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
  all.hash = ranks.front().hash;
  return all;
}

}  // namespace lockstep::bench
