// SyncBatchNorm equals BatchNorm on one batch made of all ranks': outputs, gradients, running
// statistics, for layers that the model holds in any way.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <lockstep/error.h>
#include <lockstep/sync_batch_norm.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "support/golden.h"
#include "support/golden_tensor.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace nn = torch::nn;

struct NetImpl : nn::Module {
  NetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("rest", rest);
  }
  at::Tensor forward(const at::Tensor& input) {
    return rest->forward(torch::relu(norm(conv(input))).flatten(1));
  }
  nn::Conv2d conv{nn::Conv2dOptions(2, 3, 3)};
  nn::BatchNorm2d norm{nn::BatchNorm2d(nn::BatchNormOptions(3).momentum(0.3))};
  nn::Sequential rest{nn::Linear(12, 5), nn::BatchNorm1d(5), nn::Linear(5, 1)};
};
TORCH_MODULE(Net);

std::int64_t rows_of(int rank) { return 2 + rank; }

at::Tensor rows(int rank, int step) {
  at::manual_seed(static_cast<std::uint64_t>(100 * step + rank));
  return at::randn({rows_of(rank), 2, 4, 4}) * (1 + rank) + 3 * rank;
}

TEST(SyncBatchNorm, EqualsBatchNormOnTheWholeBatch) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    at::manual_seed(1);
    Net model;
    at::manual_seed(1);
    Net whole;
    const SyncBatchNorm sync(model, world);
    EXPECT_EQ(sync.num_layers(), 2);
    DistributedDataParallel ddp(model, world, {.buffers = BufferSync::kOff});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    torch::optim::SGD its_optimizer(whole->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> all;
      std::int64_t before = 0;
      for (int one = 0; one < world.size(); ++one) {
        if (one < rank) before += rows_of(one);
        all.push_back(rows(one, step));
      }
      at::Tensor mine = rows(rank, step).requires_grad_();
      const at::Tensor together = at::cat(all).requires_grad_();
      optimizer.zero_grad();
      its_optimizer.zero_grad();
      const at::Tensor output = model->forward(mine);
      const at::Tensor expected = whole->forward(together);
      EXPECT_TRUE(at::allclose(output, expected.narrow(0, before, rows_of(rank)), 1e-4, 1e-5));
      expected.pow(2).mean().backward();
      // Ranks have different numbers of rows: each loss is its part of the whole one's mean.
      (output.pow(2).sum() *
       (static_cast<double>(world.size()) / static_cast<double>(expected.numel())))
          .backward();
      const auto named = model->named_parameters();
      for (const auto& item : whole->named_parameters()) {
        EXPECT_TRUE(at::allclose(named[item.key()].grad(), item.value().grad(), 1e-3, 1e-5))
            << item.key() << " step " << step;
      }
      optimizer.step();
      its_optimizer.step();
    }
    const auto buffers = model->named_buffers();
    for (const auto& item : whole->named_buffers()) {
      EXPECT_TRUE(at::allclose(buffers[item.key()], item.value(), 1e-3, 1e-5)) << item.key();
    }
    ddp.check_replicas();
    // In eval nothing is synchronised: one rank may do it alone.
    if (rank == 0) {
      model->eval();
      whole->eval();
      EXPECT_TRUE(at::allclose(model->forward(rows(0, 9)), whole->forward(rows(0, 9)), 1e-3, 1e-4));
    }
    world.barrier();
  })));
}

TEST(SyncBatchNorm, IsPythonsBatchNormOnTheWholeBatch) {
  const auto golden = read_golden("kit_golden.json").at("batch_norm");
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join();
    at::manual_seed(4);
    const std::int64_t begin = rank == 0 ? 0 : 4;
    const std::int64_t count = rank == 0 ? 4 : 3;
    const auto own = [&](const at::Tensor& all) { return all.narrow(0, begin, count); };
    auto input = own(at::randn({7, 3})).clone().requires_grad_();
    const at::Tensor factors = own(at::randn({7, 3}));
    nn::BatchNorm1d layer(3);
    const SyncBatchNorm sync(layer, world);
    const at::Tensor output = layer(input);
    (output * factors).sum().backward();
    const auto expect = [&](const at::Tensor& actual, const at::Tensor& expected) {
      EXPECT_TRUE(at::allclose(actual, expected, 1e-4, 1e-5)) << actual << "\n" << expected;
    };
    expect(output, own(to_tensor(golden["output"])));
    expect(input.grad(), own(to_tensor(golden["gradient"])));
    expect(world.all_reduce(layer->weight.grad().clone()), to_tensor(golden["weight"]));
    expect(world.all_reduce(layer->bias.grad().clone()), to_tensor(golden["bias"]));
    expect(layer->running_mean, to_tensor(golden["mean"]));
    expect(layer->running_var, to_tensor(golden["variance"]));
  })));
}

TEST(SyncBatchNorm, OthersStayAsTheyAre) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    nn::BatchNorm1d mine(4);
    nn::BatchNorm1d other(4);
    const at::Tensor input = at::randn({8, 4}) + rank;
    const at::Tensor alone = other(input);
    {
      const SyncBatchNorm sync(mine, world);
      EXPECT_TRUE(at::equal(nn::BatchNorm1d(4)(input), alone));
      EXPECT_FALSE(at::allclose(mine(input), alone));
      EXPECT_THROW(SyncBatchNorm(mine, world), UsageError);  // twice
      EXPECT_FALSE(at::allclose(mine(input), alone));
    }
    EXPECT_TRUE(at::equal(mine(input), alone));  // it is over
    nn::BatchNorm1d bare(nn::BatchNormOptions(4).affine(false).track_running_stats(false));
    EXPECT_THROW(SyncBatchNorm(bare, world), UsageError);
    nn::BatchNorm1d running(nn::BatchNormOptions(4).affine(false));
    const SyncBatchNorm by_statistics(running, world);
    EXPECT_FALSE(at::allclose(running(input), alone));
  })));
}

// A mean that is rounded to bf16 would be wrong by a tenth of the deviation here.
TEST(SyncBatchNorm, ComputesInF32With16Bits) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    for (const auto type : {at::kBFloat16, at::kHalf}) {
      at::manual_seed(5);
      const at::Tensor all = (at::randn({64, 4}) * 0.1 + 3.006).to(type);
      nn::BatchNorm1d whole(4);
      nn::BatchNorm1d mine(4);
      const SyncBatchNorm sync(mine, world);
      auto together = all.clone().requires_grad_();
      auto part = all.narrow(0, 32 * rank, 32).clone().requires_grad_();
      const at::Tensor factors = at::randn({64, 4});
      const at::Tensor expected = whole(together);
      const at::Tensor output = mine(part);
      EXPECT_EQ(output.scalar_type(), type);
      EXPECT_TRUE(at::allclose(output.to(at::kFloat),
                               expected.narrow(0, 32 * rank, 32).to(at::kFloat), 1e-2, 1e-2));
      EXPECT_TRUE(at::allclose(mine->running_mean, whole->running_mean, 1e-5, 1e-6));
      EXPECT_TRUE(at::allclose(mine->running_var, whole->running_var, 1e-4, 1e-6));
      (expected * factors).sum().backward();
      (output * factors.narrow(0, 32 * rank, 32)).sum().backward();
      EXPECT_TRUE(at::allclose(part.grad().to(at::kFloat),
                               together.grad().narrow(0, 32 * rank, 32).to(at::kFloat), 3e-2, 0.1));
    }
  })));
}

// Without running statistics eval() uses those of the batch: of the rank's own.
TEST(SyncBatchNorm, InEvalNobodyWaits) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    nn::BatchNorm1d layer(nn::BatchNormOptions(4).track_running_stats(false));
    const SyncBatchNorm sync(layer, world);
    layer->eval();
    const at::Tensor input = at::randn({8, 4});
    if (rank == 0) {
      EXPECT_TRUE(at::allclose(layer(input), nn::BatchNorm1d(4)(input)));
    }
    world.barrier();
  })));
}

std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// LibTorch refuses it before lockstep is asked, on the rank that has it.
TEST(SyncBatchNorm, ABatchOfOneRowIsRefusedOnAllRanks) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    const auto call = [](nn::BatchNorm1d& layer, int rows) { layer(at::randn({rows, 4})); };
    nn::BatchNorm1d layer(4);
    // It ends with the exception.
    const std::string unwound = text_of([&] {
      const SyncBatchNorm sync(layer, world);
      call(layer, 8);
      call(layer, rank == 1 ? 1 : 8);
    });
    EXPECT_NE(unwound.find(rank == 1 ? "Expected more than 1 value per channel"
                                     : "Rank 1 could not call the layer"),
              std::string::npos)
        << unwound;
    // It is left out, and the next batch comes.
    const SyncBatchNorm sync(layer, world);
    call(layer, 8);
    if (rank == 1) {
      EXPECT_THROW(call(layer, 1), c10::Error);
    }
    const std::string left_out = text_of([&] { call(layer, 8); });
    EXPECT_NE(left_out.find("was called 1 times on rank 0, but 2 times on rank 1"),
              std::string::npos)
        << left_out;
    EXPECT_NE(left_out.find("single value for each channel"), std::string::npos) << left_out;
  })));
}

// Rank 0 has loaded weights, and others write the counter of batches, too.
TEST(SyncBatchNorm, TheCounterOfBatchesMayBeWrittenByAnybody) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    for (const int loaded : {1000, 1, 2}) {
      nn::BatchNorm1d layer(4);
      const nn::Sequential model(layer);
      const auto call = [&](int rows) { layer(at::randn({rows, 4})); };
      if (rank == 0) layer->num_batches_tracked.fill_(loaded);
      const SyncBatchNorm sync(model.ptr(), world);
      const DistributedDataParallel ddp(model.ptr(), world);
      call(8);
      call(8);
      EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), loaded + 2);
      if (rank == 1) layer->num_batches_tracked.fill_(7000);
      call(8);
      call(8);
      // A batch that was refused is found all the same.
      if (rank == 1) {
        EXPECT_THROW(call(1), c10::Error);
      }
      const std::string left_out = text_of([&] { call(8); });
      EXPECT_NE(left_out.find("was called 1 times on rank 0, but 2 times on rank 1"),
                std::string::npos)
          << left_out;
    }
  })));
}

TEST(SyncBatchNorm, DifferentLayersAtOnceAreAnError) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    nn::BatchNorm1d first(4);
    nn::BatchNorm1d second(4);
    const nn::Sequential model(first, second);
    const SyncBatchNorm sync(model, world);
    const std::string text = text_of([&] {
      (rank == 0 ? first : second)->forward(at::randn({8, 4}));
    });
    EXPECT_NE(text.find("Rank 0 calls the layer 0, but rank 1 calls 1"), std::string::npos) << text;
  })));
}

TEST(SyncBatchNorm, GradientsOfGradientsAreRefused) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    nn::BatchNorm1d layer(4);
    const SyncBatchNorm sync(layer, world);
    auto input = at::randn({8, 4}).requires_grad_();
    const auto once =
        torch::autograd::grad({layer(input).pow(3).sum()}, {input}, {}, true, true).front();
    try {
      once.pow(2).sum().backward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("no gradients of gradients"), std::string::npos);
    }
  })));
}

TEST(SyncBatchNorm, AWorldOfOneIsBatchNorm) {
  nn::BatchNorm1d layer(4);
  const SyncBatchNorm sync(layer, World::join());
  EXPECT_EQ(sync.num_layers(), 0);
}

}  // namespace
}  // namespace lockstep::test
