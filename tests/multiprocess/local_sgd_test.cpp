// Post-local SGD as a training has it: steps that are averaged, then ranks or parts that train
// apart, and averages of their weights.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include "multiprocess/ddp_model.h"
#include "support/error_of.h"
#include "support/golden.h"
#include "support/golden_tensor.h"
#include "support/has.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

struct LocalTraining {
  LocalTraining(const World& its_world, const PostLocalSgdOptions& options)
      : world(its_world),
        ddp(model, world, {.check_every = 1, .hook = post_local_sgd_hook(options)}),
        optimizer(parameters(model), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  static std::vector<at::Tensor> parameters(torch::nn::Linear& net) {
    const at::NoGradGuard no_grad;
    net->weight.copy_(0.3 * numbers({3, 6}, 1));
    net->bias.copy_(0.3 * numbers({3}, 2));
    return net->parameters();
  }

  template <typename Averager>
  auto step(Averager& averager) {
    optimizer.zero_grad();
    loss_of(model->forward(batch(world.rank(), num_steps++))).backward();
    optimizer.step();
    return averager.step();
  }

  // The weights after each step are Python's.
  template <typename Averager>
  void expect_pythons(Averager& averager, const nlohmann::json& golden) {
    for (std::size_t i = 0; i < golden[0].size(); ++i) {
      SCOPED_TRACE(i);
      step(averager);
      expect_close(model->weight, golden[static_cast<std::size_t>(world.rank())][i]);
    }
  }

  World world;
  int num_steps = 0;
  torch::nn::Linear model{6, 3};
  DistributedDataParallel ddp;
  optim::SGD optimizer;
};

PostLocalSgdOptions apart(std::int64_t start_step) {
  return {.start_step = start_step, .averages_in_part = false};
}

const PeriodicOptions kEveryTwo{.start_step = 3, .period = 2};

TEST(LocalSgd, IsPythons) {
  const auto golden = read_golden("training_golden.json")["post_local_sgd"];
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const World world = World::join();
    LocalTraining training(world, apart(3));
    PeriodicAverager averager(training.optimizer, world, kEveryTwo);
    training.expect_pythons(averager, golden);
    const at::Tensor all = world.all_gather(training.model->weight.detach());
    EXPECT_FALSE(at::equal(all[0], all[1])) << "ranks train apart";
  })));
}

// Ranks of a part stay equal, which check_every looks at in each step, and those of two differ.
TEST(LocalSgd, OfPartsIsPythons) {
  const auto golden = read_golden("training_golden.json")["local_sgd_of_four"]["parts"];
  EXPECT_TRUE(all_passed(run_ranks(4, [&](int rank) {
    const World world = World::join();
    const auto part = world.split(rank / 2);
    LocalTraining training(world, {.start_step = 3, .part = part});
    PeriodicAverager averager(training.optimizer, world, kEveryTwo);
    training.expect_pythons(averager, golden);
    expect_same_bits(*part, *training.model);
    const at::Tensor all = world.all_gather(training.model->weight.detach());
    EXPECT_FALSE(at::equal(all[0], all[2])) << "parts train apart";
    EXPECT_EQ(training.ddp.stats().bytes_sent, training.ddp.stats().bytes);
  })));
}

// The same numbers, with the ranks of a host as the part that nobody has named.
TEST(LocalSgd, OfHostsIsPythons) {
  const auto golden = read_golden("training_golden.json")["local_sgd_of_four"]["parts"];
  const auto body = [&](int) {
    const World world = World::join();
    LocalTraining training(world, {.start_step = 3});
    PeriodicAverager averager(training.optimizer, world, kEveryTwo);
    training.expect_pythons(averager, golden);
  };
  EXPECT_TRUE(all_passed(run_ranks(4, body, on_hosts("aabb"))));
}

// On one host the part is the world: nothing is local, and any step can be saved.
TEST(LocalSgd, OfOneHostAveragesAllGradients) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    LocalTraining training(world, {.start_step = 1});
    PeriodicAverager averager(training.optimizer, world, {.start_step = 100});
    for (int i = 0; i < 4; ++i) training.step(averager);
    expect_same_bits(world, *training.model);
    training.ddp.check_replicas();
  })));
}

TEST(LocalSgd, InLevelsIsPythons) {
  const auto golden = read_golden("training_golden.json")["local_sgd_of_four"]["levels"];
  EXPECT_TRUE(all_passed(run_ranks(4, [&](int rank) {
    const World world = World::join();
    const HierarchicalOptions levels{.start_step = 3, .levels = {{2, 2}, {4, 4}}};
    LocalTraining training(world, apart(3));
    HierarchicalAverager averager(training.optimizer, world, levels);
    training.expect_pythons(averager, golden);
    EXPECT_EQ(averager.steps(), 9);
    for (const int ranks : {0, 2, 0, 4, 0, 2, 0, 4}) EXPECT_EQ(training.step(averager), ranks);
    expect_same_bits(world, training.model->weight, "after an average over all");
    EXPECT_EQ(training.step(averager), 0);
    EXPECT_EQ(training.step(averager), 2);
    expect_same_bits(*world.split(rank / 2), training.model->weight, "within a group");
    const at::Tensor all = world.all_gather(training.model->weight.detach());
    EXPECT_FALSE(at::equal(all[0], all[2])) << "two groups";
  })));
}

template <typename Averager>
void add_all(Checkpointer& checkpoints, LocalTraining& training, Averager& averager) {
  checkpoints.add(training.model).add(training.optimizer).add(training.ddp).add(averager);
}

TEST(LocalSgd, GoesOnFromACheckpointAfterAnAverage) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int) {
    const World world = World::join();
    PeriodicOptions options = kEveryTwo;
    options.averages_state = true;
    LocalTraining whole(world, apart(3));
    PeriodicAverager its_averager(whole.optimizer, world, options);
    for (int i = 0; i < 11; ++i) whole.step(its_averager);
    {
      LocalTraining first(world, apart(3));
      PeriodicAverager averager(first.optimizer, world, options);
      WeightAverage average(first.model);
      Checkpointer checkpoints(folder.path(), world);
      add_all(checkpoints, first, averager);
      checkpoints.add(average, "average");
      for (int i = 0; i < 5; ++i) {
        if (first.step(averager)) average.update();  // after the others ranks differ
      }
      EXPECT_TRUE(has(error_of([&] { checkpoints.save(5); }), "is not the same on rank 0"));
      EXPECT_TRUE(first.step(averager));
      checkpoints.save(6);
    }
    LocalTraining second(world, apart(3));
    PeriodicAverager averager(second.optimizer, world, options);
    WeightAverage average(second.model);
    Checkpointer checkpoints(folder.path(), world);
    add_all(checkpoints, second, averager);
    checkpoints.add(average, "average");
    second.num_steps = static_cast<int>(checkpoints.load_latest().step);
    EXPECT_EQ(averager.steps(), 6);
    for (int i = 6; i < 11; ++i) second.step(averager);
    EXPECT_TRUE(at::equal(second.model->weight, whole.model->weight));
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST(LocalSgd, InPartsAndLevelsGoesOnFromACheckpoint) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join();
    const PostLocalSgdOptions parts{.start_step = 1, .part = world.split(rank / 2)};
    const HierarchicalOptions levels{
        .start_step = 1, .levels = {{2, 2}, {4, 4}}, .averages_state = true};
    LocalTraining whole(world, parts);
    HierarchicalAverager its_averager(whole.optimizer, world, levels);
    for (int i = 0; i < 8; ++i) whole.step(its_averager);
    {
      LocalTraining first(world, parts);
      HierarchicalAverager averager(first.optimizer, world, levels);
      Checkpointer checkpoints(folder.path(), world);
      add_all(checkpoints, first, averager);
      for (int i = 0; i < 3; ++i) first.step(averager);
      EXPECT_TRUE(has(error_of([&] { checkpoints.save(3); }), "is not the same on rank 0"));
      first.step(averager);
      EXPECT_EQ(first.step(averager), 4);
      checkpoints.save(5);
    }
    LocalTraining second(world, parts);
    HierarchicalAverager averager(second.optimizer, world, levels);
    Checkpointer checkpoints(folder.path(), world);
    add_all(checkpoints, second, averager);
    second.num_steps = static_cast<int>(checkpoints.load_latest().step);
    for (int i = 5; i < 8; ++i) second.step(averager);
    EXPECT_TRUE(at::equal(second.model->weight, whole.model->weight));
  };
  EXPECT_TRUE(all_passed(run_ranks(4, body, {.variables = folder.variables()})));
}

// One that had a gradient in a step before, and has none where the average is due.
TEST(LocalSgd, AveragesParametersWithoutAGradientNow) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    auto first = torch::ones({3}).requires_grad_();
    auto second = torch::ones({3}).requires_grad_();
    auto frozen = torch::full({3}, static_cast<double>(rank));
    DistributedDataParallel ddp({{"first", first}, {"second", second}}, world,
                                {.hook = post_local_sgd_hook(apart(0))});
    optim::SGD optimizer({first, second, frozen}, 0.5);
    PeriodicAverager averager(optimizer, world, {.period = 2});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      at::Tensor loss = first.sum();
      if (step == 1) loss = loss + second.sum();
      (loss * static_cast<double>(rank)).backward();
      optimizer.step();
      EXPECT_EQ(averager.step(), step != 1);
    }
    EXPECT_TRUE(at::equal(second.detach(), at::full({3}, 0.75))) << second;
    expect_same_bits(world, first, "first");
    EXPECT_EQ(frozen[0].item<double>(), rank);
  })));
}

// What is wrong on one rank, or on all, is one error on all of them, and nobody waits.
TEST(LocalSgd, AveragersRefuseWhatMakesNoSenseOnAllRanks) {
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    optim::SGD optimizer({torch::ones({3}).requires_grad_()}, 0.5);
    const auto periodic = [&](const PeriodicOptions& options) {
      return error_of([&] { PeriodicAverager(optimizer, world, options); });
    };
    const auto of_levels = [&](const std::vector<AveragingLevel>& levels) {
      return error_of([&] { HierarchicalAverager(optimizer, world, {.levels = levels}); });
    };
    EXPECT_TRUE(has(periodic({.period = 0}), "period is 0"));
    EXPECT_TRUE(has(periodic({.start_step = -1}), "start_step is -1"));
    const std::string differs = periodic({.period = rank == 2 ? 3 : 4});
    EXPECT_TRUE(has(differs, "rank 0: start_step 0, averages_state false, period 4")) << differs;
    EXPECT_TRUE(has(differs, "rank 2: start_step 0, averages_state false, period 3")) << differs;
    EXPECT_TRUE(has(of_levels({}), "The levels are none, in a world of 4"));
    EXPECT_TRUE(has(of_levels({{2, 3}, {4, 4}}), "{2, 3}, {4, 4}, in a world of 4"));
    EXPECT_TRUE(has(of_levels({{2, 2}}), "the last one has 4"));
    EXPECT_TRUE(has(of_levels({{4, 2}, {2, 4}}), "Give each a longer period"));
    EXPECT_TRUE(has(of_levels({{0, 2}, {2, 4}}), "Give each a longer period"));
    EXPECT_TRUE(has(of_levels({{2, rank == 3 ? 1 : 2}, {4, 4}}), "levels {2, 1}, {4, 4}"));
    HierarchicalAverager averager(optimizer, world, {.levels = {{4, 4}}});
    EXPECT_TRUE(has(error_of([&] { averager.load_steps(-1); }), "-1 steps"));
    torch::optim::Adagrad other({torch::ones({3}).requires_grad_()});
    EXPECT_TRUE(has(error_of([&] { PeriodicAverager(other, world, {.averages_state = true}); }),
                    "cannot be averaged"));
    EXPECT_EQ(world.sum(1), 4) << "the world is as it was";
  })));
}

}  // namespace
}  // namespace lockstep::test
