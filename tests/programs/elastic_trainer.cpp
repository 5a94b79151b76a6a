// A training that survives the loss of ranks, for tests and the benchmark of recovery.
//
//   elastic_trainer FOLDER MODEL STEPS [shard=none|optimizer|gradients] [log=FOLDER] [clip]
//                   [kill=SEAT:STEP:PHASE]... [exit=SEAT:STEP:CODE] [throw=SEAT:STEP] [sleep=MS]
//                   [trace=FILE] [slow=STEP:MS] [ballast=MB] [misfit] [late=SEAT:STEP:MS] [split]
//
// MODEL: mlp, cnn or gpt. Which samples of which logical rank were in which step is written to
// FOLDER. A rank kills itself where a fault says: in the forward, in the middle of a bucket, after
// the last one, in the optimizer, after it, in the commit, while ranks re-form, or while a newcomer
// is given the state (then the step is 0). A process that replaces another has no faults, unless
// SEAT ends with '+': then the first one has.
// slow: each gradient of that step takes so long, and is written down. ballast: more state. misfit:
// a replacement has another seed. late: that rank begins that step so much later. split: all ranks
// but rank 1 have a world of their own, and a collective there in each step.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <lockstep/lockstep.h>
#include <sys/stat.h>
#include <torch/nn.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "multiprocess/run_models.h"

namespace {

using namespace lockstep;  // NOLINT: a program

constexpr std::size_t kBatch = 2;

struct Numbers {  // a data set: each sample is its own number
  explicit Numbers(std::size_t count) : count_(count) {}
  std::size_t size() const { return count_; }
  std::int64_t get(std::size_t index) const { return static_cast<std::int64_t>(index); }

 private:
  std::size_t count_;
};

class Faults {
 public:
  explicit Faults(std::string folder) : folder_(std::move(folder)) {}
  // `kind` is "" for kills: "2:5:forward".
  void add(const std::string& kind, const std::string& text) {
    const std::size_t first = text.find(':');
    const std::size_t second = text.find(':', first + 1);
    std::string seat = text.substr(0, first);
    const bool is_of_newcomer = seat.back() == '+';
    if (is_of_newcomer) seat.pop_back();
    const char* const number = std::getenv("LOCKSTEP_SEAT");
    if (number == nullptr || seat != number) return;
    if (is_of_newcomer != (std::getenv("LOCKSTEP_NEWCOMER") != nullptr)) return;
    is_once_ = is_of_newcomer;
    all_[kind + (second == std::string::npos ? "" : text.substr(second + 1))] =
        std::stoll(text.substr(first + 1, second - first - 1));
  }
  // Kills while a newcomer is being filled, whose `first` changes then: it tells by a file.
  void watch_feed(const at::Tensor& first) const {
    const bool is_newcomer = std::getenv("LOCKSTEP_NEWCOMER") != nullptr;
    const bool is_victim = all_.contains("feed");
    const std::string file = folder_ + ".feeding";
    if (is_victim || is_newcomer) {
      std::thread([=, this, its = first, before = first.clone()] {
        const auto has_begun = [&] {
          return is_newcomer ? !its.equal(before) : ::access(file.c_str(), F_OK) == 0;
        };
        while (!has_begun()) ::usleep(200);
        if (is_newcomer) ::close(::open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        if (!is_victim) return;
        if (is_once_ && ::mkdir((folder_ + ".fault").c_str(), 0700) != 0) return;
        ::raise(SIGKILL);
      }).detach();
    }
  }
  void play(const std::string& phase, std::int64_t step) const {
    for (const auto& [what, when] : all_) {
      if (when != step) continue;
      if (what == phase) {
        if (is_once_ && ::mkdir((folder_ + ".fault").c_str(), 0700) != 0) continue;
        std::fflush(nullptr);
        ::raise(SIGKILL);
      }
      if (phase != "forward") continue;
      if (what == "throw") throw std::runtime_error("a fault of the script");
      if (what.starts_with("exit")) ::_exit(std::atoi(what.c_str() + 4));
    }
  }

 private:
  std::string folder_;
  bool is_once_ = false;
  std::map<std::string, std::int64_t> all_;
};

struct Options {
  std::string folder;
  std::string model;
  std::int64_t steps = 0;
  Shard shard = Shard::kNone;
  std::string log = {};
  std::string trace = {};
  bool clips = false;
  bool is_misfit = false;
  std::int64_t slow_step = -1;
  int slow_ms = 0;
  int ballast_mb = 0;
  std::int64_t late_step = -1;
  int late_ms = 0;
  bool is_split = false;
  int sleep_ms = 0;
  Faults faults;
};

Options parse(int argc, char** argv) {
  Options options{
      .folder = argv[1], .model = argv[2], .steps = std::atoll(argv[3]), .faults = Faults(argv[1])};
  for (int i = 4; i < argc; ++i) {
    const std::string text = argv[i];
    const std::string value = text.substr(text.find('=') + 1);
    if (text.starts_with("kill=")) options.faults.add("", value);
    if (text.starts_with("exit=")) options.faults.add("exit", value);
    if (text.starts_with("throw=")) options.faults.add("throw", value);
    if (text.starts_with("log=")) options.log = value;
    if (text.starts_with("trace=")) options.trace = value;
    if (text.starts_with("sleep=")) options.sleep_ms = std::atoi(value.c_str());
    if (text == "clip") options.clips = true;
    if (text == "misfit") options.is_misfit = std::getenv("LOCKSTEP_NEWCOMER") != nullptr;
    if (text.starts_with("ballast=")) options.ballast_mb = std::atoi(value.c_str());
    if (text == "split") options.is_split = true;
    const char* const seat = std::getenv("LOCKSTEP_SEAT");
    if (text.starts_with("late=") && seat != nullptr &&
        value.starts_with(std::string(seat) + ":")) {
      options.late_step = std::atoll(value.c_str() + value.find(':') + 1);
      options.late_ms = std::atoi(value.c_str() + value.rfind(':') + 1);
    }
    if (text.starts_with("slow=")) {
      options.slow_step = std::atoll(value.c_str());
      options.slow_ms = std::atoi(value.c_str() + value.find(':') + 1);
    }
    if (text == "shard=optimizer") options.shard = Shard::kOptimizer;
    if (text == "shard=gradients") options.shard = Shard::kGradients;
  }
  return options;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <typename Model, typename Optimizer>
int train(const Options& options, const World& world) {
  seed_all(options.is_misfit ? 8 : 7, world);
  Model model;
  DistributedDataParallel ddp(model, world,
                              {.bucket_bytes = 30'000,
                               .first_bucket_bytes = 5'000,
                               .shard = options.shard,
                               .shard_min_bytes = 0});
  Optimizer optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  optim::Schedule schedule(optimizer, optim::cosine(options.steps + 1));
  const auto per_step = kBatch * static_cast<std::size_t>(world.logical_size());
  // Some epochs, with an end that does not fall on the job's.
  const auto data = std::make_shared<Numbers>(per_step * 7);
  BasicLoader<std::vector<std::int64_t>> loader(
      data, DistributedSampler(data->size(), world),
      [](std::vector<std::int64_t> samples) { return samples; }, {.batch_size = kBatch});
  Checkpointer checkpoints(options.folder, world);
  double sum = 0;  // of the program's own
  std::int64_t tries = 0;
  checkpoints.add(model).add(optimizer).add(schedule).add(loader).add(ddp);
  std::int64_t step = 0;
  checkpoints.add(
      "sum", [&] { return text::format("{:a}", sum); },
      [&](const std::string& text) {
        options.faults.play("reform", step);
        sum = std::strtod(text.c_str(), nullptr);
      });
  const at::Tensor ballast = at::full({std::int64_t{options.ballast_mb} << 18},
                                      std::getenv("LOCKSTEP_NEWCOMER") != nullptr ? 0.0 : 1.0);
  if (ballast.numel() > 0) checkpoints.add({{"ballast", ballast}}, "ballast");
  if (ballast.numel() > 0) options.faults.watch_feed(ballast.narrow(0, 0, 1));  // it comes first
  Elastic elastic(checkpoints, checkpoints.load_latest().step);
  std::ofstream log;
  if (!options.log.empty()) {
    log.open(text::format("{}/samples.{}", options.log, ::getpid()), std::ios::app);
  }
  std::ofstream trace;
  if (!options.trace.empty()) trace.open(text::format("{}.{}", options.trace, ::getpid()));
  elastic.on_change([&](const ElasticChange& change) {
    if (trace) {
      trace << text::format("change {} {} {} {} {}\n", change.generation, change.size, change.step,
                            change.num_joined, now_ms())
            << std::flush;
    }
  });
  bool in_bucket = false;
  model->parameters().back().register_hook([&](const at::Tensor&) { return at::Tensor(); });
  model->parameters().front().register_hook([&](const at::Tensor& gradient) {
    if (in_bucket) options.faults.play("bucket", step);
    return gradient;
  });
  for (const at::Tensor& parameter : model->parameters()) {
    if (options.slow_step < 0) break;
    parameter.register_hook([&](const at::Tensor& gradient) {
      if (step == options.slow_step) {
        trace << "slow\n" << std::flush;
        ::usleep(static_cast<unsigned>(options.slow_ms) * 1000);
      }
      return gradient;
    });
  }
  std::optional<World> part;  // outside: when ranks change, it stays open for a while
  const bool is_complete = elastic.run([&] {
    step = elastic.steps();
    if (options.is_split) part = world.split(world.rank() == 1 ? std::nullopt : std::optional(0));
    while (step < options.steps) {
      for (const auto& batch : loader) {
        if (step == options.late_step && world.generation() == 0) {
          ::usleep(static_cast<unsigned>(options.late_ms) * 1000);
        }
        const Turn turn = ddp.play();
        options.faults.play("forward", step);
        if (part && turn.is_last) part->barrier();
        at::Tensor loss = at::zeros({});
        for (const std::int64_t sample : batch) {
          loss = loss + test::loss_of(model->forward(static_cast<int>(sample), 0));
        }
        if (log) {
          log << step << ' ' << turn.logical_rank;
          for (const std::int64_t sample : batch) log << ' ' << sample;
          log << std::endl;
        }
        in_bucket = turn.is_last;
        loss.backward();
        in_bucket = false;
        if (!turn.is_last) continue;
        options.faults.play("gradients", step);
        if (options.clips) optim::clip_grad_norm(model->parameters(), 1.0);
        options.faults.play("optimizer", step);
        optimizer.step();
        options.faults.play("stepped", step);
        optimizer.zero_grad();
        schedule.step();
        sum += loss.item<double>() * 0;  // the same on all ranks, whatever they play
        sum += 1;
        elastic.commit();
        step = elastic.steps();
        options.faults.play("commit", step - 1);
        if (trace) trace << text::format("step {} {}\n", step, now_ms()) << std::flush;
        if (options.sleep_ms > 0) {
          ::usleep(static_cast<unsigned>(options.sleep_ms) * 1000);
        }
        ++tries;
        if (step == options.steps) break;
      }
    }
  });
  if (!is_complete) {
    text::print("left\n");
    return 0;
  }
  std::uint64_t hash = 0;
  for (const auto& tensors : {model->parameters(), model->buffers()}) {
    for (const at::Tensor& one : tensors) {
      hash = hash_bytes(one.const_data_ptr(), one.nbytes(), hash);
    }
  }
  ddp.check_replicas();
  if (world.rank() == 0) {
    text::print("weights {:016x} after {} steps, sum {}, lr {:.6g}, {} ranks, generation {}\n",
                hash, elastic.steps(), sum, schedule.lr(), world.size(), world.generation());
    std::fflush(stdout);
  }
  return 0;
}

template <typename Model>
int train_with(const Options& options, const World& world) {
  return options.shard == Shard::kNone ? train<Model, optim::AdamW>(options, world)
                                       : train<Model, optim::Sharded<optim::AdamW>>(options, world);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) return 2;
  const Options options = parse(argc, argv);
  const World world = World::join();
  if (options.model == "cnn") return train_with<test::Cnn>(options, world);
  if (options.model == "gpt") return train_with<test::SmallGpt>(options, world);
  return train_with<test::Mlp>(options, world);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
