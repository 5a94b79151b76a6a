// What DistributedDataParallel takes care of: buffers, misuse, drift, ranks that go, and what it
// tells.

#include <lockstep/lockstep.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <thread>

#include "multiprocess/ddp_model.h"
#include "support/run_ranks.h"

namespace lockstep {
namespace {

using namespace test;  // NOLINT: a test

void run(int size, const std::function<void(const World&)>& body, const char* engine = "shm") {
  EXPECT_TRUE(all_passed(run_ranks(size, [&](int) { body(World::join({.engine = engine})); })));
}

// Runs `call` on all ranks; every rank must throw an error of type E whose text has all of `words`.
template <typename E>
void expect_error(const std::function<void()>& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const E& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "no '" << word << "' in: " << error.what();
    }
  }
}

void backward(Net& model, const World& world, int step = 0) {
  loss_of(model->forward(batch(world.rank(), step))).backward();
}

// The wrapper's scope ends before training does: ranks would drift apart without a word.
TEST(DdpLife, AModelThatIsTrainedWithoutItsWrapperIsToldOnce) {
  const auto results = run_ranks(2, [](int) {
    const World world = World::join();
    Net model;
    {
      const DistributedDataParallel ddp(model, world, {.name = "actor"});
      backward(model, world);
    }
    std::cerr << "gone" << std::endl;
    for (int step = 0; step < 3; ++step) backward(model, world, step);
    DistributedDataParallel ddp(model, world, {.name = "critic"});
    backward(model, world);
    ddp.rewrap();
    backward(model, world);
    std::cerr << "end" << std::endl;
  });
  EXPECT_TRUE(all_passed(results));
  for (const RankResult& result : results) {
    const std::string& text = result.output;
    const std::size_t warning = text.find("backward() of actor: its DistributedDataParallel has");
    ASSERT_NE(warning, std::string::npos) << text;
    EXPECT_LT(text.find("gone"), warning) << text;
    EXPECT_EQ(text.find("has gone", warning + 80), std::string::npos) << text;
  }
}

// A rank that counts for nothing gives nothing, whatever its gradients are.
TEST(DdpWeight, ZeroMeansZero) {
  run(2, [](const World& world) {
    for (const auto& hook : {std::shared_ptr<CommHook>(), bf16_hook()}) {
      auto weight = torch::ones({3}).requires_grad_();
      auto table = torch::ones({4, 2}).requires_grad_();
      DistributedDataParallel ddp({{"weight", weight}, {"table", table}}, world,
                                  {.hook = hook, .sparse = {"table"}});
      const bool is_bad = world.rank() == 1;
      const double factor = is_bad ? std::numeric_limits<double>::quiet_NaN() : 2;
      ddp.set_weight(is_bad ? 0 : 5);
      const auto rows = torch::embedding(table, torch::tensor({1}), -1, false, true);
      ((weight.sum() + rows.sum()) * factor).backward();
      EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 2.0))) << weight.grad();
      EXPECT_TRUE(torch::equal(table.grad().to_dense()[1], torch::full({2}, 2.0)));
    }
  });
}

// What was set for this step counts, whatever became of the one before.
TEST(DdpWeight, OutlivesABackwardThatFailed) {
  run(2, [](const World& world) {
    auto first = torch::ones({2}).requires_grad_();
    auto second = torch::ones({2}).requires_grad_();
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
    EXPECT_TRUE(torch::allclose(first.grad(), torch::full({2}, 1.0))) << first.grad();
    first.mutable_grad() = second.mutable_grad() = torch::Tensor();
    train(false);  // every rank has weight 1 again
    EXPECT_TRUE(torch::allclose(first.grad(), torch::full({2}, 2.0))) << first.grad();
  });
}

// Without steps of its own it is behind the others until it gets their state.
TEST(DdpJoin, WithoutStepsIsNoDrift) {
  run(2, [](const World& world) {
    auto weight = torch::ones({2}).requires_grad_();
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
  });
}

// An epoch may end between two averages.
TEST(DdpAccumulate, BeginsAnew) {
  run(2, [](const World& world) {
    auto weight = torch::ones({2}).requires_grad_();
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
  });
}

// Gradual unfreezing, and freezing for good.
TEST(DdpRewrap, FollowsTheModel) {
  run(2, [](const World& world) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    auto first = model[0]->as<torch::nn::Linear>()->weight;
    auto second = model[1]->as<torch::nn::Linear>()->weight;
    first.requires_grad_(false);
    DistributedDataParallel ddp(model, world, {.check_every = 1});
    ddp.accumulate(2);
    const auto backward = [&] {
      for (int i = 0; i < 2; ++i) {
        ddp.backward(model->forward(torch::full({1, 2}, 1.0 + world.rank())));
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
    ddp.backward(model->forward(torch::ones({1, 2})));
    expect_error<UsageError>([&] { ddp.rewrap(); }, {"discard()"});
    ddp.discard();
    ddp.rewrap();
  });
}

TEST(DdpIgnored, StaysTheRanksOwn) {
  run(2, [](const World& world) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    const double mine = 1.0 + world.rank();
    torch::nn::init::constant_(model[0]->as<torch::nn::Linear>()->weight, mine);
    expect_error<UsageError>([&] { DistributedDataParallel ddp(model, world, {.ignored = {"2"}}); },
                             {"names 2"});
    DistributedDataParallel ddp(model, world, {.check_every = 1, .ignored = {"0"}});
    model->forward(torch::full({1, 2}, mine)).sum().backward();
    const auto& first = model[0]->as<torch::nn::Linear>()->weight;
    EXPECT_EQ(first[0][0].item<float>(), mine);
    EXPECT_EQ(first.grad()[0][0].item<float>(),
              (model[1]->as<torch::nn::Linear>()->weight[0][0] * mine).item<float>());
    const auto& grad = model[1]->as<torch::nn::Linear>()->bias.grad();
    EXPECT_EQ(grad[0].item<float>(), 1);
  });
}

// As official examples hold their models.
TEST(DdpConstruction, TakesAModelByReference) {
  run(2, [](const World& world) {
    struct Model : torch::nn::Module {
      Model() { register_module("layer", layer); }
      torch::nn::Linear layer{2, 1};
    } model;
    DistributedDataParallel ddp(model, world);
    const auto loss = model.layer(torch::full({3, 2}, 1.0 + world.rank()));
    ddp.backward(loss, torch::full({3, 1}, 2.0), true);
    EXPECT_EQ(model.layer->weight.grad()[0][0].item<float>(), 9);
    model.layer->zero_grad();
    ddp.backward(loss, torch::full({3, 1}, 2.0));  // the graph was kept
    EXPECT_EQ(model.layer->weight.grad()[0][0].item<float>(), 9);
  });
}

TEST(DdpConstruction, AModelOfNoNumbersIsNoError) {
  run(2, [](const World& world) {
    auto nothing = torch::ones({0}).requires_grad_();
    DistributedDataParallel ddp({{"nothing", nothing}}, world);
    for (int i = 0; i < 3; ++i) nothing.sum().backward();
    EXPECT_EQ(ddp.stats().steps, 3);
  });
}

// As with Python's gradient_as_bucket_view.
TEST(DdpGradients, AreViewsOfTheBucket) {
  run(2, [](const World& world) {
    auto a = torch::ones({4}).requires_grad_();
    auto b = torch::ones({3}).requires_grad_();
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
    EXPECT_TRUE(at::equal(view, torch::full({4}, 3.0)));
    EXPECT_TRUE(at::equal(kept, torch::ones({4})));
  });
}

// Two models in one loss, whose backwards end in different orders.
TEST(DdpSeveral, DoNotWaitForEachOther) {
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join({.engine = "shm", .timeout = std::chrono::seconds(20)});
    auto first = torch::ones({4}).requires_grad_();
    auto second = torch::ones({4}).requires_grad_();
    auto its_buffer = torch::full({2}, rank);
    auto other_buffer = torch::full({2}, rank);
    DistributedDataParallel one({{"first", first}}, world, {.check_every = 1},
                                {{"buffer", its_buffer}});
    DistributedDataParallel other({{"second", second}}, world, {.check_every = 1},
                                  {{"buffer", other_buffer}});
    for (int step = 0; step < 3; ++step) {
      torch::Tensor a;
      torch::Tensor b;
      const double factor = 2.0 * rank;
      if (rank == 0) a = (first * factor).sum();
      b = (second * factor).sum();
      if (rank != 0) a = (first * factor).sum();
      first.mutable_grad() = second.mutable_grad() = torch::Tensor();
      (a + b).backward();
      EXPECT_TRUE(torch::equal(first.grad(), torch::ones({4})));
      EXPECT_TRUE(torch::equal(second.grad(), torch::ones({4})));
    }
  })));
}

TEST(DdpConstruction, RanksThatDifferSeeBothSides) {
  run(3, [](const World& world) {
    const auto wrap = [&](at::Tensor mine, at::Tensor others, const char* name = "w",
                          DdpOptions options = {}) {
      const at::Tensor tensor = world.rank() == 2 ? mine : others;
      return [=, &world] {
        const DistributedDataParallel ddp({{"first", torch::ones({2}).requires_grad_()},
                                           {world.rank() == 2 ? name : "w", tensor}},
                                          world, options);
      };
    };
    const auto trained = [](at::Tensor tensor) { return tensor.requires_grad_(); };
    const at::Tensor usual = trained(torch::ones({2, 3}));
    const std::string both = "rank 0: parameter w Float [2, 3]";
    expect_error<MismatchError>(wrap(trained(torch::ones({3, 2})), usual),
                                {both, "rank 2: parameter w Float [3, 2]"});
    expect_error<MismatchError>(wrap(trained(torch::ones({2, 3}, at::kDouble)), usual),
                                {both, "rank 2: parameter w Double [2, 3]"});
    expect_error<MismatchError>(wrap(trained(torch::ones({3, 2}).t()), usual),
                                {both, "strides [3, 1]", "strides [1, 2]"});
    expect_error<MismatchError>(wrap(torch::ones({2, 3}), usual), {"strides [3, 1], trained"});
    expect_error<MismatchError>(wrap(usual, usual, "v"), {"parameter w", "rank 2: parameter v"});
    expect_error<MismatchError>(
        wrap(usual, usual, "w", {.bucket_bytes = world.rank() == 2 ? 1U : 2U}),
        {"bucket_bytes 2", "bucket_bytes 1"});
    expect_error<MismatchError>(
        wrap(usual, usual, "w", {.hook = world.rank() == 2 ? bf16_hook() : nullptr}),
        {"hook none", "rank 2"});
    expect_error<MismatchError>(
        [&] {
          std::vector<NamedTensor> all = {{"a", torch::ones({2}).requires_grad_()}};
          if (world.rank() == 1) all.push_back({"b", torch::ones({2})});
          const DistributedDataParallel ddp(all, world);
        },
        {"rank 0: nothing more", "rank 1: parameter b"});
    expect_error<UsageError>(
        [&] {
          const DistributedDataParallel ddp({{"a", torch::ones({2})}}, world);
        },
        {"None of the 1 parameters requires a gradient"});
    expect_error<UsageError>(
        [&] {
          const DistributedDataParallel ddp({{"a", torch::ones({2}).requires_grad_() * 2}}, world);
        },
        {"parameter a is the result of a computation"});
    expect_error<UsageError>(
        [&] { const DistributedDataParallel ddp(std::shared_ptr<torch::nn::Module>(), world); },
        {"There is no model"});
    world.barrier();  // all of that left the world in order
  });
}

TEST(DdpMisuse, ChangesAfterWrappingAreErrorsOnAllRanks) {
  run(2, [](const World& world) {
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
          model->right->weight = model->right->register_parameter("replaced", torch::ones({8, 8}));
        },
        "parameter right.replaced was added to the model, or replaced");
  });
}

TEST(DdpFinite, AlsoAlone) {
  run(
      1,
      [](const World& world) {
        Net model;
        const DistributedDataParallel ddp(model, world, {.check_finite = true});
        backward(model, world);
        EXPECT_TRUE(model->right->weight.grad().defined());
        const auto loss = (model->right->weight * std::nan("")).sum();
        expect_error<UsageError>([&] { loss.backward(); }, {"right.weight is not finite"});
      },
      "auto");
}

TEST(DdpFinite, ARankWhoseGradientsAreNotFiniteIsNamed) {
  run(3, [](const World& world) {
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
  });
}

// On all ranks, so that nobody waits for anybody.
TEST(DdpMisuse, CastingAfterWrappingIsAnError) {
  run(2, [](const World& world) {
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
  });
}

TEST(DdpMisuse, AStepBeforeAveragingIsAnError) {
  run(2, [](const World& world) {
    Net model;
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    {
      auto guard = ddp.no_sync();
      backward(model, world);
    }
    optimizer.step();
    expect_error<UsageError>([&] { backward(model, world); },
                             {"first.weight was changed while its gradient was not averaged"});
  });
}

// Who forgets the sampler trains on the same data everywhere, and is told so.
TEST(DdpMisuse, TheSameDataOnAllRanksIsNoticed) {
  for (const bool is_same : {true, false}) {
    if (test::is_rank() && (std::getenv("SAME_DATA") != nullptr) != is_same) continue;
    test::RankOptions options;
    if (is_same) options.variables["SAME_DATA"] = "1";
    const auto results = test::run_ranks(
        3,
        [&](int rank) {
          const World world = World::join();
          Net model;
          DistributedDataParallel ddp(model, world);
          for (int step = 0; step < 3; ++step) {
            model->zero_grad();
            loss_of(model->forward(batch(is_same ? 0 : rank))).backward();
          }
        },
        options);
    EXPECT_TRUE(test::all_passed(results));
    EXPECT_EQ(results[0].output.find("they seem to read the same data") != std::string::npos,
              is_same)
        << results[0].output;
    EXPECT_EQ(results[1].output.find("same data"), std::string::npos);
  }
}

TEST(DdpMisuse, TwoThreadsAtOnceAreRefused) {
  run(1, [](const World& world) {
    const at::Tensor weight = torch::ones({4}).requires_grad_();
    DistributedDataParallel ddp({{"weight", weight}}, world, {.hook = bf16_hook()});
    std::atomic<bool> is_inside{false};
    std::atomic<bool> may_go{false};
    const auto blocking = (weight * 2).sum();
    // Holds the backward of this thread between its first gradient and its end.
    const at::Tensor other = torch::ones({4}).requires_grad_();
    const auto held = other * 1;
    held.register_hook([&](const at::Tensor&) {
      is_inside = true;
      while (!may_go) std::this_thread::yield();
    });
    std::string said;
    std::thread second([&] {
      while (!is_inside) std::this_thread::yield();
      try {
        blocking.backward();
      } catch (const UsageError& error) {
        said = error.what();
      }
      may_go = true;
    });
    // The product's gradient comes first: it was made last.
    (held.sum() + (weight * 3).sum()).backward();
    second.join();
    EXPECT_NE(said.find("Two threads"), std::string::npos) << said;
  });
}

struct NormalisedImpl : torch::nn::Module {
  NormalisedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& input) { return last(norm(input)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Normalised);

TEST(DdpBuffers, ComeFromRank0OrAreAveragedOrStay) {
  run(3, [](const World& world) {
    for (const BufferSync way : {BufferSync::kFromRank0, BufferSync::kMean, BufferSync::kOff}) {
      Normalised model;
      DistributedDataParallel ddp(model, world, {.buffers = way, .check_every = 1});
      at::Tensor first;
      at::Tensor mean = torch::zeros({6});
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
  });
}

TEST(DdpBuffers, AreNotWrittenInTheMiddleOfAGraph) {
  run(2, [](const World& world) {
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
  });
}

TEST(DdpReplicas, ThatDriftAreFoundAndNamed) {
  run(3, [](const World& world) {
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
  });
}

TEST(DdpStats, SayWhatHappened) {
  run(2, [](const World& world) {
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
  });
}

TEST(DdpFaults, ALostRankIsNamedWithTheBucket) {
  test::Ranks ranks(3, [](int) {
    const World world = World::join();
    Net model;
    DistributedDataParallel ddp(model, world);
    try {
      for (int step = 0;; ++step) {
        model->zero_grad();
        backward(model, world, step);
        if (step == 20) std::cout << "at work" << std::endl;
      }
    } catch (const PeerLostError& error) {
      std::cout << error.what() << std::endl;
      EXPECT_EQ(error.peer(), 1);
      EXPECT_GT(error.step(), 19);
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));  // until the other has seen it, too
  });
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for_output(rank, "at work");
  ranks.kill(1, SIGKILL);
  const auto results = ranks.wait();
  for (const std::size_t rank : {0, 2}) {
    EXPECT_TRUE(results[rank].status.is_ok()) << test::show(results);
    for (const char* word :
         {"backward", "all_reduce of bucket 0 (", "more, ", "rank 1 (pid", "killed by signal 9"}) {
      EXPECT_NE(results[rank].output.find(word), std::string::npos) << word << test::show(results);
    }
  }
}

// A rank that goes on without the others' backward, and one that leaves early.
TEST(DdpFaults, ARankThatDoesNotComeIsNamed) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(2)});
    Net model;
    DistributedDataParallel ddp(model, world, {.name = "critic"});
    backward(model, world);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;
    }
    expect_error<TimeoutError>([&] { backward(model, world); },
                               {"rank 1", "bucket 0 of critic", "KiB", "step 1"});
  })));
}

TEST(DdpAlone, CostsNothing) {
  run(
      1,
      [](const World& world) {
        Net model;
        DistributedDataParallel ddp(model, world);
        EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(model->first->weight), nullptr)
            << "no hook is there to cost anything";
        backward(model, world);
        const at::Tensor grad = model->first->weight.grad();
        EXPECT_TRUE(grad.defined());
        ddp.join();
        ddp.check_replicas();
        auto guard = ddp.no_sync();
      },
      "auto");
}

// Only with a hook is there something to do alone.
TEST(DdpAlone, AHookStillRuns) {
  run(
      1,
      [](const World& world) {
        Net model;
        DistributedDataParallel ddp(model, world, {.hook = bf16_hook()});
        backward(model, world);
        const at::Tensor grad = model->first->weight.grad();
        EXPECT_TRUE(at::equal(grad, grad.to(at::kBFloat16).to(at::kFloat)));
      },
      "auto");
}

}  // namespace
}  // namespace lockstep
