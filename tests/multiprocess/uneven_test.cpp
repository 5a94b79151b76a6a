// Ranks that are out of data: several models at once, and Python's two options.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include "multiprocess/ddp_model.h"
#include "support/error_of.h"
#include "support/golden.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

int num_steps_of(int rank) { return 2 + rank; }

// One process that does what all ranks do: the mean over those that have data, or, with `divide`,
// over all.
struct Reference {
  explicit Reference(int its_size, bool its_divide = false) : size(its_size), divide(its_divide) {}

  void train(Net& model, torch::optim::Optimizer& optimizer, int seed) const {
    for (int step = 0; step < num_steps_of(size - 1); ++step) {
      optimizer.zero_grad();
      int num_active = 0;
      at::Tensor sum;
      for (int rank = 0; rank < size; ++rank) {
        if (step >= num_steps_of(rank)) continue;
        ++num_active;
        const at::Tensor loss = loss_of(model->forward(batch(rank + seed, step)));
        sum = sum.defined() ? sum + loss : loss;
      }
      (sum / (divide ? size : num_active)).backward();
      optimizer.step();
    }
  }

  int size;
  bool divide;
};

void expect_close(const Net& left, const Net& right) {
  for (std::size_t i = 0; i < left->parameters().size(); ++i) {
    EXPECT_TRUE(at::allclose(left->parameters()[i], right->parameters()[i], 1e-4, 1e-5)) << i;
  }
}

enum class Kind { kInTurn, kOneLoss, kOneLossWithHooks, kWithoutSteps };
class JoinModels : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, JoinModels,
                         testing::Values(Kind::kInTurn, Kind::kOneLoss, Kind::kOneLossWithHooks,
                                         Kind::kWithoutSteps));

TEST_P(JoinModels, PlaysOutTheStepsOfAll) {
  EXPECT_TRUE(all_passed(run_ranks(3, [kind = GetParam()](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    Net a;
    Net b;
    const auto hook = [&] { return kind == Kind::kOneLossWithHooks ? fp16_hook() : nullptr; };
    DistributedDataParallel first(a, world, {.check_every = 1, .hook = hook()});
    DistributedDataParallel second(b, world, {.check_every = 1, .hook = hook()});
    torch::optim::SGD first_optimizer(a->parameters(), 0.1);
    torch::optim::SGD second_optimizer(b->parameters(), 0.1);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int step = 0; step < num_steps_of(rank); ++step) {
        first_optimizer.zero_grad();
        second_optimizer.zero_grad();
        const at::Tensor loss = loss_of(a->forward(batch(rank, step)));
        if (kind == Kind::kInTurn) {
          loss.backward();
          first_optimizer.step();
          loss_of(b->forward(batch(rank + 7, step))).backward();
        } else {
          (loss + loss_of(b->forward(batch(rank + 7, step)))).backward();
          first_optimizer.step();
        }
        second_optimizer.step();
      }
      if (kind == Kind::kWithoutSteps) {
        join({&first, &second});
      } else {
        join({&first, &second}, [&] {
          first_optimizer.step();
          second_optimizer.step();
        });
      }
      expect_same_bits(world, *a);
      expect_same_bits(world, *b);
    }
    if (kind == Kind::kOneLossWithHooks) return;
    const Reference reference(3);
    Net one;
    Net two;
    torch::optim::SGD its_first(one->parameters(), 0.1);
    torch::optim::SGD its_second(two->parameters(), 0.1);
    for (int epoch = 0; epoch < 2; ++epoch) {
      reference.train(one, its_first, 0);
      reference.train(two, its_second, 7);
    }
    expect_close(a, one);
    expect_close(b, two);
  })));
}

TEST(UnevenJoin, DividesByTheInitialWorldSizeIfAsked) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    for (const double weight : {1.0, 4.0}) {
      Net model;
      DistributedDataParallel ddp(model, world);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < num_steps_of(rank); ++step) {
        optimizer.zero_grad();
        ddp.set_weight(weight);
        loss_of(model->forward(batch(rank, step))).backward();
        optimizer.step();
      }
      ddp.join([&] { optimizer.step(); }, {.divide_by_initial_world_size = true});
      Net alone;
      torch::optim::SGD its_optimizer(alone->parameters(), 0.1);
      Reference(3, true).train(alone, its_optimizer, 0);
      expect_same_bits(world, *model);
      expect_close(model, alone);
    }
  })));
}

TEST(UnevenJoin, DividesAsPythons) {
  const auto golden = read_golden("training_golden.json")["uneven"];
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join();
    for (const bool divides : {true, false}) {
      torch::nn::Linear model(6, 3);
      {
        const at::NoGradGuard no_grad;
        model->weight.copy_(0.3 * numbers({3, 6}, 1));
        model->bias.copy_(0.3 * numbers({3}, 2));
      }
      DistributedDataParallel ddp(model, world);
      optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 2 + 2 * rank; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(rank, step))).backward();
        optimizer.step();
      }
      ddp.join([&] { optimizer.step(); }, {.divide_by_initial_world_size = divides});
      const auto& expected = golden[divides ? "true" : "false"];
      for (std::int64_t row = 0; row < 3; ++row) {
        for (std::int64_t column = 0; column < 6; ++column) {
          EXPECT_NEAR(model->weight[row][column].item<double>(),
                      expected[static_cast<std::size_t>(row)][static_cast<std::size_t>(column)]
                          .get<double>(),
                      1e-6);
        }
      }
    }
  })));
}

// Two models that are trained in one loss, or each in its own.
enum class Hooks { kNone, kBoth, kSecond };
struct Pair {
  bool is_one_loss = false;
  Hooks hooks = Hooks::kNone;
  bool begins_empty = false;  // rank 1 has no data before its first join()
};

struct PairOfModels {
  PairOfModels(const Pair& pair, const World& world)
      : is_one_loss(pair.is_one_loss),
        first(a, world, options(pair.hooks == Hooks::kBoth)),
        second(b, world, options(pair.hooks != Hooks::kNone)) {}

  // Buckets are full in the middle of backward.
  static DdpOptions options(bool has_hook) {
    return {
        .bucket_bytes = 256, .first_bucket_bytes = 64, .hook = has_hook ? fp16_hook() : nullptr};
  }

  void train(int rank, int step) {
    a->zero_grad();
    b->zero_grad();
    const at::Tensor loss = loss_of(a->forward(batch(rank, step)));
    const at::Tensor other = loss_of(b->forward(batch(rank + 7, step)));
    if (is_one_loss) return (loss + other).backward();
    loss.backward();
    other.backward();
  }

  // Both are averaged, in the same step.
  void expect_means(int rank, int step) {
    train(rank, step);
    const auto means = [&](int seed) {
      return mean_gradients(3, [&](Net& local, int its_rank) {
        loss_of(local->forward(batch(its_rank + seed, step))).backward();
      });
    };
    expect_gradients(a, means(0), 1e-2);
    expect_gradients(b, means(7), 1e-2);
  }

  bool is_one_loss;
  Net a;
  Net b;
  DistributedDataParallel first;
  DistributedDataParallel second;
};

class JoinFails : public testing::TestWithParam<Pair> {};
INSTANTIATE_TEST_SUITE_P(
    Pairs, JoinFails,
    testing::Values(Pair{}, Pair{.hooks = Hooks::kBoth}, Pair{.begins_empty = true},
                    Pair{.is_one_loss = true}, Pair{.is_one_loss = true, .hooks = Hooks::kBoth},
                    Pair{.is_one_loss = true, .begins_empty = true},
                    Pair{.is_one_loss = true, .hooks = Hooks::kBoth, .begins_empty = true},
                    Pair{.is_one_loss = true, .hooks = Hooks::kSecond, .begins_empty = true}),
    [](const auto& one) {
      const Hooks hooks = one.param.hooks;
      return std::string(one.param.is_one_loss ? "OneLoss" : "InTurn") +
             (hooks == Hooks::kBoth     ? "WithHooks"
              : hooks == Hooks::kSecond ? "WithASecondHook"
                                        : "") +
             (one.param.begins_empty ? "BeginsEmpty" : "");
    });

TEST_P(JoinFails, IfOneIsOutOfDataAndThatIsAsked) {
  EXPECT_TRUE(all_passed(run_ranks(3, [pair = GetParam()](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    PairOfModels models(pair, world);
    const auto train = [&](int num_steps) {
      for (int step = 0; step < num_steps; ++step) models.train(rank, step);
      join({&models.first, &models.second}, [] {}, {.throw_on_early_termination = true});
    };
    if (!pair.begins_empty) {
      EXPECT_EQ(error_of([&] { train(3); }), "no error") << "all at the same time";
    }
    const int few = pair.begins_empty ? 0 : 2;
    const std::string error = error_of([&] { train(rank == 1 ? few : 4); });
    EXPECT_TRUE(has(error, "Rank 1 is out of data and others are not")) << error;
    EXPECT_FALSE(models.a->first->weight.grad().defined()) << "the step is dropped";
    world.barrier();  // nobody waits for a model any more
    EXPECT_EQ(error_of([&] { train(2); }), "no error") << "all ranks can go on";
    models.expect_means(rank, 5);
  })));
}

TEST_P(JoinFails, IfAnotherRankHasAProblem) {
  EXPECT_TRUE(all_passed(run_ranks(3, [pair = GetParam()](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    PairOfModels models(pair, world);
    for (int step = 0; step < (pair.begins_empty ? 0 : 2); ++step) models.train(rank, step);
    const std::string error = error_of([&] {
      if (rank == 1) return join({&models.first, &models.second}, [] {});
      if (!pair.begins_empty) models.train(rank, 2);
      if (rank == 0) models.a->left->weight.requires_grad_(false);
      models.train(rank, 3);
    });
    EXPECT_TRUE(has(error, "left.weight")) << error;
    models.a->left->weight.requires_grad_(true);
    world.barrier();  // nobody waits for a model any more
    models.expect_means(rank, 5);
  })));
}

// Nobody has told rank 1 whether these models share a loss, so it has begun both when the first one
// fails: the others come to the second in their next step.
TEST(UnevenJoin, AModelThatStaysBegunSaysWhy) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    PairOfModels models({.hooks = Hooks::kBoth}, world);
    const std::string first = error_of([&] {
      if (rank != 1) return models.train(rank, 0);
      join({&models.first, &models.second}, [] {}, {.throw_on_early_termination = true});
    });
    EXPECT_TRUE(has(first, "Rank 1 is out of data and others are not")) << first;
    world.barrier();
    const std::string second = error_of([&] { models.train(rank, 1); });
    EXPECT_TRUE(has(second, "Its join() had begun this step together with another model's"))
        << second;
    world.barrier();
    models.expect_means(rank, 5);
  })));
}

TEST(UnevenJoin, TakesEachModelOnce) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    Net model;
    DistributedDataParallel ddp(model, world);
    EXPECT_TRUE(has(error_of([&] { join({&ddp, &ddp}); }), "is there twice"));
    EXPECT_TRUE(has(error_of([&] { join({&ddp, nullptr}); }), "is a null pointer"));
  })));
}

}  // namespace
}  // namespace lockstep::test
