// Logical ranks: trainings give the same bits on any number of ranks, hosts and on any engine.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <cstdlib>
#include <numeric>
#include <sstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/hash.h"
#include "multiprocess/on_engines.h"
#include "multiprocess/run_models.h"
#include "support/has.h"
#include "support/net_hosts.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

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

// A world of one in this process.
World alone(int logical_ranks) {
  return World::join({.engine = "solo",
                      .logical_ranks = logical_ranks,
                      .rank = 0,
                      .size = 1,
                      .store = c10::make_intrusive<c10d::HashStore>()});
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
        std::chrono::minutes(5))));
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
      on_network(hosts, GetParam()))));
}

struct Resumable {
  Resumable(const World& its_world, const std::string& folder)
      : world(its_world), checkpoints(folder, world) {
    checkpoints.add(model).add(optimizer).add(sampler).add(ddp);
  }
  // Until `last`; in the middle of epochs.
  void train(std::int64_t last) {
    for (std::int64_t step = checkpoints.load_latest().step; step < last;) {
      const auto samples = sampler.next(2);
      if (!samples) {
        sampler.reset();
        continue;
      }
      const Turn turn = ddp.play();
      loss_of(model->forward(static_cast<int>(samples->front()), 1)).backward();
      if (!turn.is_last) continue;
      optimizer.step();
      optimizer.zero_grad();
      if (++step == last) checkpoints.save(step);
    }
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all = model->parameters();
    for (const at::Tensor& one : model->buffers()) all.push_back(one);
    return all;
  }

  World world;
  Mlp model;
  DistributedDataParallel ddp{model, world};
  optim::AdamW optimizer{model->parameters(), to::AdamWOptions(1e-2)};
  DistributedSampler sampler{100, world};
  Checkpointer checkpoints;
};

TEST(LogicalRanks, AResumedTrainingHasTheBitsOfOneThatWasNot) {
  const TempFolder folder;
  int last = 0;
  for (const int ranks : {2, 3, 1, 4}) {
    last += 5;
    EXPECT_TRUE(all_passed(run_ranks(ranks, [&](int rank) {
      const World world = World::join({.logical_ranks = kLogicalRanks});
      seed_all(5, world);
      Resumable resumed(world, folder.path() + "/run");
      resumed.train(last);
      if (rank != 0) return;
      const World one = alone(kLogicalRanks);
      seed_all(5, one);
      Resumable whole(one, folder.path() + "/whole" + std::to_string(ranks));
      whole.train(last);
      const auto expected = whole.tensors();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(resumed.tensors()[i].equal(expected[i])) << i << " at step " << last;
      }
    })));
  }
}

TEST(LogicalRanks, ACheckpointOfAnotherRunIsRefused) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const auto resume = [&](int logical_ranks, std::uint64_t seed, int threads) {
      const World world = World::join({.logical_ranks = logical_ranks, .threads = threads});
      EXPECT_EQ(at::get_num_threads(), threads);
      seed_all(seed, world);
      Resumable one(world, folder.path());
      one.train(2);
    };
    resume(4, 5, 1);
    expect_says(thrown_by<UsageError>([&] { resume(8, 5, 1); }),
                {"4 logical ranks with seed 5", "8 logical ranks"});
    expect_says(thrown_by<UsageError>([&] { resume(4, 6, 1); }), {"seed 5", "seed 6"});
    expect_says(thrown_by<UsageError>([&] { resume(4, 5, 2); }), {"1 threads", "2 threads"});
    // Another choice of kernels.
    ::setenv("MKL_CBWR", "COMPATIBLE", 1);
    expect_says(thrown_by<UsageError>([&] { resume(4, 5, 1); }),
                {"The run was on LibTorch", "MKL_CBWR=COMPATIBLE", "LOCKSTEP_ANY_PLATFORM=1"});
    ::setenv("LOCKSTEP_ANY_PLATFORM", "1", 1);
    resume(4, 5, 1);
  })));
}

// Ranks of one training must compute alike, too.
TEST(LogicalRanks, RanksOnAnotherPlatformAreRefused) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    if (rank == 1) ::setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 1);
    const World world = World::join({.logical_ranks = 2});
    Net model;
    const auto wrap = [&] { const DistributedDataParallel ddp(model, world); };
    expect_says(thrown_by<MismatchError>(wrap), {"ONEDNN_MAX_CPU_ISA=SSE41"});
    ::setenv("LOCKSTEP_ANY_PLATFORM", "1", 1);
    wrap();
  })));
}

TEST(LogicalRanks, ThreadsAreTheRuns) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    expect_says(
        thrown_by<MismatchError>([&] { World::join({.logical_ranks = 2, .threads = 1 + rank}); }),
        {"number of threads", "'1'", "'2'"});
    expect_says(thrown_by<UsageError>([] { World::join({.threads = 2}); }),
                {"without logical ranks", "set_num_threads"});
    expect_says(thrown_by<UsageError>([] { World::join({.logical_ranks = 2, .threads = -1}); }),
                {"1 or more"});
    ::setenv("LOCKSTEP_THREADS", "2", 1);
    const World world = World::join({.logical_ranks = 2});
    EXPECT_EQ(at::get_num_threads(), 2);
  })));
}

// Logical ranks that run out of data one after the other, in the middle of a rank's turns.
std::string hash_of_uneven(const World& world, const UnevenOptions& options, BufferSync buffers,
                           int accumulate) {
  seed_all(7, world);
  Cnn model;
  DistributedDataParallel ddp(model, world, {.bucket_bytes = 30'000, .buffers = buffers});
  ddp.accumulate(accumulate);
  optim::AdamW optimizer(model->parameters(), to::AdamWOptions(1e-2));
  const auto num_batches = [&](int logical_rank) { return 1 + (5 * logical_rank + 3) % 8; };
  const auto step = [&] {
    optimizer.step();
    optimizer.zero_grad();
  };
  std::vector<int> read(static_cast<std::size_t>(world.logical_size()));
  const LogicalRanks mine = world.logical_ranks();
  const auto has_data = [&](int logical_rank) {
    return read[static_cast<std::size_t>(logical_rank)] < num_batches(logical_rank);
  };
  const auto any_data = [&] {
    for (int i = mine.first; i < mine.first + mine.count; ++i) {
      if (has_data(i)) return true;
    }
    return false;
  };
  while (any_data()) {
    const Turn turn = ddp.play();
    if (!has_data(turn.logical_rank)) {
      if (ddp.skip(options)) step();
      continue;
    }
    ddp.set_weight(2 + turn.logical_rank);
    loss_of(model->forward(turn.logical_rank, read[static_cast<std::size_t>(turn.logical_rank)]++))
        .backward();
    if (turn.is_last) step();
  }
  ddp.join(step, options);
  ddp.check_replicas();
  std::uint64_t hash = 0;
  for (const auto& tensors : {model->parameters(), model->buffers()}) {
    for (const at::Tensor& one : tensors) {
      hash = hash_bytes(one.const_data_ptr(), one.nbytes(), hash);
    }
  }
  return std::to_string(hash) + " after " + std::to_string(ddp.stats().steps) + " steps\n";
}

std::string hashes_of_uneven(const World& world) {
  return hash_of_uneven(world, {}, BufferSync::kFromRank0, 1) +
         hash_of_uneven(world, {.divide_by_initial_world_size = true}, BufferSync::kFromRank0, 1) +
         hash_of_uneven(world, {}, BufferSync::kMean, 1) +
         hash_of_uneven(world, {}, BufferSync::kFromRank0, 3);
}

TEST(LogicalRanks, RunOutOfDataAlikeOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    EXPECT_TRUE(all_passed(run_ranks(ranks, [](int rank) {
      const std::string mine = hashes_of_uneven(World::join({.logical_ranks = 8}));
      EXPECT_TRUE(has(mine, "after 8 steps")) << mine;
      EXPECT_TRUE(has(mine, "after 3 steps")) << mine;  // of up to 3 batches
      if (rank != 0) return;
      EXPECT_EQ(mine, hashes_of_uneven(alone(8)));
    }))) << ranks;
  }
}

TEST(LogicalRanks, TheFirstWithoutDataEndsTheTrainingIfAsked) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join({.logical_ranks = 6});
    expect_says(thrown_by<UsageError>([&] {
                  hash_of_uneven(world, {.throw_on_early_termination = true},
                                 BufferSync::kFromRank0, 1);
                }),
                {"Logical rank 1 is out of data"});
  })));
}

// Without logical ranks a rank can leave out a step, too.
TEST(LogicalRanks, ARankWithoutThemSkipsAStep) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm"});
    Net model;
    DistributedDataParallel ddp(model, world);
    for (int step = 0; step < 2; ++step) {
      if (rank == step) {
        EXPECT_TRUE(ddp.skip());
      } else {
        loss_of(model->forward(batch(rank))).backward();
      }
      Net other;
      loss_of(other->forward(batch(1 - step))).backward();
      EXPECT_TRUE(model->first->weight.grad().equal(other->first->weight.grad()));
      model->zero_grad();
    }
    EXPECT_FALSE(ddp.skip());  // nobody has data
    EXPECT_FALSE(model->first->weight.grad().defined());
  })));
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

TEST(LogicalRanks, WhatCannotBeTheSameIsRefused) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm", .logical_ranks = 5});
    EXPECT_EQ(world.logical_size(), 5);
    EXPECT_EQ(world.logical_ranks().first, rank == 0 ? 0 : 2);
    EXPECT_EQ(world.logical_ranks().count, rank == 0 ? 2 : 3);
    Net model;
    const auto wrap = [&](const auto& what, DdpOptions options) {
      const DistributedDataParallel ddp(what, world, options);
    };
    expect_says(thrown_by<UsageError>([&] { wrap(model, {.hook = bf16_hook()}); }),
                {"hook bf16", "a rank gives a sum"});
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    expect_says(thrown_by<UsageError>([&] { wrap(table, {}); }), {"sparse gradients"});

    DistributedDataParallel ddp(model, world);
    const auto backward = [&] { loss_of(model->forward(batch(rank))).backward(); };
    expect_says(thrown_by<UsageError>(backward), {"play() was not called"});
    // Turns are counted from the beginning again.
    const int turns = world.logical_ranks().count;
    for (int turn = 0; turn < turns; ++turn) {
      EXPECT_EQ(ddp.num_pending(), turn);
      const Turn now = ddp.play();
      EXPECT_EQ(now.logical_rank, world.logical_ranks().first + turn);
      EXPECT_EQ(now.is_last, turn + 1 == turns);
      backward();
      EXPECT_EQ(model->first->weight.grad().defined(), now.is_last);
    }
    EXPECT_EQ(ddp.num_pending(), 0);
    at::set_num_threads(2);
    expect_says(thrown_by<UsageError>([&] { ddp.play(); }), {"threads", "set_num_threads"});
    at::set_num_threads(1);
    const auto grad = model->first->weight.grad();
    EXPECT_TRUE(world.all_gather(grad)[0].equal(world.all_gather(grad)[1]));
  })));
}

// What a training must not depend on, and what would make it do so.
TEST(LogicalRanks, GradientsOfATurnAreItsOwn) {
  const auto train = [](const World& world, bool sets_to_none) {
    at::Tensor position = numbers({1, 9}, 1).requires_grad_();
    at::Tensor type = numbers({1, 9}, 2).requires_grad_();
    at::Tensor unused = numbers({3}, 3).requires_grad_();
    DistributedDataParallel ddp({{"position", position}, {"type", type}, {"unused", unused}},
                                world);
    optim::SGD optimizer({position, type, unused}, to::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      for (bool is_last = false; !is_last;) {
        const Turn turn = ddp.play();
        ddp.set_weight(1 + turn.logical_rank);
        const at::Tensor input = numbers({4, 9}, 10 * step + turn.logical_rank);
        // Both have the same gradient, in the same memory.
        const at::Tensor sum = position.squeeze(0) + type.squeeze(0);
        loss_of(torch::tanh(input + sum)).backward();
        is_last = turn.is_last;
      }
      optimizer.step();
      optimizer.zero_grad(sets_to_none);
    }
    return at::cat({position.detach().flatten(), type.detach().flatten()});
  };
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join({.engine = "shm", .logical_ranks = 8});
    const std::vector<at::Tensor> mine = {train(world, true), train(world, false)};
    if (rank != 0) return;
    const at::Tensor expected = train(alone(8), true);
    for (const at::Tensor& one : mine) EXPECT_TRUE(one.equal(expected));
  })));
}

TEST(LogicalRanks, AStepIsDroppedWhateverTurnFails) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join({.engine = "shm", .logical_ranks = 6});
    Cnn model;
    const DdpOptions options = {.check_finite = true};
    DistributedDataParallel ddp(model, world, options);
    const auto step = [&](const std::function<at::Tensor(const at::Tensor&, int)>& change) {
      for (bool is_last = false; !is_last;) {
        const Turn turn = ddp.play();
        is_last = turn.is_last;
        try {
          change(loss_of(model->forward(turn.logical_rank, 3)), turn.logical_rank).backward();
        } catch (const std::runtime_error& error) {
          if (is_last || !has(error.what(), "on purpose")) throw;
        }
      }
    };
    const at::Tensor before = model->norm->running_mean.clone();
    const auto plain = [](const at::Tensor& loss, int) { return loss; };
    // Not the last turn of its rank.
    expect_says(thrown_by<UsageError>([&] {
                  step([](const at::Tensor& loss, int logical_rank) {
                    return logical_rank == 1 ? loss * NAN : loss;
                  });
                }),
                {"is not finite"});
    EXPECT_TRUE(model->norm->running_mean.equal(before));
    EXPECT_EQ(ddp.num_pending(), 0);
    // In the middle: gradients of later layers are there already.
    bool must_throw = false;
    const auto hook = model->conv1->weight.register_hook([&](const at::Tensor&) {
      if (must_throw) throw std::runtime_error("on purpose");
    });
    expect_says(thrown_by<UsageError>([&] {
                  step([&](const at::Tensor& loss, int logical_rank) {
                    must_throw = logical_rank == 4;
                    return loss;
                  });
                }),
                {"ended by an exception"});
    EXPECT_TRUE(model->norm->running_mean.equal(before));
    model->conv1->weight.remove_hook(hook);
    step(plain);
    EXPECT_FALSE(model->norm->running_mean.equal(before));
    expect_says(thrown_by<UsageError>([&] { ddp.play(); }), {"zero_grad() before play()"});
    model->zero_grad();
    {
      const auto guard = ddp.no_sync();
      EXPECT_FALSE(ddp.play().is_last);
    }
    ddp.discard();
  })));
}

// What went wrong in an earlier turn is told at the end of the step, however that comes.
TEST(LogicalRanks, AProblemOfAnEarlierTurnIsToldWithoutData) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm", .logical_ranks = 4});
    Cnn model;
    const DdpOptions options = {.check_finite = true};
    DistributedDataParallel ddp(model, world, options);
    const auto backward = [&](double factor) {
      const Turn turn = ddp.play();
      (loss_of(model->forward(turn.logical_rank, 1)) * factor).backward();
      return turn.is_last;
    };
    for (const bool joins : {false, true}) {
      expect_says(thrown_by<UsageError>([&] {
                    backward(rank == 0 ? NAN : 1);
                    if (rank == 1) {
                      backward(1);
                    } else if (joins) {
                      ddp.join([] {});
                    } else {
                      ddp.skip();
                    }
                  }),
                  {"is not finite"});
    }
    // In the middle of the last turn: the rest of it still belongs to it.
    ddp.accumulate(2);
    bool must_throw = false;
    const auto hook = model->conv1->weight.register_hook([&](const at::Tensor&) {
      if (must_throw) throw std::runtime_error("on purpose");
    });
    expect_says(thrown_by<UsageError>([&] {
                  for (int i = 0; i < 4; ++i) {
                    must_throw = i == 2 && rank == 1;
                    try {
                      EXPECT_EQ(backward(1), i == 3);
                    } catch (const std::runtime_error& error) {
                      if (!has(error.what(), "on purpose")) throw;
                    }
                  }
                }),
                {"ended by an exception"});
    model->conv1->weight.remove_hook(hook);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(backward(1), i == 3);
    EXPECT_TRUE(model->conv1->weight.grad().defined());
  })));
}

// A rank in join() stays while another has a hole in its data.
TEST(LogicalRanks, AStepWithoutDataDoesNotEndOthersJoin) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "shm"});
    Net model;
    DistributedDataParallel ddp(model, world);
    int num_steps = 0;
    const auto step = [&] {
      ++num_steps;
      model->zero_grad();
    };
    if (rank == 1) {
      for (int i = 0; i < 3; ++i) {
        if (i == 1) {
          EXPECT_FALSE(ddp.skip());
          continue;
        }
        loss_of(model->forward(batch(rank))).backward();
        step();
      }
    }
    ddp.join(step);
    EXPECT_EQ(num_steps, 2);
  })));
}

TEST(LogicalRanks, NumbersThatCannotBeAreRefused) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    expect_says(thrown_by<UsageError>([] { World::join({.logical_ranks = 1}); }),
                {"1 logical ranks were asked for, with 2 ranks", "LOCKSTEP_LOGICAL_RANKS"});
    expect_says(thrown_by<UsageError>([] { World::join({.logical_ranks = 2000}); }), {"1024"});
    expect_says(thrown_by<MismatchError>([&] { World::join({.logical_ranks = 3 + rank}); }),
                {"logical ranks", "'3'", "'4'"});
  })));
}

}  // namespace
}  // namespace lockstep::test
