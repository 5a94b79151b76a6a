// Logical ranks: trainings give the same bits on any number of ranks, hosts and on any engine.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <cstdlib>
#include <numeric>
#include <sstream>

#include "base/hash.h"
#include "multiprocess/logical_world.h"
#include "multiprocess/on_engines.h"
#include "multiprocess/run_models.h"
#include "support/has.h"
#include "support/net_hosts.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

constexpr int kLogicalRanks = 8;
#ifdef LOCKSTEP_SANITIZED
constexpr int kStepsInCi = 3;
#else
constexpr int kStepsInCi = 8;
#endif

void with_logical_ranks(int count, const std::function<void()>& body) {
  ::setenv("LOCKSTEP_LOGICAL_RANKS", std::to_string(count).c_str(), 1);
  body();
  ::unsetenv("LOCKSTEP_LOGICAL_RANKS");
}

// What must not change the result.
struct How {
  std::size_t bucket_bytes = 25 << 20;
  Shard shard = Shard::kNone;
};

// What does.
struct Recipe {
  BufferSync buffers = BufferSync::kFromRank0;
  int accumulate = 1;
  bool is_weighted = false;
  bool is_scaled = false;
  at::ScalarType type = at::kFloat;
};

template <typename Model>
std::string hash_of_training(const World& world, const How& how, const Recipe& recipe,
                             int num_steps) {
  seed_all(11, world);
  Model model;
  model->to(recipe.type);
  DistributedDataParallel ddp(model, world,
                              {.bucket_bytes = how.bucket_bytes,
                               .first_bucket_bytes = how.bucket_bytes / 4,
                               .buffers = recipe.buffers,
                               .shard = how.shard,
                               .shard_min_bytes = 0});
  ddp.accumulate(recipe.accumulate);
  optim::Sharded<optim::AdamW> optimizer(model->parameters(), to::AdamWOptions(1e-2));
  GradScaler scaler(world, ScalerOptions{.scale = 256});
  if constexpr (std::is_same_v<Model, Cnn>) model->is_augmented = true;
  TurnMean mean_loss(world);
  std::uint64_t hash = 0;
  // An epoch of 5 steps and a rest.
  const int batch_size = 2;
  DistributedSampler sampler(
      static_cast<std::size_t>(5 * batch_size * recipe.accumulate) * kLogicalRanks + 9, world,
      {.seed = 3, .batches_per_turn = recipe.accumulate});
  for (int step = 0; step < num_steps;) {
    const auto samples = sampler.next(batch_size);
    if (!samples) {
      sampler.reset();
      continue;
    }
    const Turn turn = ddp.play();
    if (recipe.is_weighted) ddp.set_weight(0.3 * static_cast<double>(turn.logical_rank + step % 3));
    at::Tensor loss = loss_of(model->forward(static_cast<int>(samples->front() % 1000),
                                             static_cast<int>(samples->back() % 1000)));
    mean_loss.add(turn.logical_rank, loss, 1 + turn.logical_rank % 3);
    if (recipe.is_scaled) loss = scaler.scale(loss);
    loss.backward();
    if (!turn.is_last) continue;
    const double shown = mean_loss.take();
    EXPECT_GT(shown, 0);
    hash = hash_bytes(&shown, sizeof shown, hash);
    if (recipe.is_scaled) {
      scaler.unscale(optimizer);
      optim::clip_grad_norm(model->parameters(), 0.5);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
    } else {
      optimizer.step();
    }
    optimizer.zero_grad();
    ++step;
  }
  for (const auto& tensors : {model->parameters(), model->buffers()}) {
    for (const at::Tensor& one : tensors) {
      const at::Tensor dense = one.detach().contiguous();
      hash = hash_bytes(dense.const_data_ptr(), dense.nbytes(), hash);
    }
  }
  ddp.check_replicas();
  return std::to_string(hash);
}

std::string hashes_of_trainings(const World& world, const How& how, int steps) {
  const bool is_sharded = how.shard != Shard::kNone;
  std::ostringstream text;
  text << "mlp " << hash_of_training<Mlp>(world, how, {}, steps) << "\n";
  text << "mlp, weights " << hash_of_training<Mlp>(world, how, {.is_weighted = true}, steps)
       << "\n";
  text << "mlp, accumulation " << hash_of_training<Mlp>(world, how, {.accumulate = 2}, steps)
       << "\n";
  text << "cnn " << hash_of_training<Cnn>(world, how, {}, steps) << "\n";
  text << "cnn, mean of buffers "
       << hash_of_training<Cnn>(world, how, {.buffers = BufferSync::kMean}, steps) << "\n";
  text << "gpt, scaled and clipped "
       << hash_of_training<SmallGpt>(world, how, {.is_scaled = true}, steps) << "\n";
  if (!is_sharded) {
    text << "mlp, bf16 "
         << hash_of_training<Mlp>(world, how, {.accumulate = 2, .type = at::kBFloat16}, steps)
         << "\n";
  }
  return text.str();
}

struct Layout {
  OnEngine on;
  How how;
};

std::vector<Layout> layouts() {
  std::vector<Layout> rows = {
      {{"shm", "aa"}, {.bucket_bytes = 20'000}},
      {{"shm", "aaa"}, {.shard = Shard::kGradients}},
#ifndef LOCKSTEP_SANITIZED
      {{"shm", "aaa"}, {}},
      {{"shm", "aaaa"}, {.bucket_bytes = 1'000}},
      {{"shm", "aaaaa"}, {.bucket_bytes = 50'000}},
      {{"shm", "aaaaaaaa"}, {}},
      {{"shm", "aa"}, {.bucket_bytes = 50'000, .shard = Shard::kOptimizer}},
      {{"shm", "aa"}, {.bucket_bytes = 50'000, .shard = Shard::kGradients}},
      {{"hierarchical", "aabb"}, {.bucket_bytes = 7'000}},
      {{"hierarchical", "aabb"}, {.shard = Shard::kGradients}},
      {{"hierarchical", "abc"}, {}},
      {{"hierarchical", "aab"}, {.bucket_bytes = 30'000, .shard = Shard::kGradients}},
      {{"gloo", "aaaa"}, {}},
      {{"mpi", "aa"}, {.bucket_bytes = 30'000}},
      {{"mpi", "aaa"}, {}},
#endif
  };
  std::erase_if(rows, [](const Layout& row) {
    return !why_no_engine(row.on.engine == "hierarchical" ? "gloo" : row.on.engine).empty();
  });
  return rows;
}

class LogicalLayouts : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Worlds, LogicalLayouts, testing::ValuesIn(layouts()),
                         [](const auto& test) {
                           return test.param.on.engine + "_" + test.param.on.hosts + "_" +
                                  std::to_string(test.index);
                         });

TEST_P(LogicalLayouts, HaveTheBitsOfARankAlone) {
  with_logical_ranks(kLogicalRanks, [] {
    EXPECT_TRUE(all_passed(run_on(
        GetParam().on,
        [](const World& world) {
          EXPECT_EQ(at::get_num_threads(), 1);
          const int steps = soak(kStepsInCi, 200);
          const std::string mine = hashes_of_trainings(world, GetParam().how, steps);
          if (world.rank() != 0) return;
          const std::string expected = hashes_of_trainings(alone(kLogicalRanks), {}, steps);
          EXPECT_EQ(mine, expected.substr(0, mine.size()));
          EXPECT_TRUE(has(mine, "gpt")) << mine;
        },
        std::chrono::minutes(soak(1, 15)))));
  });
}

// Over a real network: 2 x 2 and 3 hosts of different sizes.
class LogicalHosts : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Worlds, LogicalHosts,
                         testing::Values(std::vector{2, 2}, std::vector{3, 1, 1}));

TEST_P(LogicalHosts, HaveTheBitsOfARankAlone) {
  if (const std::string reason = NetHosts::why_not(); !reason.empty()) GTEST_SKIP() << reason;
  const NetHosts hosts(static_cast<int>(GetParam().size()));
  const int size = std::accumulate(GetParam().begin(), GetParam().end(), 0);
  RankOptions options = on_network(hosts, GetParam());
  options.deadline = std::chrono::minutes(soak(1, 15));
  EXPECT_TRUE(all_passed(run_ranks(
      size,
      [](int rank) {
        const World world =
            World::join({.timeout = std::chrono::minutes(5), .logical_ranks = kLogicalRanks});
        EXPECT_EQ(world.backend()->getBackendName(), "hierarchical:gloo");
        const int steps = soak(kStepsInCi, 200);
        const std::string mine = hashes_of_trainings(world, {.bucket_bytes = 50'000}, steps);
        if (rank == 0) {
          EXPECT_EQ(mine, hashes_of_trainings(alone(kLogicalRanks), {}, steps));
        }
      },
      options)));
}

// Also those that are no power of two.
TEST(LogicalRanks, AnyNumberOfThemWillDo) {
  for (const int count : {1, 3, 6}) {
    EXPECT_TRUE(all_passed(run_ranks(std::min(count, 2), [&](int rank) {
      const World world = World::join({.logical_ranks = count});
      const std::string mine = hash_of_training<Mlp>(world, {}, {.is_weighted = count > 1}, 3);
      if (rank != 0) return;
      EXPECT_EQ(mine, hash_of_training<Mlp>(alone(count), {}, {.is_weighted = count > 1}, 3));
      // Every one of them counts as much: the mean of equal gradients is that gradient.
      Net model;
      DistributedDataParallel ddp(model, alone(count));
      for (bool is_last = false; !is_last;) {
        is_last = ddp.play().is_last;
        loss_of(model->forward(batch(1))).backward();
      }
      Net other;
      loss_of(other->forward(batch(1))).backward();
      EXPECT_TRUE(model->first->weight.grad().allclose(other->first->weight.grad(), 1e-5, 1e-7));
    }))) << count;
  }
}

// Another number of logical ranks is another training.
TEST(LogicalRanks, TheirNumberMatters) {
  EXPECT_TRUE(all_passed(run_ranks(1, [](int) {
    const auto hash_with = [](int count) { return hash_of_training<Mlp>(alone(count), {}, {}, 2); };
    EXPECT_EQ(hash_with(8), hash_with(8));
    EXPECT_NE(hash_with(8), hash_with(4));
  })));
}

}  // namespace
}  // namespace lockstep::test
