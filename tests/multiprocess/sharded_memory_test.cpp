// How much memory the ranks of a host take together with Shard::kGradients, and how a rank that is
// ahead waits instead of taking more.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <malloc.h>
#include <torch/nn.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <thread>

#include "multiprocess/ddp_model.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

// Twenty layers of a MiB.
struct DeepNetImpl : torch::nn::Module {
  DeepNetImpl() {
    for (int i = 0; i < 20; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false))));
    }
  }
  at::Tensor forward(at::Tensor input) {
    for (auto& layer : layers) input = torch::tanh(layer(input));
    return input;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(DeepNet);

// This rank's share, in MiB.
[[maybe_unused]] double pss_mib(const std::string& kind) {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(kind + ":")) return std::stod(line.substr(kind.size() + 1)) / 1024;
  }
  return -1;
}

TEST(ShardedMemory, IsTakenOnceByFourRanks_shm4) {
#ifdef LOCKSTEP_SANITIZED
  GTEST_SKIP() << "sanitizers keep memory";
#else
  if (pss_mib("Pss_Shmem") < 0) GTEST_SKIP() << "this kernel does not tell Pss_Shmem";
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = World::join({.engine = "shm"});
    const auto sum = [&](const std::string& kind) {
      world.barrier();  // all have come so far, and go on when all have been measured
      const double mine = pss_mib(kind);
      return world.all_reduce(at::tensor(mine, at::kDouble)).item<double>();
    };
    const auto train = [&](auto& model, torch::optim::Optimizer& optimizer) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(numbers({4, 512}, rank + 7 * step))).backward();
        optimizer.step();
      }
    };
    {  // what a first training loads and keeps
      DeepNet other;
      const DistributedDataParallel ddp(other, world, {.bucket_bytes = 1 << 20});
      optim::AdamW optimizer(other->parameters(), 1e-3);
      train(other, optimizer);
    }
    ::malloc_trim(0);
    const double shared_before = sum("Pss_Shmem");
    const double own_before = sum("Pss_Anon");
    DeepNet model;
    const DistributedDataParallel ddp(
        model, world, {.bucket_bytes = 1 << 20, .shard = Shard::kGradients, .shard_min_bytes = 0});
    optim::Sharded<optim::AdamW> optimizer(model->parameters(), 1e-3);
    train(model, optimizer);
    ::malloc_trim(0);
    const double shared = sum("Pss_Shmem") - shared_before;
    const double own = sum("Pss_Anon") - own_before;
    // Parameters, gradients and two states of 20 MiB, once; for each rank two places of a bucket,
    // and what an engine takes.
    EXPECT_GE(shared, 79);
    EXPECT_LE(shared, 80 + 4 * (2 * 1.25 + 3));
    EXPECT_LE(own, 4 * 5.0);
    std::cout << "shared " << shared << " MiB, own " << own << " MiB" << std::endl;
  })));
#endif
}

using Clock = std::chrono::steady_clock;

// A backward of two ranks, in which each does something of its own at the tenth layer from the end;
// when it came to the first layer.
Clock::duration time_to_first_layer(const World& world, const std::function<void()>& at_tenth,
                                    const std::function<void()>& at_first) {
  DeepNet model;
  const DistributedDataParallel ddp(
      model, world, {.bucket_bytes = 1 << 20, .shard = Shard::kGradients, .shard_min_bytes = 0});
  optim::Sharded<optim::AdamW> optimizer(model->parameters(), 1e-3);
  const auto began = Clock::now();
  Clock::duration taken{};
  model->layers[10]->weight.register_hook([&](const at::Tensor&) { at_tenth(); });
  model->layers[0]->weight.register_hook([&](const at::Tensor&) {
    taken = Clock::now() - began;
    at_first();
  });
  loss_of(model->forward(numbers({4, 512}, world.rank()))).backward();
  optimizer.step();
  return taken;
}

// Longer than a rank waits that knows nothing of the others (0.3 s with a core for each).
TEST(ShardedPlaces, ARankThatIsAheadWaitsWhileOthersCompute_shm2) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm"});
    constexpr auto kLate = std::chrono::seconds(2);
    const auto taken = time_to_first_layer(
        world,
        [&] {
          if (rank == 1) std::this_thread::sleep_for(kLate);
        },
        [] {});
    // It has two places: gradients of the layers before are not made before rank 1 has come.
    EXPECT_GE(taken, kLate);
  })));
}

// Rank 1 needs it in its tenth layer, and it comes there in its last.
TEST(ShardedPlaces, ARankThatIsAheadGoesOnWhereItIsNeeded_shm2) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm"});
    const auto sum = [&] { world.all_reduce(at::ones({3})); };
    const auto taken = time_to_first_layer(
        world,
        [&] {
          if (rank == 1) sum();
        },
        [&] {
          if (rank == 0) sum();
        });
    EXPECT_LT(taken, std::chrono::seconds(20));  // it would wait for 30 s at most
  })));
}

}  // namespace
}  // namespace lockstep::test
