// Collectives on one host, engine against engine: time and bandwidth by size, wrong values counted.
//
//   build/release/bench/allreduce [--ranks 2,4,8] [--max-bytes N] [--only all_reduce] [--json]
//
// Peers: our c10d calls against Gloo's c10d calls; the torch-free engine against OpenMPI. The ranks
// are this program again, started by mpirun where there is one. Within a repeat all engines take
// turns, so that they meet the same state of the machine, and the slowest rank's time counts.
// Ratios between rows of one run are results; absolute times are not.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <lockstep/lockstep.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/text.h"
#include "peers/openmpi.h"
#include "ranks.h"
#include "shm/group.h"

namespace {

using namespace lockstep;  // NOLINT: a program
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kSizes[] = {8,       1 << 10,  16 << 10,  64 << 10,
                                   1 << 20, 25 << 20, 100 << 20, 512 << 20};
constexpr int kWarmUp = 3;
constexpr std::int64_t kLargeBytes = 1 << 20;
constexpr int kRunsInTurn = 20;
constexpr int kGlooRunsInTurn = 3;  // they take milliseconds

struct Options {
  std::vector<int> ranks = {2, 4};
  std::int64_t min_bytes = 0;
  std::int64_t max_bytes = 100 << 20;
  std::string only;
  bool is_json = false;
};

// Turns of each engine.
int repeats_for(std::int64_t bytes) {
  if (std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr) return 2;
  if (bytes <= kLargeBytes) return 41;
  return static_cast<int>(std::clamp<std::int64_t>((std::int64_t{640} << 20) / bytes, 3, 25));
}

// One way to do a collective: fill, run (timed), count wrong values.
struct Contestant {
  std::string engine;
  std::string mode;
  at::Tensor memory;  // input, and output where that is in place
  at::Tensor output;
  std::function<void()> run;
  int runs_in_turn = kRunsInTurn;
  std::vector<double> times = {};
  std::int64_t wrong = 0;
};

class Bench {
 public:
  Bench(const Options& options, bool has_mpi)
      : options_(options),
        has_mpi_(has_mpi),
        shm_(World::join({.engine = "shm"})),
        gloo_(World::join({.engine = "gloo"})) {
    int round = 0;
    const auto exchange = [&](const std::string& mine) {
      std::vector<std::string> all;
      const std::string prefix = text::format("bench/{}/", round++);
      shm_.store()->set(prefix + std::to_string(shm_.rank()), mine);
      for (int peer = 0; peer < shm_.size(); ++peer) {
        all.push_back(shm_.store()->get_to_str(prefix + std::to_string(peer)));
      }
      return all;
    };
    group_ = std::make_shared<shm::Group>(
        shm::GroupOptions{.rank = shm_.rank(), .size = shm_.size()}, exchange);
    bench::bind_to_core(shm_.rank(), shm_.size());
  }

  int run() {
    if (is_speaker()) print_heading();
    for (const std::int64_t bytes : kSizes) {
      if (bytes < options_.min_bytes || bytes > options_.max_bytes) continue;
      row_group("all_reduce", bytes, at::kFloat);
      row_group("all_reduce", bytes, at::kBFloat16);
    }
    for (const char* name : {"broadcast", "all_gather", "reduce_scatter"}) {
      for (const std::int64_t bytes : {1 << 10, 64 << 10, 1 << 20, 25 << 20}) {
        if (bytes >= options_.min_bytes && bytes <= options_.max_bytes) {
          row_group(name, bytes, at::kFloat);
        }
      }
    }
    row_group("barrier", 0, at::kFloat);
    if (is_speaker() && !options_.is_json) {
      text::print("# Wrong values: {} {}\n\n", wrong_, wrong_ == 0 ? "OK" : "FAILED");
    }
    return wrong_ == 0 ? 0 : 1;
  }

 private:
  int rank() const { return shm_.rank(); }
  int size() const { return shm_.size(); }
  bool is_speaker() const { return rank() == 0; }

  // The same number on all ranks.
  std::int64_t available_memory() const {
    const std::string text = read_small_file("/proc/meminfo");
    const std::size_t at = text.find("MemAvailable:");
    const std::int64_t mine =
        at == std::string::npos ? 0 : std::atoll(text.c_str() + at + 13) * std::int64_t{1024};
    return shm_.all_reduce(at::tensor(mine, at::kLong), ReduceOp::MIN).item<std::int64_t>();
  }

  // Everybody at the same point, by the quickest means.
  void line_up() { group_->wait(*group_->start(collective::Operation{})); }

  void row_group(const std::string& name, std::int64_t bytes, at::ScalarType type) {
    if (!options_.only.empty() && options_.only != name) return;
    // Three buffers a rank, and what the engines need themselves.
    const std::int64_t needed = 4 * bytes * size();
    if (needed > available_memory()) {
      if (is_speaker() && !options_.is_json) {
        text::print("# {} of {} bytes is left out: {} bytes of memory are needed.\n", name, bytes,
                    needed);
      }
      return;
    }
    std::vector<Contestant> contestants = make(name, bytes, type);
    for (int i = 0; i < kWarmUp + repeats_for(bytes); ++i) {
      for (Contestant& one : contestants) turn(name, bytes, one, i >= kWarmUp);
    }
    for (const Contestant& one : contestants) report(name, bytes, type, one);
  }

  // A turn of one engine. Small operations are repeated within it and their mean time counts: a
  // rank that has just been woken comes late to the first one, and reading the clock takes as long
  // as a good part of one.
  void turn(const std::string& name, std::int64_t bytes, Contestant& one, bool is_measured) {
    const auto timed_runs = [&](int num_runs) {
      const auto start = Clock::now();
      for (int i = 0; i < num_runs; ++i) one.run();
      const std::chrono::duration<double, std::micro> took = Clock::now() - start;
      if (is_measured) one.times.push_back(took.count() / num_runs);
    };
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // threads of the engine before rest
    fill(name, one);
    line_up();
    if (bytes > kLargeBytes) {
      timed_runs(1);
      one.wrong += count_wrong(name, one);
      return;
    }
    for (int i = 0; i < one.runs_in_turn; ++i) one.run();
    if (name == "all_reduce") fill(name, one);  // it adds up, and bf16 overflows
    line_up();
    timed_runs(one.runs_in_turn);
    fill(name, one);
    one.run();
    one.wrong += count_wrong(name, one);
  }

  std::vector<Contestant> make(const std::string& name, std::int64_t bytes, at::ScalarType type) {
    const std::int64_t count = bytes / static_cast<std::int64_t>(c10::elementSize(type));
    std::vector<Contestant> all;
    // One for all: every turn fills it anew.
    const at::Tensor staged = at::empty({count}, type);
    const auto add = [&](const char* engine, const char* mode, bool is_shared) -> Contestant& {
      Contestant one;
      one.engine = engine;
      one.mode = mode;
      one.memory = is_shared ? shm_.backend()->allocateTensor(count, type) : staged;
      if (std::string(engine) == "shm_engine" && is_shared) {
        std::byte* memory = group_->allocate(static_cast<std::size_t>(bytes));
        one.memory = at::from_blob(
            memory, {count}, [group = group_, memory](void*) { group->release(memory); }, type);
      }
      const bool has_output = name == "all_gather" || name == "reduce_scatter";
      if (has_output) one.output = at::empty({name == "all_gather" ? count : count / size()}, type);
      if (name == "all_gather") one.memory = one.memory.slice(0, 0, count / size());
      all.push_back(std::move(one));
      return all.back();
    };
    all.reserve(8);
    const bool has_zero_copy = name != "barrier";
    c10d_call(name, add("shm", "staged", false), shm_);
    if (has_zero_copy) c10d_call(name, add("shm", "zero_copy", true), shm_);
    raw_call(name, add("shm_engine", "staged", false));
    if (has_zero_copy) raw_call(name, add("shm_engine", "zero_copy", true));
    if (has_mpi_ && type == at::kFloat) mpi_call(name, add("openmpi", "staged", false));
    c10d_call(name, add("gloo", "staged", false), gloo_);
    all.back().runs_in_turn = kGlooRunsInTurn;
    return all;
  }

  static void c10d_call(const std::string& name, Contestant& one, const World& world) {
    const auto engine = world.backend();
    if (name == "all_reduce") {
      one.run = [engine, tensors = std::vector<at::Tensor>{one.memory}]() mutable {
        engine->allreduce(tensors)->wait();
      };
    } else if (name == "broadcast") {
      one.run = [engine, tensors = std::vector<at::Tensor>{one.memory}]() mutable {
        engine->broadcast(tensors)->wait();
      };
    } else if (name == "all_gather") {
      one.run = [engine, input = one.memory, output = one.output]() mutable {
        engine->_allgather_base(output, input)->wait();
      };
    } else if (name == "reduce_scatter") {
      one.run = [engine, input = one.memory, output = one.output]() mutable {
        engine->_reduce_scatter_base(output, input)->wait();
      };
    } else {
      one.run = [engine] { engine->barrier()->wait(); };
    }
  }

  void raw_call(const std::string& name, Contestant& one) {
    collective::Operation operation;
    operation.type = one.memory.scalar_type() == at::kFloat ? collective::DataType::kF32
                                                            : collective::DataType::kBF16;
    operation.count = static_cast<std::size_t>(one.memory.numel());
    operation.input.base = static_cast<std::byte*>(one.memory.data_ptr());
    if (name == "all_reduce") {
      operation.kind = collective::Kind::kAllReduce;
      operation.reduction = collective::Reduction::kSum;
      operation.output = operation.input;
    } else if (name == "broadcast") {
      operation.kind = collective::Kind::kBroadcast;
      if (rank() != 0) std::swap(operation.input, operation.output);
    } else if (name == "all_gather") {
      operation.kind = collective::Kind::kAllGather;
      operation.output = {.base = static_cast<std::byte*>(one.output.data_ptr()),
                          .stride = one.memory.nbytes()};
    } else if (name == "reduce_scatter") {
      operation.kind = collective::Kind::kReduceScatter;
      operation.reduction = collective::Reduction::kSum;
      operation.count = static_cast<std::size_t>(one.output.numel());
      operation.input.stride = one.output.nbytes();
      operation.output.base = static_cast<std::byte*>(one.output.data_ptr());
    } else {
      operation = {};
    }
    one.run = [this, operation] { group_->wait(*group_->start(operation)); };
  }

  static void mpi_call(const std::string& name, Contestant& one) {
    const at::Tensor memory = one.memory;
    const at::Tensor output = one.output;
    if (name == "all_reduce") {
      one.run = [=] { bench::mpi_all_reduce_f32(memory.data_ptr(), memory.numel()); };
    } else if (name == "broadcast") {
      one.run = [=] { bench::mpi_broadcast(memory.data_ptr(), memory.nbytes()); };
    } else if (name == "all_gather") {
      one.run = [=] {
        bench::mpi_all_gather(memory.data_ptr(), output.data_ptr(), memory.nbytes());
      };
    } else if (name == "reduce_scatter") {
      one.run = [=] {
        bench::mpi_reduce_scatter_f32(memory.data_ptr(), output.data_ptr(), output.numel());
      };
    } else {
      one.run = [] { bench::mpi_barrier(); };
    }
  }

  void fill(const std::string& name, Contestant& one) const {
    if (name != "barrier") one.memory.fill_(rank() + 1);
    if (one.output.defined()) one.output.zero_();
  }

  std::int64_t count_wrong(const std::string& name, const Contestant& one) const {
    const double sum = size() * (size() + 1) / 2.0;
    const auto differing = [](const at::Tensor& tensor, double expected) {
      return tensor.ne(expected).sum().item<std::int64_t>();
    };
    if (name == "all_reduce") return differing(one.memory, sum);
    if (name == "broadcast") return differing(one.memory, 1);
    if (name == "reduce_scatter") return differing(one.output, sum);
    std::int64_t wrong = 0;
    if (name == "all_gather") {
      for (int peer = 0; peer < size(); ++peer) {
        wrong += differing(
            one.output.slice(0, peer * one.memory.numel(), (peer + 1) * one.memory.numel()),
            peer + 1);
      }
    }
    return wrong;
  }

  void report(const std::string& name, std::int64_t bytes, at::ScalarType type,
              const Contestant& one) {
    const auto slowest = shm_.all_reduce(at::tensor(one.times, at::kDouble), ReduceOp::MAX);
    const auto sorted = std::get<0>(slowest.sort());
    const std::int64_t last = sorted.numel() - 1;
    const double p50 = sorted[last / 2].item<double>();
    const double p99 = sorted[last * 99 / 100].item<double>();
    const auto wrong = shm_.all_reduce(at::tensor(one.wrong, at::kLong)).item<std::int64_t>();
    wrong_ += wrong;
    if (!is_speaker()) return;
    const double bandwidth = static_cast<double>(bytes) / p50 / 1e3;
    const char* dtype = type == at::kFloat ? "f32" : "bf16";
    if (options_.is_json) {
      const nlohmann::json row = {
          {"bench", name},          {"engine", one.engine}, {"ranks", size()}, {"bytes", bytes},
          {"dtype", dtype},         {"mode", one.mode},     {"p50_us", p50},   {"p99_us", p99},
          {"algbw_gbs", bandwidth}, {"wrong", wrong}};
      text::print("{}\n", row.dump());
    } else {
      text::print(" {:<15}{:<12}{:<11}{:>6}{:>11}{:>6}{:>13.2f}{:>13.2f}{:>9.2f}{:>7}\n", name,
                  one.engine, one.mode, size(), bytes, dtype, p50, p99, bandwidth, wrong);
    }
    std::fflush(stdout);
  }

  void print_heading() const {
    if (options_.is_json) return;
    text::print(
        "# Collectives of {} ranks on one host. CPU: {}, {} cores. LibTorch {}, lockstep {}{}.\n",
        size(), bench::cpu_name(), std::thread::hardware_concurrency(), TORCH_VERSION,
        LOCKSTEP_VERSION, has_mpi_ ? ", " + bench::mpi_version() : "");
    text::print(
        "# Engines take turns, {} to warm up and then {} of {} runs ({} of Gloo's); above 1 MiB 3 "
        "to "
        "25 of one run. "
        "The slowest rank counts. {}\n",
        kWarmUp, repeats_for(8), kRunsInTurn, kGlooRunsInTurn,
        std::thread::hardware_concurrency() < static_cast<unsigned>(size())
            ? "More ranks than cores: no rank is bound."
            : "Each rank's main thread has a core of its own.");
    text::print("#{:<15}{:<12}{:<11}{:>6}{:>11}{:>6}{:>13}{:>13}{:>9}{:>7}\n", "bench", "engine",
                "mode", "ranks", "bytes", "dtype", "p50", "p99", "algbw", "wrong");
    text::print("#{:<15}{:<12}{:<11}{:>6}{:>11}{:>6}{:>13}{:>13}{:>9}{:>7}\n", "", "", "", "",
                "(B)", "", "(us)", "(us)", "(GB/s)", "");
  }

  Options options_;
  bool has_mpi_;
  World shm_;
  World gloo_;
  std::shared_ptr<shm::Group> group_;
  std::int64_t wrong_ = 0;
};

int be_rank(const Options& options) {
  at::set_num_threads(1);
  const bool has_mpi = bench::join_mpi();
  const int code = Bench(options, has_mpi).run();
  if (has_mpi) bench::leave_mpi();
  return code;
}

int start_ranks(int num_ranks, const std::vector<std::string>& arguments) {
  const std::map<std::string, std::string> variables = {{"OMP_NUM_THREADS", "1"},
                                                        {"LOCKSTEP_LOG", "warning"},
                                                        {"LOCKSTEP_BENCH_RANK", "1"},
                                                        {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                        {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
  if (std::system("command -v mpirun >/dev/null") == 0) {
    Command command;
    command.arguments = {"mpirun",          "-n",        std::to_string(num_ranks),
                         "--oversubscribe", "--bind-to", "none"};
    command.arguments.insert(command.arguments.end(), arguments.begin(), arguments.end());
    command.variables = variables;
    return bench::run_and_wait({command});
  }
  return bench::run_ranks(num_ranks, arguments, variables);
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app("Collectives on one host, engine against engine");
  app.add_option("--ranks", options.ranks, "How many ranks, one table for each")->delimiter(',');
  app.add_option("--min-bytes", options.min_bytes, "Leave out smaller sizes");
  app.add_option("--max-bytes", options.max_bytes, "Leave out larger sizes");
  app.add_option("--only", options.only,
                 "all_reduce, broadcast, all_gather, reduce_scatter, barrier");
  app.add_flag("--json", options.is_json, "One JSON object per row");
  CLI11_PARSE(app, argc, argv);
  if (std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr) {
    options.ranks = {2};
    options.max_bytes = 1 << 20;
  }
  if (std::getenv("LOCKSTEP_BENCH_RANK") != nullptr) return be_rank(options);
  std::vector<std::string> arguments(argv, argv + argc);
  arguments[0] = bench::this_program();
  int worst = 0;
  for (const int num_ranks : options.ranks) worst |= start_ranks(num_ranks, arguments);
  return worst;
} catch (const std::exception& error) {
  text::print(stderr, "{}\n", error.what());
  return 1;
}
