// DdpOptions::shard used wrongly: one clear error on all ranks, and nothing is lost.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <sys/wait.h>
#include <torch/nn.h>
#include <torch/serialize.h>
#include <unistd.h>

#include "multiprocess/sharded_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

constexpr Shard kShared[] = {Shard::kOptimizer, Shard::kGradients};

template <typename Optimizer = optim::Sharded<optim::AdamW>>
struct Trained {
  Trained(const World& its_world, Shard mode, bool is_sparse = false)
      : world(its_world),
        model(is_sparse),
        ddp(model, world,
            {.bucket_bytes = 100'000,
             .first_bucket_bytes = 10'000,
             .shard = mode,
             .shard_min_bytes = 0}),
        optimizer(model->parameters(), 1e-2) {}

  at::Tensor loss(int step = 0) { return loss_of(model->forward(batch(world.rank(), step))); }
  void backward(int step = 0) { loss(step).backward(); }
  void step() {
    optimizer.step();
    optimizer.zero_grad();
  }
  // Goes on as if nothing had happened.
  void expect_trains() {
    const at::Tensor before = model->wide->weight.detach().clone();
    for (int i = 0; i < 2; ++i) {
      backward(i);
      step();
    }
    EXPECT_FALSE(model->wide->weight.equal(before));
    ddp.check_replicas();
  }

  World world;
  WideNet model;
  DistributedDataParallel ddp;
  Optimizer optimizer;
};

void expect_error(const std::function<void()>& call, const std::vector<std::string>& words) {
  const std::string error = error_of(call);
  for (const std::string& one : words) EXPECT_TRUE(has(error, one)) << one << "\nin " << error;
}

// On all ranks of a world of two, for both modes.
void on_two(const std::function<void(const World&, Shard)>& body) {
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const World world = World::join({.engine = "shm", .timeout = std::chrono::seconds(10)});
    for (const Shard mode : kShared) {
      SCOPED_TRACE(name_of(mode));
      body(world, mode);
    }
  })));
}

TEST(ShardedRefuses, OptionsThatDoNotGoTogether) {
  on_two([](const World& world, Shard mode) {
    WideNet model;
    const auto wrap = [&](DdpOptions options) {
      options.shard = mode;
      options.shard_min_bytes = 0;
      const DistributedDataParallel ddp(model, world, options);
    };
    if (mode == Shard::kGradients) {
      expect_error([&] { wrap({.hook = bf16_hook()}); }, {"hook bf16", "use Shard::kOptimizer"});
    }
    expect_error([&] { wrap({.hook = post_local_sgd_hook({.averages_in_part = false})}); },
                 {"trains replicas apart"});
    torch::optim::SGD sgd(model->parameters(), 0.1);
    expect_error([&] { wrap({.optimizer = &sgd}); }, {"DdpOptions::optimizer", "Leave out one"});
    const auto wrap_tensors = [&](const std::vector<NamedTensor>& tensors) {
      const DistributedDataParallel ddp(tensors, world, {.shard = mode, .shard_min_bytes = 0});
    };
    const auto leaf = [](const at::Tensor& tensor) { return tensor.detach().requires_grad_(); };
    expect_error(
        [&] {
          wrap_tensors({{"c", leaf(at::zeros({4}, at::kComplexFloat))}});
        },
        {"parameter c has complex numbers", "Shard::kNone"});
    expect_error(
        [&] {
          wrap_tensors({{"g", leaf(at::zeros({4, 8}).slice(1, 0, 4))}});
        },
        {"parameter g has gaps in its memory"});
    const at::Tensor flat = at::zeros({8});
    expect_error(
        [&] {
          wrap_tensors({{"a", leaf(flat.narrow(0, 0, 5))}, {"b", leaf(flat.narrow(0, 4, 4))}});
        },
        {"parameter b shares its memory"});
    Trained<>(world, mode).expect_trains();
  });
}

// What is wrong on one rank alone is the same error on all.
TEST(ShardedRefuses, WhatIsWrongOnOneRank) {
  on_two([](const World& world, Shard mode) {
    const auto leaf = [](const at::Tensor& tensor) { return tensor.detach().requires_grad_(); };
    const at::Tensor flat = at::zeros({8});
    const at::Tensor a = leaf(flat.narrow(0, 0, 5));
    const at::Tensor b = leaf(world.rank() == 1 ? flat.narrow(0, 4, 4) : at::zeros({4}));
    expect_error(
        [&] {
          const DistributedDataParallel ddp({{"a", a}, {"b", b}}, world,
                                            {.shard = mode, .shard_min_bytes = 0});
        },
        {"parameter b shares its memory", "rank 1"});
    Trained<> one(world, mode);
    auto parameters = one.model->parameters();
    if (world.rank() == 1) parameters.push_back(one.model->wide->weight);
    optim::Sharded<optim::AdamW> wrong(parameters, 1e-2);
    const at::Tensor before = one.model->wide->weight.detach().clone();
    one.backward();
    expect_error([&] { wrong.step(); }, {"wide.weight is in two optimizers", "rank 1"});
    EXPECT_TRUE(one.model->wide->weight.equal(before));
    one.step();
    one.expect_trains();
  });
}

TEST(ShardedRefuses, AnOptimizerThatIsNotSharded) {
  on_two([](const World& world, Shard mode) {
    Trained<torch::optim::SGD> one(world, mode);
    one.backward();
    one.optimizer.step();
    world.barrier();  // both have written before one looks
    const bool is_seen = mode == Shard::kOptimizer;
    expect_error([&] { one.backward(); },
                 {is_seen ? "was changed by something else than an optim::Sharded"
                          : "step() of an optim::Sharded follows every synchronised backward()"});
    if (is_seen) one.ddp.rewrap();
    optim::Sharded<optim::SGD> right(one.model->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      right.zero_grad();
      one.backward(step);
      right.step();
    }
    one.ddp.check_replicas();
  });
}

// The refused one has overwritten the gradients that were not used: a step must not take them.
TEST(ShardedRefuses, ASecondBackwardWithoutAStep) {
  on_two([](const World& world, Shard mode) {
    if (mode != Shard::kGradients) return;
    Trained<> one(world, mode);
    one.expect_trains();
    one.backward();
    expect_error([&] { one.backward(1); }, {"The gradients of the last backward() were not used"});
    const at::Tensor before = one.model->wide->weight.detach().clone();
    one.step();
    EXPECT_TRUE(one.model->wide->weight.equal(before));
    one.expect_trains();
  });
}

TEST(ShardedRefuses, JoinWithoutAStepOnAllRanks) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    one.expect_trains();
    expect_error(
        [&] {
          if (world.rank() == 0) one.ddp.join();
          one.backward();
        },
        {"join() was called without a step", "rank 0"});
    one.optimizer.zero_grad();
    one.expect_trains();
  });
}

TEST(ShardedRefuses, RatesThatDiffer) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    Trained<optim::AdamW> expected(world, Shard::kNone);
    auto& options =
        static_cast<torch::optim::AdamWOptions&>(one.optimizer.param_groups()[0].options());
    for (int step = 0; step < 3; ++step) {
      expected.backward(step);
      expected.step();
      one.backward(step);
      if (step == 1 && world.rank() == 1) options.lr(0.25);
      if (step == 1) {
        EXPECT_THROW(one.optimizer.step(), MismatchError);
        expect_error([&] { one.optimizer.step(); },
                     {"rank 0: group 0: lr 0.01", "rank 1: group 0: lr 0.25"});
      }
      options.lr(1e-2);
      one.step();
      EXPECT_TRUE(one.model->wide->weight.equal(expected.model->wide->weight)) << step;
    }
  });
}

// The same options in the same order, but other parameters in each group.
TEST(ShardedRefuses, GroupsThatDiffer) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    auto all = one.model->parameters();
    const auto middle = all.begin() + 3 + world.rank();
    optim::Sharded<optim::AdamW> wrong(std::vector<at::Tensor>(all.begin(), middle), 1e-2);
    wrong.add_param_group(std::vector<at::Tensor>(middle, all.end()));
    one.backward();
    const at::Tensor before = one.model->wide->weight.detach().clone();
    EXPECT_THROW(wrong.step(), MismatchError);
    EXPECT_TRUE(one.model->wide->weight.equal(before));
    one.step();
    one.expect_trains();
  });
}

TEST(ShardedRefuses, WrappingAgainBeforeTheStep) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    one.backward();
    if (mode == Shard::kGradients) {
      expect_error([&] { one.ddp.rewrap(); }, {"were not used", "discard()"});
    }
    one.step();
    one.ddp.rewrap();
    one.expect_trains();
  });
}

// Two parameters of the same bits, in the memory of the same model.
TEST(ShardedRefuses, AParameterInThePlaceOfAnother) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    const auto zero_both = [&] {
      one.model->wide->bias.zero_();
      one.model->norm->bias.zero_();
    };
    one.ddp.change_parameters(zero_both);
    one.model->norm->bias.set_data(one.model->wide->bias.detach());
    expect_error([&] { one.backward(); }, {"norm.bias is not in the memory"});
  });
}

// Parameters that nobody shares are stepped once; a frozen one that still has a gradient is not.
TEST(ShardedRefuses, NothingElseIsWrittenTwice) {
  on_two([](const World& world, Shard mode) {
    WideNet model;
    model->first->bias.set_requires_grad(false);
    at::Tensor own = at::ones({3}).requires_grad_();
    const DistributedDataParallel ddp(model, world, {.shard = mode, .shard_min_bytes = 0});
    std::vector<at::Tensor> all = model->parameters();
    all.push_back(own);
    optim::Sharded<torch::optim::SGD> optimizer(all, torch::optim::SGDOptions(0.5));
    model->first->bias.mutable_grad() = at::ones_like(model->first->bias);
    const at::Tensor before = model->first->bias.detach().clone();
    const at::Tensor wide = model->wide->weight.detach().clone();
    (loss_of(model->forward(batch(world.rank()))) + own.sum()).backward();
    optimizer.step();
    EXPECT_TRUE(model->first->bias.equal(before));
    EXPECT_FALSE(model->wide->weight.equal(wide));
    EXPECT_TRUE(own.detach().equal(at::full({3}, 0.5F)));
  });
}

// One rank goes on alone, with a copy: the others' model stays theirs.
TEST(ShardedRefuses, AWorldOfOneHasMemoryOfItsOwn) {
  on_two([](const World& world, Shard mode) {
    WideNet model;
    optim::Sharded<optim::AdamW> optimizer(model->parameters(), 1e-2);
    const auto train = [&](int step) {
      optimizer.zero_grad();
      loss_of(model->forward(batch(world.rank(), step))).backward();
      optimizer.step();
    };
    {
      const DistributedDataParallel ddp(model, world, {.shard = mode, .shard_min_bytes = 0});
      train(0);
    }
    const at::Tensor before = model->wide->weight.detach().clone();
    world.barrier();
    const auto alone = world.split(world.rank());
    if (world.rank() == 0) {
      const DistributedDataParallel ddp(model, *alone, {.shard = mode, .shard_min_bytes = 0});
      train(1);
      EXPECT_FALSE(model->wide->weight.equal(before));
    }
    world.barrier();
    if (world.rank() == 1) {
      EXPECT_TRUE(model->wide->weight.equal(before));
      const DistributedDataParallel ddp(model, *alone, {.shard = mode, .shard_min_bytes = 0});
      train(1);
    }
    EXPECT_FALSE(model->wide->weight.equal(before));
  });
}

TEST(ShardedRefuses, WritesOfOneRank) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    for (const bool is_data : {false, true}) {
      one.backward();
      if (world.rank() == 1) {
        const torch::NoGradGuard no_grad;
        if (is_data) one.model->wide->bias.data()[0] = 7;
        if (!is_data) one.model->wide->bias[100] = 7;
      }
      const std::string text = "The parameter wide.bias was changed by something else";
      expect_error([&] { one.optimizer.step(); }, {text, "change_parameters()"});
      one.ddp.discard();
      expect_error([&] { one.backward(); }, {text});
      one.optimizer.zero_grad();
      one.ddp.rewrap();
      one.expect_trains();
    }
  });
}

TEST(ShardedRefuses, TensorsThatWereReplaced) {
  const TempFolder folder;
  on_two([&](const World& world, Shard mode) {
    Trained<> one(world, mode);
    one.expect_trains();
    const std::string path = folder.path() + "/model" + std::to_string(world.rank());
    torch::save(one.model, path);
    const std::string text = " is not in the memory that the ranks of a host share any more";
    const auto expect_refused = [&](const std::string& words) {
      expect_error([&] { one.backward(); }, {words, "rewrap()"});
      one.optimizer.zero_grad();
      one.ddp.rewrap();
      one.expect_trains();
    };
    at::Tensor& bias = one.model->last->bias;
    if (world.rank() == 0) bias.set_data(bias.detach().clone());
    expect_refused("last.bias" + text);
    torch::load(one.model, path);
    expect_refused(text);
    one.model->to(at::kDouble);
    expect_error(
        [&] { loss_of(one.model->forward(batch(world.rank()).to(at::kDouble))).backward(); },
        {"has other data than when it was wrapped"});
  });
}

TEST(ShardedRefuses, TrainingInAForkedChild) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    one.expect_trains();
    one.backward();
    const pid_t child = ::fork();
    if (child == 0) {
      ::_exit(has(error_of([&] { one.optimizer.step(); }), "was forked from one that trains") ? 0
                                                                                              : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    one.step();
    one.expect_trains();
  });
}

TEST(ShardedRefuses, StepsAfterTheWrapperHasGone) {
  on_two([](const World& world, Shard mode) {
    WideNet model;
    optim::Sharded<optim::AdamW> optimizer(model->parameters(), 1e-2);
    {
      const DistributedDataParallel ddp(model, world, {.shard = mode, .shard_min_bytes = 0});
      loss_of(model->forward(batch(world.rank()))).backward();
    }
    expect_error([&] { optimizer.step(); }, {"has gone", "Keep it as long as"});
    const DistributedDataParallel again(model, world, {.shard = mode, .shard_min_bytes = 0});
    optimizer.zero_grad();
    loss_of(model->forward(batch(world.rank()))).backward();
    optimizer.step();
  });
}

TEST(ShardedRefuses, AGraphFromBeforeAStep) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode);
    const at::Tensor old = one.loss(5);
    one.backward();
    one.step();
    try {
      old.backward();
      ADD_FAILURE() << "it was taken";
    } catch (const std::exception& error) {
      EXPECT_TRUE(has(error.what(), "modified by an inplace operation")) << error.what();
    }
    one.optimizer.zero_grad();
    one.expect_trains();
  });
}

// Before anything is written: the model stays usable.
TEST(ShardedRefuses, SparseGradientsThatItsOptimizerCannotTake) {
  on_two([](const World& world, Shard mode) {
    Trained<> one(world, mode, /*is_sparse=*/true);
    one.backward();
    const at::Tensor before = one.model->wide->weight.detach().clone();
    expect_error([&] { one.optimizer.step(); }, {"table.weight is sparse", "AdamW"});
    EXPECT_TRUE(one.model->wide->weight.equal(before));
    one.ddp.discard();
    optim::Sharded<torch::optim::Adagrad> right(one.model->parameters(), 1e-2);
    one.backward();
    right.step();
    EXPECT_FALSE(one.model->wide->weight.equal(before));
  });
}

}  // namespace
}  // namespace lockstep::test
