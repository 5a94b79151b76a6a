// Logical ranks: turns, one by one: without data, with errors, and what is refused.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <cmath>

#include "base/hash.h"
#include "multiprocess/logical_world.h"
#include "multiprocess/on_engines.h"
#include "multiprocess/run_models.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace to = torch::optim;

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

TEST(LogicalTurns, RunOutOfDataAlikeOnAnyNumberOfRanks) {
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

TEST(LogicalTurns, TheFirstWithoutDataEndsTheTrainingIfAsked) {
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
TEST(LogicalTurns, ARankWithoutThemSkipsAStep) {
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

TEST(LogicalTurns, WhatCannotBeTheSameIsRefused) {
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
TEST(LogicalTurns, GradientsOfATurnAreItsOwn) {
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

TEST(LogicalTurns, AStepIsDroppedWhateverTurnFails) {
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
TEST(LogicalTurns, AProblemOfAnEarlierTurnIsToldWithoutData) {
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
TEST(LogicalTurns, AStepWithoutDataDoesNotEndOthersJoin) {
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

TEST(LogicalTurns, NumbersThatCannotBeAreRefused) {
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
