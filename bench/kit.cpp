// What surrounds training: optimizers against LibTorch's own, samplers, the loader and metrics.
//
//   build/release/bench/kit [--json]
//
// The CNN is trained on Fashion-MNIST by 2 ranks with a core each, which its loader's thread
// shares: how long a step waits for its batch, and what a progress bar and a line of JSON cost.
// Optimizers take turns on the parameters of the benchmark's models (models.h), one thread; the
// median step counts. Ratios between rows of one run are results; absolute times are not.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <lockstep/data.h>
#include <lockstep/ddp.h>
#include <lockstep/metrics.h>
#include <lockstep/optim.h>
#include <lockstep/sampler.h>
#include <torch/nn/utils/clip_grad.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/text.h"
#include "models.h"
#include "ranks.h"

namespace {

using namespace lockstep;  // NOLINT: a program
using Clock = std::chrono::steady_clock;

bool is_json = false;
const bool is_quick = std::getenv("LOCKSTEP_BENCH_QUICK") != nullptr;

double time_ms(const std::function<void()>& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

// Both do the same to parameters of their own, in turns.
void compare(const std::string& what, const std::string& model, int rounds,
             const std::function<void()>& ours, const std::function<void()>& theirs) {
  std::vector<double> our_times, their_times;
  for (int round = 0; round < rounds + 2; ++round) {
    const double mine = time_ms(ours);
    const double other = time_ms(theirs);
    if (round < 2) continue;  // state is made, memory is faulted in
    our_times.push_back(mine);
    their_times.push_back(other);
  }
  const double mine = median(our_times);
  const double other = median(their_times);
  if (is_json) {
    text::print("{}\n", nlohmann::json({{"bench", "kit"},
                                        {"what", what},
                                        {"model", model},
                                        {"lockstep_ms", mine},
                                        {"libtorch_ms", other},
                                        {"faster", other / mine}})
                            .dump());
  } else {
    text::print(" {:<16}{:<7}{:>14.3f}{:>14.3f}{:>10.2f}\n", what, model, mine, other,
                other / mine);
  }
  std::fflush(stdout);
}

std::vector<at::Tensor> make_parameters(const std::string& model) {
  auto parameters = bench::make_workload(model, 0).model->parameters();
  for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::randn_like(parameter);
  return parameters;
}

template <typename Ours, typename Theirs, typename Options>
void compare_optimizers(const std::string& what, const std::string& model, int rounds,
                        const Options& options) {
  Ours ours(make_parameters(model), options);
  Theirs theirs(make_parameters(model), options);
  compare(
      what, model, rounds, [&] { ours.step(); }, [&] { theirs.step(); });
}

void draw_samples() {
  for (const std::size_t size : {std::size_t{60'000}, std::size_t{1'000'000'000}}) {
    DistributedSampler sampler(size, 0, 2);
    std::size_t sum = 0;
    std::size_t count = 0;
    const double ms = time_ms([&] {
      while (count < (is_quick ? 100'000U : 20'000'000U)) {
        const auto batch = sampler.next(64);
        if (!batch) {
          sampler.reset();
          continue;
        }
        count += batch->size();
        sum += batch->front();
      }
    });
    const double rate = static_cast<double>(count) / ms / 1000;
    if (is_json) {
      text::print("{}\n", nlohmann::json({{"bench", "kit"},
                                          {"what", "sampler"},
                                          {"samples", size},
                                          {"million_indices_per_second", rate},
                                          {"sum", sum}})
                              .dump());
    } else {
      text::print("# A sampler over {} samples draws {:.1f} million indices a second.\n", size,
                  rate);
    }
  }
}

// Shifted by up to 2 pixels and mirrored, otherwise in each epoch.
class AugmentedImages : public AugmentedDataset {
 public:
  explicit AugmentedImages(std::shared_ptr<const FashionMnist> images)
      : images_(std::move(images)) {}
  std::size_t size() const override { return images_->size(); }
  Sample get(std::size_t index, const Epoch& epoch) const override {
    const Sample sample = images_->get(index);
    const std::uint64_t random = epoch.seed_of(index);
    const at::Tensor image = at::constant_pad_nd(sample.data, {2, 2, 2, 2}, -0.81)
                                 .narrow(1, static_cast<std::int64_t>(random % 5), 28)
                                 .narrow(2, static_cast<std::int64_t>(random / 5 % 5), 28);
    return {random >> 63 != 0 ? image.flip({2}) : image, sample.target};
  }

 private:
  std::shared_ptr<const FashionMnist> images_;
};

// A rank that trains: prints the median times of a step and of what is in it.
void be_rank(bool is_augmented) {
  World world = World::join();
  at::set_num_threads(1);
  bench::bind_to_core(world.rank(), world.size());
  const auto images = std::make_shared<const FashionMnist>(true);
  std::shared_ptr<const Dataset> data = images;
  if (is_augmented) data = std::make_shared<AugmentedImages>(images);
  Loader loader(data, DistributedSampler(data->size(), world), {.batch_size = 64});
  auto workload = bench::make_workload("cnn", 0);
  DistributedDataParallel ddp(workload.model, world);
  optim::AdamW optimizer(workload.model->parameters(), torch::optim::AdamWOptions(1e-3));
  const int steps = is_quick ? 3 : 200;
  const std::string log = text::format("{}/lockstep-bench-{}.jsonl",
                                       std::filesystem::temp_directory_path().string(), ::getpid());
  {
    ProgressBar bar(steps, world);
    JsonLines lines(log, world);
    StepClock clock(world.size());
    std::vector<double> all_ms, waiting_ms, metrics_ms;
    for (int step = 1; step <= steps; ++step) {
      double metrics = 0;
      const double waited = step == 1 ? 0 : loader.waiting_ms();
      all_ms.push_back(time_ms([&] {
        const auto batch = loader.next();
        workload.input = batch->data;
        workload.target = batch->target;
        optimizer.zero_grad();
        const at::Tensor loss = workload.loss();
        loss.backward();
        optimizer.step();
        metrics = time_ms([&] {
          clock.step(64);
          bar.update(step, loss.item<double>(), clock.samples_per_second());
          lines.write(step, {{"loss", loss.item<double>()}, {"rate", clock.samples_per_second()}});
        });
      }));
      waiting_ms.push_back(loader.waiting_ms() - waited);
      metrics_ms.push_back(metrics);
    }
    // Of all steps together: rare long waits count.
    const auto percent = [&](const std::vector<double>& part) {
      return 100 * std::accumulate(part.begin(), part.end(), 0.0) /
             std::accumulate(all_ms.begin(), all_ms.end(), 0.0);
    };
    text::print("{} {} {}\n", median(all_ms), percent(waiting_ms), percent(metrics_ms));
  }
  std::filesystem::remove(log);
}

void train(bool is_augmented) {
  std::vector<std::string> outputs;
  if (bench::run_ranks(2, {bench::this_program(), "--rank", is_augmented ? "augmented" : "plain"},
                       {{"LOCKSTEP_TERMINAL", "80"}}, &outputs) != 0) {
    std::exit(1);
  }
  double step = 0, waiting = 0, metrics = 0;  // of the slower rank
  for (const std::string& output : outputs) {
    double values[3] = {};
    if (std::sscanf(output.c_str(), "%lf %lf %lf", &values[0], &values[1], &values[2]) != 3) {
      std::exit(1);
    }
    step = std::max(step, values[0]);
    waiting = std::max(waiting, values[1]);
    metrics = std::max(metrics, values[2]);
  }
  if (is_json) {
    text::print("{}\n", nlohmann::json({{"bench", "kit"},
                                        {"what", is_augmented ? "augmented training" : "training"},
                                        {"step_ms", step},
                                        {"waiting_percent", waiting},
                                        {"metrics_percent", metrics}})
                            .dump());
  } else {
    text::print(
        "# The CNN on 2 ranks, {} images, {:.1f} ms a step: waits {:.3f} % of it for batches; bar "
        "and JSON lines cost {:.3f} %.\n",
        is_augmented ? "augmented" : "plain", step, waiting, metrics);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--rank") == 0) {
    be_rank(argc > 2 && std::strcmp(argv[2], "augmented") == 0);
    return 0;
  }
  is_json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  at::set_num_threads(1);
  if (!is_json) {
    text::print("#{:<16}{:<7}{:>14}{:>14}{:>10}\n", "what", "model", "lockstep (ms)",
                "LibTorch (ms)", "faster");
  }
  for (const auto& [model, rounds] : std::vector<std::pair<std::string, int>>{
           {"mlp", 500}, {"cnn", 100}, {"gpt", 30}, {"many", 100}}) {
    const int times = is_quick ? 2 : rounds;
    compare_optimizers<optim::AdamW, torch::optim::AdamW>("AdamW", model, times,
                                                          torch::optim::AdamWOptions(1e-4));
    compare_optimizers<optim::Adam, torch::optim::Adam>("Adam", model, times,
                                                        torch::optim::AdamOptions(1e-4));
    compare_optimizers<optim::SGD, torch::optim::SGD>("SGD", model, times,
                                                      torch::optim::SGDOptions(1e-4).momentum(0.9));
    const auto mine = make_parameters(model);
    const auto others = make_parameters(model);
    compare(
        "clip_grad_norm", model, times, [&] { optim::clip_grad_norm(mine, 1e9); },
        [&] { torch::nn::utils::clip_grad_norm_(others, 1e9); });
  }
  draw_samples();
  train(false);
  train(true);
}
