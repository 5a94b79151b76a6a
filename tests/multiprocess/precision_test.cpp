// Parameters of 16 bits: gradients that are added up in f32, and optimizers with f32 copies.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include "multiprocess/checkpoint_run.h"
#include "multiprocess/ddp_model.h"
#include "support/error_of.h"
#include "support/golden.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

class ReduceType : public testing::TestWithParam<std::pair<at::ScalarType, const char*>> {};
INSTANTIATE_TEST_SUITE_P(Types, ReduceType,
                         testing::Values(std::pair(at::kBFloat16, "shm"),
                                         std::pair(at::kHalf, "shm"),
                                         std::pair(at::kBFloat16, "gloo")));

// The mean, and sums over backwards, in f32 of what each backward gives in 16 bits.
TEST_P(ReduceType, AddsUpInF32) {
  const auto [type, engine] = GetParam();
  EXPECT_TRUE(all_passed(run_ranks(3, [&, type = type, engine = engine](int rank) {
    const World world = World::join({.engine = engine});
    Net model;
    model->to(type);
    DistributedDataParallel ddp(model, world, {.reduce_type = at::kFloat});
    const auto local = [&](int its_rank, int step) {
      Net alone;
      alone->to(type);
      loss_of(alone->forward(batch(its_rank, step).to(type))).backward();
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& one : alone->parameters()) {
        gradients.push_back(one.grad().to(at::kFloat));
      }
      return gradients;
    };
    for (const int num_backwards : {1, 3}) {
      model->zero_grad();
      ddp.accumulate(num_backwards);
      for (int i = 0; i < num_backwards; ++i) {
        loss_of(model->forward(batch(rank, i).to(type))).backward();
      }
      std::vector<at::Tensor> sums(model->parameters().size());
      for (int its_rank = 0; its_rank < 3; ++its_rank) {
        std::vector<at::Tensor> its = local(its_rank, 0);
        for (int i = 1; i < num_backwards; ++i) {
          const auto more = local(its_rank, i);
          for (std::size_t k = 0; k < its.size(); ++k) its[k] += more[k];
        }
        for (std::size_t k = 0; k < its.size(); ++k) {
          sums[k] = sums[k].defined() ? sums[k] + its[k] : its[k];
        }
      }
      for (std::size_t k = 0; k < sums.size(); ++k) {
        const at::Tensor grad = model->parameters()[k].grad();
        ASSERT_EQ(grad.scalar_type(), at::kFloat);
        // More digits than 16 bits have: 1e-6 of the largest.
        const auto largest = sums[k].abs().max().item<double>();
        EXPECT_LE((grad - sums[k] / 3).abs().max().item<double>(), 1e-6 * largest) << k;
        expect_same_bits(world, grad, "gradient");
      }
    }
    // LibTorch's own optimizers take such gradients, too.
    torch::optim::AdamW optimizer(model->parameters(), 1e-2);
    optimizer.step();
    expect_same_bits(world, *model);
  })));
}

TEST(ReduceTypeOption, IsTheSameAloneAndCheckedEverywhere) {
  EXPECT_TRUE(all_passed(run_ranks(1, [](int) {
    const World alone = World::join();
    Net model;
    model->to(at::kBFloat16);
    {
      const DistributedDataParallel ddp(model, alone, {.reduce_type = at::kFloat});
      loss_of(model->forward(batch(0).to(at::kBFloat16))).backward();
      EXPECT_EQ(model->first->weight.grad().scalar_type(), at::kFloat);
    }
    EXPECT_TRUE(has(error_of([&] {
                      const DistributedDataParallel bad(model, alone,
                                                        {.reduce_type = at::kBFloat16});
                    }),
                    "reduce_type is BFloat16."));
  })));
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    Net net;
    EXPECT_TRUE(has(error_of([&] {
                      DdpOptions options;
                      if (rank == 0) options.reduce_type = at::kDouble;
                      const DistributedDataParallel bad(net, world, options);
                    }),
                    "reduce_type Double"));
    // Wider parameters stay as they are.
    const DistributedDataParallel ddp(net, world, {.reduce_type = at::kFloat});
    loss_of(net->forward(batch(rank))).backward();
    EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
  })));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const nlohmann::json& options,
                                                        std::vector<at::Tensor> parameters) {
  const double lr = options["lr"];
  if (name == "AdamW") {
    auto one = std::make_unique<optim::AdamW>(std::move(parameters), lr);
    one->use_master_weights();
    return one;
  }
  if (name == "Adam") {
    auto one = std::make_unique<optim::Adam>(
        std::move(parameters),
        torch::optim::AdamOptions(lr).amsgrad(options.value("amsgrad", false)));
    one->use_master_weights();
    return one;
  }
  auto one = std::make_unique<optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(lr).momentum(options.value("momentum", 0.0)));
  one->use_master_weights();
  return one;
}

TEST(MasterWeights, StepAsPythonsOptimizerOnF32Copies) {
  const auto golden = read_golden("training_golden.json")["master_weights"];
  ASSERT_EQ(golden.size(), 4U);
  for (const auto& one : golden) {
    SCOPED_TRACE(one["name"].get<std::string>() + one["options"].dump());
    at::Tensor parameter = numbers({4, 6}, 3).to(at::kBFloat16).requires_grad_();
    auto optimizer = make_optimizer(one["name"], one["options"], {parameter});
    for (int step = 0; step < 50; ++step) {
      parameter.mutable_grad() = numbers({4, 6}, 20 + step).to(at::kBFloat16);
      optimizer->step();
    }
    const at::Tensor master = dynamic_cast<optim::MasterWeights&>(*optimizer).master_of(parameter);
    ASSERT_TRUE(master.defined());
    std::vector<float> masters;
    for (const auto& row : one["master"]) {
      for (const auto& value : row) masters.push_back(value.get<float>());
    }
    EXPECT_TRUE(at::allclose(master.view(-1), at::tensor(masters), 1e-6, 1e-7));
    EXPECT_TRUE(at::equal(parameter.detach(), master.to(at::kBFloat16)));
  }
}

// What is written to a parameter counts, also past its version counter; f32 ones have no copy.
TEST(MasterWeights, FollowWhatIsWrittenToTheParameter) {
  at::Tensor parameter = at::ones({8}, at::kBFloat16).requires_grad_();
  at::Tensor wide = at::ones({8}).requires_grad_();
  optim::SGD optimizer({parameter, wide}, 1e-3);
  optimizer.use_master_weights();
  const auto step = [&] {
    parameter.mutable_grad() = at::ones({8}, at::kBFloat16);
    wide.mutable_grad() = at::ones({8});
    optimizer.step();
  };
  for (int i = 0; i < 10; ++i) step();
  EXPECT_NEAR(parameter[0].item<double>(), 0.99, 0.004) << "without a copy it would be 1 for ever";
  EXPECT_FALSE(optimizer.master_of(wide).defined());
  EXPECT_NEAR(wide[0].item<double>(), 0.99, 1e-6);
  parameter.data().fill_(3);
  step();
  EXPECT_NEAR(optimizer.master_of(parameter)[0].item<double>(), 2.999, 1e-6);
  {
    const at::NoGradGuard no_grad;
    parameter.fill_(5);
  }
  step();
  EXPECT_NEAR(optimizer.master_of(parameter)[0].item<double>(), 4.999, 1e-6);
  EXPECT_TRUE(has(error_of([&] { optimizer.set_master(wide, at::ones({8})); }), "of 16 bits"));
}

// One row of many, and past the version counter.
TEST(MasterWeights, FollowWhatIsWrittenAnywhereInALargeParameter) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const bool is_turned : {false, true}) {
      at::Tensor table = at::ones({5000, 64}, type);
      if (is_turned) table = table.t();
      table.requires_grad_();
      optim::SGD optimizer({table}, 1e-4);
      optimizer.use_master_weights();
      const auto step = [&] {
        table.mutable_grad() = at::ones_like(table.detach());
        optimizer.step();
        return optimizer.master_of(table);
      };
      for (int i = 0; i < 3; ++i) step();
      EXPECT_NEAR(step()[0][0].item<double>(), 1 - 4e-4, 1e-6) << "small steps add up";
      table.data()[30][17].fill_(3);
      EXPECT_NEAR(step()[30][17].item<double>(), 3 - 1e-4, 1e-6);
      EXPECT_EQ(table[30][17].item<double>(), at::full({}, 3 - 1e-4).to(type).item<double>());
    }
  }
}

// Ranks that were given another's weights have its copies, too: none has more digits than others.
TEST(MasterWeights, AreTheSameOnAllRanksAfterJoinAndRewrap) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    Net model;
    model->to(at::kBFloat16);
    DistributedDataParallel ddp(model, world, {.check_every = 1, .reduce_type = at::kFloat});
    optim::SGD optimizer(model->parameters(), 0.05);
    optimizer.use_master_weights();
    const auto step = [&](int index) {
      optimizer.zero_grad();
      loss_of(model->forward(batch(rank, index).to(at::kBFloat16))).backward();
      optimizer.step();
    };
    const auto expect_same = [&](const std::string& what) {
      for (int i = 0; i < 3; ++i) step(10 + i);
      expect_same_bits(world, *model);
      for (const at::Tensor& one : model->parameters()) {
        expect_same_bits(world, optimizer.master_of(one), "master weights after " + what);
      }
    };
    for (int i = 0; i < (rank == 0 ? 6 : 1); ++i) step(i);
    ddp.join();
    expect_same("join()");
    if (rank == 1) {
      for (const at::Tensor& one : model->parameters()) one.data().add_(0.25);
    }
    ddp.rewrap();
    expect_same("rewrap()");
  })));
}

// The averager takes what the parameters are now, also where a rank has had no step yet.
TEST(MasterWeights, AreAveragedOnlyIfTheyAreOfThisParameter) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    at::Tensor written = at::ones({8}, at::kBFloat16).requires_grad_();
    at::Tensor stepped = at::ones({8}, at::kBFloat16).requires_grad_();
    optim::SGD optimizer({written, stepped}, 1e-3);
    optimizer.use_master_weights();
    PeriodicAverager averager(optimizer, world, {.period = 1});
    written.mutable_grad() = at::ones({8}, at::kBFloat16);
    if (rank == 0) stepped.mutable_grad() = at::ones({8}, at::kBFloat16);
    optimizer.step();
    EXPECT_TRUE(optimizer.master_of(written).defined());
    {
      const at::NoGradGuard no_grad;
      written.fill_(rank == 0 ? 2 : 5);
    }
    EXPECT_FALSE(optimizer.master_of(written).defined());
    EXPECT_TRUE(averager.step());
    EXPECT_EQ(written[0].item<double>(), 3.5);
    EXPECT_EQ(optimizer.master_of(written)[0].item<double>(), 3.5);
    EXPECT_NEAR(optimizer.master_of(stepped)[0].item<double>(), 1 - 0.5e-3, 1e-6);
    expect_same_bits(world, optimizer.master_of(stepped), "master weights");
  })));
}

// After join() without steps the copies of the ranks are out of date, and differ.
TEST(MasterWeights, ThatAreOutOfDateAreNotSaved) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    struct Run {
      explicit Run(const World& world)
          : ddp((model->to(at::kBFloat16), model), world, {.reduce_type = at::kFloat}),
            optimizer(model->parameters(), 0.05) {
        optimizer.use_master_weights();
      }
      void step(int its_rank, int index) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(its_rank, index).to(at::kBFloat16))).backward();
        optimizer.step();
      }
      Net model;
      DistributedDataParallel ddp;
      optim::SGD optimizer;
    };
    Run whole(world);
    Checkpointer first(folder.path(), world);
    first.add(whole.model).add(whole.optimizer);
    for (int i = 0; i < (rank == 0 ? 6 : 1); ++i) whole.step(rank, i);
    whole.ddp.join();
    first.save(6);
    Run again(world);
    Checkpointer second(folder.path() + "/again", world);
    second.add(again.model).add(again.optimizer);
    EXPECT_EQ(second.load(folder.path() + "/0-step-6").step, 6);
    for (Run* const one : {&whole, &again}) {
      for (int i = 6; i < 9; ++i) one->step(rank, i);
    }
    for (std::size_t i = 0; i < whole.model->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(whole.optimizer.master_of(whole.model->parameters()[i]),
                            again.optimizer.master_of(again.model->parameters()[i])));
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

class MasterCheckpoint : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, MasterCheckpoint, testing::Values("AdamW", "Adam", "SGD"));

TEST_P(MasterCheckpoint, GoesOnWithTheSameBits) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join();
    struct Run {
      Run(const World& its_world, const std::string& name)
          : ddp((model->to(at::kBFloat16), model), its_world, {.reduce_type = at::kFloat}),
            optimizer(make_optimizer(name, {{"lr", 1e-3}}, model->parameters())) {}
      void step(int its_rank, int index) {
        optimizer->zero_grad();
        loss_of(model->forward(batch(its_rank, index).to(at::kBFloat16))).backward();
        optimizer->step();
      }
      Net model;
      DistributedDataParallel ddp;
      std::unique_ptr<torch::optim::Optimizer> optimizer;
    };
    Run whole(world, GetParam());
    for (int i = 0; i < 9; ++i) whole.step(rank, i);
    expect_same_bits(world, *whole.model);
    {
      Run first(world, GetParam());
      Checkpointer checkpoints(folder.path(), world);
      checkpoints.add(first.model).add(*first.optimizer).add(first.ddp);
      for (int i = 0; i < 5; ++i) first.step(rank, i);
      checkpoints.save(5);
    }
    Run second(world, GetParam());
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(second.model).add(*second.optimizer).add(second.ddp);
    EXPECT_EQ(checkpoints.load_latest().step, 5);
    for (int i = 5; i < 9; ++i) second.step(rank, i);
    for (std::size_t i = 0; i < whole.model->parameters().size(); ++i) {
      const auto& mine = dynamic_cast<optim::MasterWeights&>(*second.optimizer);
      const auto& its = dynamic_cast<optim::MasterWeights&>(*whole.optimizer);
      EXPECT_TRUE(at::equal(mine.master_of(second.model->parameters()[i]),
                            its.master_of(whole.model->parameters()[i])));
    }
    // Who does not use them here is told.
    Checkpointer others(folder.path() + "/others", world);
    optim::SGD plain(second.model->parameters(), 1e-3);
    optim::AdamW plain_adam(second.model->parameters(), 1e-3);
    if (GetParam() == "Adam") return;
    others.add(second.model);
    if (GetParam() == "SGD") {
      others.add(plain);
    } else {
      others.add(plain_adam);
    }
    EXPECT_TRUE(has(error_of([&] { others.load(folder.path() + "/0-step-5"); }),
                    "the file has master weights, and use_master_weights() was not called"));
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST_P(MasterCheckpoint, IsExactAlsoIfLoadedBeforeTheModelIsWrapped) {
  const TempFolder folder("LOCKSTEP_TEST_FOLDER");
  const auto body = [&](int rank) {
    const World world = World::join();
    struct Run {
      explicit Run(const std::string& name)
          : optimizer(make_optimizer(name, {{"lr", 1e-3}},
                                     (model->to(at::kBFloat16), model->parameters()))) {}
      at::Tensor master_of(std::size_t i) {
        return dynamic_cast<optim::MasterWeights&>(*optimizer).master_of(model->parameters()[i]);
      }
      void train(const World& its_world, int from, int to) {
        if (!ddp) ddp.emplace(model, its_world, DdpOptions{.reduce_type = at::kFloat});
        for (int i = from; i < to; ++i) {
          optimizer->zero_grad();
          loss_of(model->forward(batch(its_world.rank(), i).to(at::kBFloat16))).backward();
          optimizer->step();
        }
      }
      Net model;
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      std::optional<DistributedDataParallel> ddp;
    };
    Run whole(GetParam());
    Checkpointer first(folder.path(), world);
    first.add(whole.model).add(*whole.optimizer);
    whole.train(world, 0, 5);
    first.save(5);
    whole.train(world, 5, 9);
    Run again(GetParam());
    Checkpointer second(folder.path() + "/again", world);
    second.add(again.model).add(*again.optimizer);
    second.load(folder.path() + "/0-step-5");
    again.train(world, 5, 9);
    for (std::size_t i = 0; i < whole.model->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(whole.master_of(i), again.master_of(i))) << i;
    }
    // If one rank's weights are others, all ranks make new copies.
    if (rank == 1) again.model->first->weight.data().add_(0.25);
    again.ddp.reset();
    again.ddp.emplace(again.model, world);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_FALSE(again.master_of(i).defined()) << i;
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

}  // namespace
}  // namespace lockstep::test
