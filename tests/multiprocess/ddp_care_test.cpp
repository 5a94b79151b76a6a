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

#include "multiprocess/care.h"
#include "multiprocess/ddp_model.h"
#include "support/run_ranks.h"

namespace lockstep {
namespace {

using namespace test;  // NOLINT: a test

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

// In main memory only: what .data() writes on a device, as LibTorch's optimizers do, shows nowhere.
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

// In main memory only: gradients of a device come in its thread, whoever called backward.
TEST(DdpMisuse, TwoThreadsAtOnceAreRefused) {
  run(1, [](const World& world) {
    const at::Tensor weight = here(torch::ones({4})).requires_grad_();
    DistributedDataParallel ddp({{"weight", weight}}, world, {.hook = bf16_hook()});
    std::atomic<bool> is_inside{false};
    std::atomic<bool> may_go{false};
    const auto blocking = (weight * 2).sum();
    // Holds the backward of this thread between its first gradient and its end.
    const at::Tensor other = here(torch::ones({4})).requires_grad_();
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
