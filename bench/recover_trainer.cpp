// The training of ./dev bench recover: it survives the loss of ranks, and writes down when what
// happened. bench/recover.py starts it, kills its ranks, and reads that.
//
//   recover_trainer --model mlp --folder FOLDER [--steps N] [--hash-every N]
//
// Each process appends to FOLDER/PID.events, a line per event, times in seconds of CLOCK_MONOTONIC:
//   start SEAT BEGAN MAIN       when the process began (as the kernel counts, by 10 ms), and main()
//   made TIME                   it has joined the world, model and optimizer are there
//   change GENERATION SIZE STEP JOINED BYTES SECONDS REDONE TIME
//   step NUMBER TIME SIZE       that step is complete
//   hash NUMBER HASH            of the weights after that step, on rank 0
//   copy BYTES MS BROADCAST_MS  at the end, on rank 0: memcpy of the state, and its broadcast to
//   all
// Without --steps it trains until FOLDER/total says how many steps are enough.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <lockstep/checkpoint.h>
#include <lockstep/ddp.h>
#include <lockstep/elastic.h>
#include <lockstep/optim.h>
#include <lockstep/world.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/text.h"
#include "models.h"

namespace {

using namespace lockstep;  // NOLINT: a program

struct Options {
  std::string model = "mlp";
  std::string folder;
  std::int64_t steps = 0;
  std::int64_t hash_every = 50;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// When the kernel made this process.
double process_began() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream words(text.substr(text.rfind(')') + 2));
  std::string word;
  for (int field = 3; field <= 22; ++field) words >> word;
  return std::strtod(word.c_str(), nullptr) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

class Events {
 public:
  explicit Events(const std::string& folder)
      : fd_(::open(text::format("{}/{}.events", folder, ::getpid()).c_str(),
                   O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) {}
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) const {
    const std::string line = text::format(format, std::forward<Args>(args)...) + "\n";
    (void)!::write(fd_, line.data(), line.size());  // whole, or not at all
  }

 private:
  int fd_;
};

std::uint64_t hash_of(const bench::Model& model) {
  std::uint64_t hash = 0;
  for (const at::Tensor& one : model.parameters()) {
    hash = hash_bytes(one.const_data_ptr(), one.nbytes(), hash);
  }
  return hash;
}

template <typename Work>
double median_ms(const Work& work) {
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
    const double began = now();
    work();
    times.push_back((now() - began) * 1e3);
  }
  std::ranges::sort(times);
  return times[times.size() / 2];
}

// One plain copy of as many bytes as a newcomer gets, and the same through the engine.
void measure_copies(const World& world, const Events& events, const bench::Model& model) {
  std::int64_t bytes = 0;
  for (const at::Tensor& one : model.parameters()) {
    bytes += 3 * static_cast<std::int64_t>(one.nbytes());  // and two moments of AdamW
  }
  at::Tensor from = at::ones({bytes}, at::kByte);
  const double broadcast_ms = median_ms([&] { world.broadcast(from, 0); });
  double copy_ms = 0;
  if (world.rank() == 0) {
    at::Tensor to = at::zeros({bytes}, at::kByte);
    copy_ms = median_ms([&] {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<std::size_t>(bytes));
    });
  }
  world.barrier();
  if (world.rank() == 0) events.add("copy {} {:.4f} {:.4f}", bytes, copy_ms, broadcast_ms);
}

void train(const Options& options, const Events& events) {
  at::set_num_threads(1);
  const World world = World::join();
  std::vector<bench::Workload> batches;  // of each logical rank
  for (int player = 0; player < world.logical_size(); ++player) {
    batches.push_back(bench::make_workload(options.model, player));
    if (player > 0) batches.back().model = batches.front().model;
  }
  const std::shared_ptr<bench::Model> model = batches.front().model;
  DistributedDataParallel ddp(model, world);
  optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  Checkpointer checkpoints(options.folder + "/checkpoints", world);
  checkpoints.add(model).add(optimizer).add(ddp);
  Elastic elastic(checkpoints, checkpoints.load_latest().step);
  elastic.on_change([&](const ElasticChange& change) {
    events.add("change {} {} {} {} {} {:.6f} {} {:.6f}", change.generation, change.size,
               change.step, change.num_joined, change.bytes, change.seconds,
               change.is_redone ? 1 : 0, now());
  });
  events.add("made {:.6f}", now());
  const std::string total_path = options.folder + "/total";
  std::int64_t total = options.steps > 0 ? options.steps : std::numeric_limits<std::int64_t>::max();
  const bool is_complete = elastic.run([&] {
    while (elastic.steps() < total) {
      const Turn turn = ddp.play();
      // Another batch in each step, so that one that is left out or done twice shows in the
      // weights.
      const auto step = static_cast<std::size_t>(elastic.steps());
      batches[(static_cast<std::size_t>(turn.logical_rank) + step) % batches.size()]
          .loss()
          .backward();
      if (!turn.is_last) continue;
      optimizer.step();
      optimizer.zero_grad();
      elastic.commit();
      events.add("step {} {:.6f} {}", elastic.steps(), now(), world.size());
      if (world.rank() == 0 && elastic.steps() % options.hash_every == 0) {
        events.add("hash {} {:016x}", elastic.steps(), hash_of(*model));
      }
      if (options.steps == 0) {
        if (std::ifstream file(total_path); file) file >> total;
      }
    }
  });
  if (!is_complete) return;
  ddp.check_replicas();
  measure_copies(world, events, *model);
}

}  // namespace

int main(int argc, char** argv) try {
  const double began = now();
  Options options;
  CLI::App app("A rank of ./dev bench recover");
  app.add_option("--model", options.model, "mlp or gpt, of bench/models.h");
  app.add_option("--folder", options.folder, "Where events are written")->required();
  app.add_option("--steps", options.steps, "How many; else until FOLDER/total says so");
  app.add_option("--hash-every", options.hash_every, "Steps")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const Events events(options.folder);
  const char* const seat = std::getenv("LOCKSTEP_SEAT");
  events.add("start {} {:.6f} {:.6f}", seat != nullptr ? seat : "-1", process_began(), began);
  train(options, events);
  return 0;
} catch (const std::exception& error) {
  text::print(stderr, "{}\n", error.what());
  return 1;
}
