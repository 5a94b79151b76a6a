// DdpOptions::optimizer: steps that are taken in backward.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/optim.h>

#include "base/text.h"
#include "multiprocess/ddp_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using Parameters = std::vector<at::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
struct OptimizerKind {
  const char* name;
  OptimizerPtr (*make)(const Parameters& parameters);
};
constexpr OptimizerKind kOptimizerKinds[] = {
    {"SGD",
     [](const Parameters& all) -> OptimizerPtr {
       return std::make_unique<torch::optim::SGD>(all, torch::optim::SGDOptions(0.1).momentum(0.9));
     }},
    {"Adam",
     [](const Parameters& all) -> OptimizerPtr {
       return std::make_unique<torch::optim::Adam>(all, 0.01);
     }},
    {"RMSprop",
     [](const Parameters& all) -> OptimizerPtr {
       return std::make_unique<torch::optim::RMSprop>(all, 0.01);
     }},
    {"Adagrad",
     [](const Parameters& all) -> OptimizerPtr {
       return std::make_unique<torch::optim::Adagrad>(all, 0.01);
     }},
    {"OurAdamW",
     [](const Parameters& all) -> OptimizerPtr {
       return std::make_unique<optim::AdamW>(all, 0.01);
     }},
    {"OurSGD",
     [](const Parameters& all) -> OptimizerPtr {
       return std::make_unique<optim::SGD>(all, torch::optim::SGDOptions(0.1).momentum(0.9));
     }},
};

constexpr OptimizerKind kAdamW = kOptimizerKinds[4];

DdpOptions small_buckets(torch::optim::Optimizer* optimizer = nullptr) {
  return {.bucket_bytes = 300, .first_bucket_bytes = 64, .check_every = 1, .optimizer = optimizer};
}

void expect_equal(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto its = b.named_parameters();
  for (const auto& one : a.named_parameters()) {
    EXPECT_TRUE(at::equal(one.value(), its[one.key()])) << one.key();
  }
}

void expect_no_gradients(const torch::nn::Module& model) {
  for (const auto& one : model.named_parameters()) {
    EXPECT_FALSE(one.value().grad().defined()) << one.key();
  }
}

class OptimizerInBackward : public testing::TestWithParam<OptimizerKind> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerInBackward, testing::ValuesIn(kOptimizerKinds),
                         [](const auto& one) { return one.param.name; });

// One takes its steps in backward, its twin after it.
struct Twins {
  Twins(const World& world, const OptimizerKind& kind)
      : inner(kind.make(model->parameters())),
        outer(kind.make(twin->parameters())),
        ddp(model, world, small_buckets(inner.get())),
        its_ddp(twin, world, small_buckets()) {}

  template <typename F>
  void step(const F& loss) {
    ddp.backward(loss(model));
    twin->zero_grad();
    its_ddp.backward(loss(twin));
    if (its_ddp.num_pending() == 0) outer->step();
  }

  Net model;
  Net twin;
  OptimizerPtr inner;
  OptimizerPtr outer;
  DistributedDataParallel ddp;
  DistributedDataParallel its_ddp;
};

TEST_P(OptimizerInBackward, HasTheBitsOfAStepAfterIt) {
  for (const int size : {1, 2, 3}) {
    EXPECT_TRUE(all_passed(run_ranks(size, [](int rank) {
      const World world = World::join();
      Twins both(world, GetParam());
      for (int step = 0; step < 6; ++step) {
        for (auto* one : {both.inner.get(), both.outer.get()}) {
          one->param_groups()[0].options().set_lr(0.01 / (step + 1));
        }
        if (step == 3) {
          both.ddp.set_weight(rank + 1);
          both.its_ddp.set_weight(rank + 1);
        }
        both.step([&](Net& model) {
          // A branch that one rank uses, then one that none does.
          return loss_of(model->forward(batch(rank, step), step != 2 || rank == 0, step != 4));
        });
        expect_equal(*both.model, *both.twin);
        expect_no_gradients(*both.model);
      }
      EXPECT_GT(both.ddp.stats().buckets, 2);
      expect_same_bits(world, *both.model);
    })));
  }
}

TEST(OptimizerInBackward, WaitsForTheLastOfSeveralBackwards) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    Twins both(World::join(), kAdamW);
    both.ddp.accumulate(3);
    both.its_ddp.accumulate(3);
    for (int step = 0; step < 3; ++step) {
      both.twin->zero_grad();
      for (int i = 0; i < 3; ++i) {
        loss_of(both.model->forward(batch(rank, 3 * step + i))).backward();
        loss_of(both.twin->forward(batch(rank, 3 * step + i))).backward();
      }
      both.outer->step();
      expect_equal(*both.model, *both.twin);
    }
  })));
}

// Sparse gradients, and gradients that come after their bucket was sent.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    words = register_module("words",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)));
    first = register_parameter("first", numbers({4}, 3));
    last = register_module("last", torch::nn::Linear(4, 2));
    const torch::NoGradGuard no_grad;
    words->weight.copy_(numbers({10, 4}, 1));
    last->weight.copy_(numbers({2, 4}, 2));
    last->bias.zero_();
  }
  at::Tensor forward(int rank, int step) {
    const at::Tensor hidden = words(torch::tensor({rank, step, 7})) * first;
    return last(step == 2 ? Reentrant::apply(hidden, first) : hidden);
  }
  torch::nn::Embedding words{nullptr};
  at::Tensor first;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Odd);

TEST(OptimizerInBackward, TakesSparseAndLateGradients) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    Odd model;
    Odd twin;
    torch::optim::SGD inner(model->parameters(), 0.1);
    torch::optim::SGD outer(twin->parameters(), 0.1);
    DistributedDataParallel ddp(model, world, small_buckets(&inner));
    DistributedDataParallel its_ddp(twin, world, small_buckets());
    for (int step = 0; step < 4; ++step) {
      loss_of(model->forward(rank, step)).backward();
      twin->zero_grad();
      loss_of(twin->forward(rank, step)).backward();
      outer.step();
      expect_equal(*model, *twin);
      expect_no_gradients(*model);
    }
  })));
}

TEST(OptimizerInBackward, TakesTheStepsOfOthersInJoin) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    Twins both(World::join(), kAdamW);
    for (int step = 0; step < 3 - rank; ++step) {
      loss_of(both.model->forward(batch(rank, step))).backward();
    }
    both.ddp.join();
    for (int step = 0; step < 3 - rank; ++step) {
      both.twin->zero_grad();
      loss_of(both.twin->forward(batch(rank, step))).backward();
      both.outer->step();
    }
    both.its_ddp.join([&] { both.outer->step(); });
    expect_equal(*both.model, *both.twin);
    // The states of the optimizers, too.
    both.step([rank](Net& model) { return loss_of(model->forward(batch(rank, 5))); });
    expect_equal(*both.model, *both.twin);
  })));
}

TEST(OptimizerInBackward, AStepThatIsDroppedChangesNothing) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    Net model;
    optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    DistributedDataParallel ddp(model, world, small_buckets(&optimizer));
    const auto train = [&] { loss_of(model->forward(batch(rank))).backward(); };
    train();
    train();
    const Parameters before = [&] {
      Parameters all;
      for (const at::Tensor& one : model->parameters()) all.push_back(one.detach().clone());
      return all;
    }();
    if (rank == 1) model->last->bias.set_requires_grad(false);
    EXPECT_TRUE(has(error_of(train), "last.bias"));
    const Parameters after = model->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
    model->last->bias.set_requires_grad(true);
    train();
    EXPECT_FALSE(at::equal(model->last->bias, before.back()));
    expect_same_bits(world, *model);
  })));
}

// Fails at its second bucket when it is told to.
class FailingHook : public CommHook {
 public:
  std::string text() const override { return "failing"; }
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    return [this, index = bucket.index, work = comm.all_reduce(bucket.flat)] {
      work->wait();
      if (fails && index == 1) throw std::runtime_error("no more memory");
    };
  }
  bool fails = false;
};

TEST(OptimizerInBackward, SaysWhenParametersAreHalfUpdated) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    Net model;
    optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    const auto hook = std::make_shared<FailingHook>();
    DdpOptions options = small_buckets(&optimizer);
    options.hook = hook;
    DistributedDataParallel ddp(model, world, options);
    const auto train = [&] { loss_of(model->forward(batch(rank))).backward(); };
    train();
    hook->fails = true;
    const std::string error = error_of(train);
    EXPECT_TRUE(has(error, "no more memory")) << error;
    EXPECT_TRUE(has(
        error, text::format("1 of {} buckets have taken this step already", ddp.stats().buckets)))
        << error;
    hook->fails = false;
    train();
    expect_same_bits(world, *model);
  })));
}

TEST(OptimizerInBackward, OneThatDoesNotFitIsAnErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    Net model;
    Net other;
    const auto error_with = [&](torch::optim::Optimizer* optimizer) {
      return error_of([&] { DistributedDataParallel ddp(model, world, small_buckets(optimizer)); });
    };
    torch::optim::LBFGS all_at_once(model->parameters());
    EXPECT_TRUE(has(error_with(&all_at_once), "needs all gradients at once"));
    Parameters some = model->parameters();
    if (rank == 1) some.pop_back();
    optim::SGD too_few(some, torch::optim::SGDOptions(0.1));
    const std::string error = error_with(&too_few);
    EXPECT_TRUE(has(error, "does not have the parameter last.bias")) << error;
    EXPECT_TRUE(has(error, "rank 1")) << error;
    optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    EXPECT_TRUE(has(error_with(rank == 0 ? &optimizer : nullptr), "optimizer in backward"));

    DistributedDataParallel ddp(model, world, small_buckets(&optimizer));
    if (rank == 0)
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(other->parameters()));
    const std::string later = error_of([&] { loss_of(model->forward(batch(rank))).backward(); });
    EXPECT_TRUE(has(later, "8 parameters that this wrapper does not train")) << later;
  })));
}

}  // namespace
}  // namespace lockstep::test
