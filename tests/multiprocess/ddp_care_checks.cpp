// What DistributedDataParallel takes care of, wherever a model is: on shared memory each of these
// is a test, and over the late device all of them are part of LateContract.

#include <lockstep/lockstep.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "multiprocess/care.h"

namespace lockstep::test {
namespace {

// A rank that counts for nothing gives nothing, whatever its gradients are.
LOCKSTEP_CARE(DdpWeight, ZeroMeansZero, 2) {
  for (const auto& hook : {std::shared_ptr<CommHook>(), bf16_hook()}) {
    auto weight = here(torch::ones({3})).requires_grad_();
    auto table = here(torch::ones({4, 2})).requires_grad_();
    DistributedDataParallel ddp({{"weight", weight}, {"table", table}}, world,
                                {.hook = hook, .sparse = {"table"}});
    const bool is_bad = world.rank() == 1;
    const double factor = is_bad ? std::numeric_limits<double>::quiet_NaN() : 2;
    ddp.set_weight(is_bad ? 0 : 5);
    const auto rows = torch::embedding(table, here(torch::tensor({1})), -1, false, true);
    ((weight.sum() + rows.sum()) * factor).backward();
    EXPECT_TRUE(torch::equal(weight.grad(), here(torch::full({3}, 2.0)))) << weight.grad();
    EXPECT_TRUE(torch::equal(table.grad().to_dense()[1], here(torch::full({2}, 2.0))));
  }
}

// What was set for this step counts, whatever became of the one before.
LOCKSTEP_CARE(DdpWeight, OutlivesABackwardThatFailed, 2) {
  auto first = here(torch::ones({2})).requires_grad_();
  auto second = here(torch::ones({2})).requires_grad_();
  DistributedDataParallel ddp({{"first", first}, {"second", second}}, world);
  const auto train = [&](bool must_fail) {
    auto middle = first * static_cast<double>(4 * world.rank());
    if (must_fail) {
      middle.register_hook([](const torch::Tensor&) -> torch::Tensor {
        throw std::runtime_error("as the test wants it");
      });
    }
    (middle + second).mul(second.detach()).sum().backward();
  };
  ddp.set_weight(7);
  EXPECT_ANY_THROW(train(true));
  first.mutable_grad() = second.mutable_grad() = torch::Tensor();
  ddp.set_weight(world.rank() == 0 ? 3 : 1);
  train(false);
  EXPECT_TRUE(torch::allclose(first.grad(), here(torch::full({2}, 1.0)))) << first.grad();
  first.mutable_grad() = second.mutable_grad() = torch::Tensor();
  train(false);  // every rank has weight 1 again
  EXPECT_TRUE(torch::allclose(first.grad(), here(torch::full({2}, 2.0)))) << first.grad();
}

// Without steps of its own it is behind the others until it gets their state.
LOCKSTEP_CARE(DdpJoin, WithoutStepsIsNoDrift, 2) {
  auto weight = here(torch::ones({2})).requires_grad_();
  DistributedDataParallel ddp({{"weight", weight}}, world, {.check_every = 1});
  torch::optim::SGD optimizer({weight}, 0.1);
  for (int i = 0; i < (world.rank() == 0 ? 4 : 1); ++i) {
    optimizer.zero_grad();
    weight.sum().backward();
    optimizer.step();
  }
  ddp.join();
  EXPECT_NEAR(weight[0].item<float>(), 0.6, 1e-6);
  ddp.check_replicas();
}

// An epoch may end between two averages.
LOCKSTEP_CARE(DdpAccumulate, BeginsAnew, 2) {
  auto weight = here(torch::ones({2})).requires_grad_();
  DistributedDataParallel ddp({{"weight", weight}}, world);
  torch::optim::SGD optimizer({weight}, 0.1);
  const auto backward = [&] { (weight.sum() * static_cast<double>(world.rank())).backward(); };
  const auto value = [&] { return weight.grad()[0].item<float>(); };
  ddp.accumulate(2);
  for (int epoch = 0; epoch < 3; ++epoch) {
    backward();
    EXPECT_EQ(ddp.num_pending(), 1);
    EXPECT_EQ(value(), world.rank());
    backward();
    EXPECT_EQ(ddp.num_pending(), 0);
    EXPECT_EQ(value(), 1);  // 2 x the mean of 0 and 1
    optimizer.step();
    optimizer.zero_grad();
    backward();
    if (epoch == 0) {
      ddp.discard();
      EXPECT_FALSE(weight.grad().defined());
    } else {
      optimizer.zero_grad();
      optimizer.step();
      ddp.accumulate(2);
    }
    EXPECT_EQ(ddp.num_pending(), 0);
  }
}

// Gradual unfreezing, and freezing for good.
LOCKSTEP_CARE(DdpRewrap, FollowsTheModel, 2) {
  torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
  move_here(*model);
  auto first = model[0]->as<torch::nn::Linear>()->weight;
  auto second = model[1]->as<torch::nn::Linear>()->weight;
  first.requires_grad_(false);
  DistributedDataParallel ddp(model, world, {.check_every = 1});
  ddp.accumulate(2);
  const auto backward = [&] {
    for (int i = 0; i < 2; ++i) {
      ddp.backward(model->forward(here(torch::full({1, 2}, 1.0 + world.rank()))));
    }
  };
  const auto has_mean = [&](const torch::Tensor& tensor) {
    return torch::equal(world.all_reduce(tensor.grad().clone(), ReduceOp::AVG), tensor.grad());
  };
  backward();
  EXPECT_FALSE(first.grad().defined());
  EXPECT_TRUE(has_mean(second));
  first.requires_grad_(true);
  expect_error<UsageError>(backward, {"rewrap"});
  ddp.rewrap();
  model->zero_grad();
  backward();
  EXPECT_TRUE(has_mean(first));
  second.requires_grad_(false);
  ddp.rewrap();
  model->zero_grad();
  backward();
  EXPECT_TRUE(has_mean(first));
  EXPECT_FALSE(second.grad().defined());
  EXPECT_EQ(ddp.stats().steps, 1);
  model->zero_grad();
  ddp.backward(model->forward(here(torch::ones({1, 2}))));
  expect_error<UsageError>([&] { ddp.rewrap(); }, {"discard()"});
  ddp.discard();
  ddp.rewrap();
}

LOCKSTEP_CARE(DdpIgnored, StaysTheRanksOwn, 2) {
  torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
  move_here(*model);
  const double mine = 1.0 + world.rank();
  torch::nn::init::constant_(model[0]->as<torch::nn::Linear>()->weight, mine);
  expect_error<UsageError>([&] { DistributedDataParallel ddp(model, world, {.ignored = {"2"}}); },
                           {"names 2"});
  DistributedDataParallel ddp(model, world, {.check_every = 1, .ignored = {"0"}});
  model->forward(here(torch::full({1, 2}, mine))).sum().backward();
  const auto& first = model[0]->as<torch::nn::Linear>()->weight;
  EXPECT_EQ(first[0][0].item<float>(), mine);
  EXPECT_EQ(first.grad()[0][0].item<float>(),
            (model[1]->as<torch::nn::Linear>()->weight[0][0] * mine).item<float>());
  const auto& grad = model[1]->as<torch::nn::Linear>()->bias.grad();
  EXPECT_EQ(grad[0].item<float>(), 1);
}

// As official examples hold their models.
LOCKSTEP_CARE(DdpConstruction, TakesAModelByReference, 2) {
  struct Model : torch::nn::Module {
    Model() { register_module("layer", layer); }
    torch::nn::Linear layer{2, 1};
  } model;
  move_here(model);
  DistributedDataParallel ddp(model, world);
  const auto loss = model.layer(here(torch::full({3, 2}, 1.0 + world.rank())));
  ddp.backward(loss, here(torch::full({3, 1}, 2.0)), true);
  EXPECT_EQ(model.layer->weight.grad()[0][0].item<float>(), 9);
  model.layer->zero_grad();
  ddp.backward(loss, here(torch::full({3, 1}, 2.0)));  // the graph was kept
  EXPECT_EQ(model.layer->weight.grad()[0][0].item<float>(), 9);
}

LOCKSTEP_CARE(DdpConstruction, AModelOfNoNumbersIsNoError, 2) {
  auto nothing = here(torch::ones({0})).requires_grad_();
  DistributedDataParallel ddp({{"nothing", nothing}}, world);
  for (int i = 0; i < 3; ++i) nothing.sum().backward();
  EXPECT_EQ(ddp.stats().steps, 3);
}

// As with Python's gradient_as_bucket_view.
LOCKSTEP_CARE(DdpGradients, AreViewsOfTheBucket, 2) {
  auto a = here(torch::ones({4})).requires_grad_();
  auto b = here(torch::ones({3})).requires_grad_();
  const DistributedDataParallel ddp({{"a", a}, {"b", b}}, world);
  const auto step = [&](double factor) {
    a.mutable_grad() = b.mutable_grad() = at::Tensor();
    ((a.sum() + b.sum()) * factor).backward();
  };
  step(1);  // after the first one buckets may be laid out anew
  step(1);
  const at::Tensor view = a.grad();
  const at::Tensor kept = view.clone();
  EXPECT_TRUE(view.storage().is_alias_of(b.grad().storage()));
  step(3);
  EXPECT_EQ(a.grad().const_data_ptr(), view.const_data_ptr());
  EXPECT_TRUE(at::equal(view, here(torch::full({4}, 3.0))));
  EXPECT_TRUE(at::equal(kept, here(torch::ones({4}))));
}

LOCKSTEP_CARE(DdpConstruction, RanksThatDifferSeeBothSides, 3) {
  const auto wrap = [&](at::Tensor mine, at::Tensor others, const char* name = "w",
                        DdpOptions options = {}) {
    const at::Tensor tensor = world.rank() == 2 ? mine : others;
    return [=, &world] {
      const DistributedDataParallel ddp({{"first", here(torch::ones({2})).requires_grad_()},
                                         {world.rank() == 2 ? name : "w", tensor}},
                                        world, options);
    };
  };
  const auto trained = [](at::Tensor tensor) { return tensor.requires_grad_(); };
  const at::Tensor usual = trained(here(torch::ones({2, 3})));
  const std::string both = "rank 0: parameter w Float [2, 3]";
  expect_error<MismatchError>(wrap(trained(here(torch::ones({3, 2}))), usual),
                              {both, "rank 2: parameter w Float [3, 2]"});
  expect_error<MismatchError>(wrap(trained(here(torch::ones({2, 3}, at::kDouble))), usual),
                              {both, "rank 2: parameter w Double [2, 3]"});
  expect_error<MismatchError>(wrap(trained(here(torch::ones({3, 2})).t()), usual),
                              {both, "strides [3, 1]", "strides [1, 2]"});
  expect_error<MismatchError>(wrap(here(torch::ones({2, 3})), usual), {"strides [3, 1], trained"});
  expect_error<MismatchError>(wrap(usual, usual, "v"), {"parameter w", "rank 2: parameter v"});
  expect_error<MismatchError>(
      wrap(usual, usual, "w", {.bucket_bytes = world.rank() == 2 ? 1U : 2U}),
      {"bucket_bytes 2", "bucket_bytes 1"});
  expect_error<MismatchError>(
      wrap(usual, usual, "w", {.hook = world.rank() == 2 ? bf16_hook() : nullptr}),
      {"hook none", "rank 2"});
  expect_error<MismatchError>(
      [&] {
        std::vector<NamedTensor> all = {{"a", here(torch::ones({2})).requires_grad_()}};
        if (world.rank() == 1) all.push_back({"b", here(torch::ones({2}))});
        const DistributedDataParallel ddp(all, world);
      },
      {"rank 0: nothing more", "rank 1: parameter b"});
  expect_error<UsageError>(
      [&] {
        const DistributedDataParallel ddp({{"a", here(torch::ones({2}))}}, world);
      },
      {"None of the 1 parameters requires a gradient"});
  expect_error<UsageError>(
      [&] {
        const DistributedDataParallel ddp({{"a", here(torch::ones({2})).requires_grad_() * 2}},
                                          world);
      },
      {"parameter a is the result of a computation"});
  expect_error<UsageError>(
      [&] { const DistributedDataParallel ddp(std::shared_ptr<torch::nn::Module>(), world); },
      {"There is no model"});
  world.barrier();  // all of that left the world in order
}

LOCKSTEP_CARE(DdpMisuse, ChangesAfterWrappingAreErrorsOnAllRanks, 2) {
  // Rank 1 makes the mistake, all ranks hear of it, and the next model works.
  const auto broken = [&](const std::function<void(Net&)>& change, const std::string& word) {
    SCOPED_TRACE(word);
    Net model;
    model->left->bias.set_requires_grad(false);
    DistributedDataParallel ddp(model, world, {.check_every = 1});
    backward(model, world);
    model->zero_grad();
    if (world.rank() == 1) change(model);
    expect_error<UsageError>([&] { backward(model, world, 1); },
                             {word, "backward", world.rank() == 1 ? "wrap" : "Because rank 1"});
    EXPECT_FALSE(model->last->weight.grad().defined()) << "a gradient that is no mean was left";
  };
  broken([](Net& model) { model->first->weight.set_requires_grad(false); },
         "parameter first.weight requires no gradient any more");
  broken([](Net& model) { model->left->bias.set_requires_grad(true); },
         "parameter left.bias requires a gradient now");
  broken(
      [](Net& model) {
        model->right->weight =
            model->right->register_parameter("replaced", here(torch::ones({8, 8})));
      },
      "parameter right.replaced was added to the model, or replaced");
}

LOCKSTEP_CARE(DdpFinite, ARankWhoseGradientsAreNotFiniteIsNamed, 3) {
  Net model;
  const DistributedDataParallel ddp(model, world, {.check_finite = true});
  for (const int culprit : {1, 2}) {
    model->zero_grad();
    expect_error<UsageError>(
        [&] {
          auto loss = loss_of(model->forward(batch(world.rank())));
          if (world.rank() == culprit) {
            loss = loss + (model->right->weight * std::numeric_limits<float>::infinity()).sum();
          }
          loss.backward();
        },
        {"The gradient of right.weight is not finite",
         world.rank() == culprit ? "on this rank" : "Because rank " + std::to_string(culprit)});
  }
  model->zero_grad();
  backward(model, world);  // all goes on
  EXPECT_TRUE(at::isfinite(model->right->weight.grad()).all().item<bool>());
}

// On all ranks, so that nobody waits for anybody.
LOCKSTEP_CARE(DdpMisuse, CastingAfterWrappingIsAnError, 2) {
  for (const bool is_first_step : {true, false}) {
    Net model;
    DistributedDataParallel ddp(model, world);
    if (!is_first_step) backward(model, world);
    model->zero_grad();
    model->to(at::kDouble);
    expect_error<UsageError>(
        [&] { loss_of(model->forward(batch(world.rank()).to(at::kDouble))).backward(); },
        {"parameter first.weight has other data than when it was wrapped"});
  }
}

struct NormalisedImpl : torch::nn::Module {
  NormalisedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 2));
    move_here(*this);
  }
  at::Tensor forward(const at::Tensor& input) { return last(norm(input)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Normalised);

LOCKSTEP_CARE(DdpBuffers, ComeFromRank0OrAreAveragedOrStay, 3) {
  for (const BufferSync way : {BufferSync::kFromRank0, BufferSync::kMean, BufferSync::kOff}) {
    Normalised model;
    DistributedDataParallel ddp(model, world, {.buffers = way, .check_every = 1});
    at::Tensor first;
    at::Tensor mean = here(torch::zeros({6}));
    for (int rank = 0; rank < world.size(); ++rank) {
      Normalised local;
      local->forward(batch(rank));
      if (rank == 0) first = local->norm->running_mean.clone();
      mean = mean + local->norm->running_mean / world.size();
    }
    loss_of(model->forward(batch(world.rank()))).backward();
    const at::Tensor mine = model->norm->running_mean;
    EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 1);
    if (way == BufferSync::kFromRank0) {
      EXPECT_TRUE(at::equal(mine, first));
    } else if (way == BufferSync::kMean) {
      EXPECT_TRUE(at::allclose(mine, mean));
      expect_same_bits(world, mine, "running_mean");
    } else {
      EXPECT_EQ(at::equal(mine, first), world.rank() == 0);
    }
  }
}

LOCKSTEP_CARE(DdpBuffers, AreNotWrittenInTheMiddleOfAGraph, 2) {
  Normalised model;
  DistributedDataParallel ddp(model, world);
  for (int step = 0; step < 2; ++step) {
    const auto first = loss_of(model->forward(batch(world.rank(), step)));
    const auto second = loss_of(model->forward(batch(world.rank(), step + 5)));
    (first + second).backward();
    const auto third = loss_of(model->forward(batch(world.rank(), step)));
    const auto fourth = loss_of(model->forward(batch(world.rank(), step + 5)));
    third.backward();  // writes the buffers that the fourth's graph holds
    fourth.backward();
  }
  expect_same_bits(world, model->norm->running_mean, "running_mean");
  expect_same_bits(world, *model);
}

LOCKSTEP_CARE(DdpReplicas, ThatDriftAreFoundAndNamed, 3) {
  Net model;
  DistributedDataParallel ddp(model, world, {.check_every = 3});
  const auto one_step = [&](int step) {
    model->zero_grad();
    backward(model, world, step);
  };
  one_step(0);
  if (world.rank() == 2) {
    const torch::NoGradGuard no_grad;
    model->right->weight[1][1] += 1e-6;
  }
  one_step(1);
  expect_error<MismatchError>(
      [&] { one_step(2); },
      {"drifted apart: right.weight is not the same on rank 0 and on rank 2", "step 3"});
  expect_error<MismatchError>([&] { ddp.check_replicas(); }, {"right.weight"});
}

LOCKSTEP_CARE(DdpStats, SayWhatHappened, 2) {
  Net model;
  DistributedDataParallel ddp(model, world, {.bucket_bytes = 256, .first_bucket_bytes = 256});
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    backward(model, world, step);
  }
  const DdpStats stats = ddp.stats();
  EXPECT_EQ(stats.steps, 3);
  EXPECT_GT(stats.buckets, 1);
  std::int64_t bytes = 0;
  for (const auto& parameter : model->parameters()) {
    bytes += static_cast<std::int64_t>(parameter.nbytes());
  }
  EXPECT_GE(stats.bytes, bytes);
  EXPECT_LT(stats.bytes, bytes + 64 * static_cast<std::int64_t>(model->parameters().size()));
  EXPECT_GE(stats.bytes_sent, stats.bytes);
  EXPECT_GE(stats.backward_ms, stats.waiting_ms);
  EXPECT_GE(stats.overlap_percent, 0);
  EXPECT_LE(stats.overlap_percent, 100);
  ASSERT_EQ(stats.step_ms.size(), 2);
  EXPECT_GE(stats.step_ms[1], 100);
  EXPECT_EQ(stats.slowest_rank, 1);
}

}  // namespace
}  // namespace lockstep::test
