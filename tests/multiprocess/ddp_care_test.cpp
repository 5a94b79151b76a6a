// What DistributedDataParallel takes care of: buffers, misuse, drift, ranks that go, and what it
// tells.

#include <lockstep/lockstep.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <iostream>
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
    DistributedDataParallel ddp(model, world);
    backward(model, world);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;
    }
    expect_error<TimeoutError>([&] { backward(model, world); }, {"rank 1", "bucket 0", "step 1"});
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
