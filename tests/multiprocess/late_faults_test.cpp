// Faults on a device, over the late one: a rank that is lost, or that does not come, is an error in
// time, whatever the device's own collectives do; so is a collective that fails after its step.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <csignal>
#include <thread>

#include "support/error_of.h"
#include "support/fault_script.h"
#include "support/has.h"
#include "support/on_late_device.h"

namespace lockstep::test {
namespace {

using std::chrono::seconds;

class LateLostPeer : public testing::TestWithParam<late::LostPeer> {};
INSTANTIATE_TEST_SUITE_P(Engine, LateLostPeer,
                         testing::Values(late::LostPeer::kFails, late::LostPeer::kHangs),
                         [](const auto& one) {
                           return one.param == late::LostPeer::kFails ? "ItsCollectivesFail"
                                                                      : "ItsCollectivesHang";
                         });

void expect_rank1_lost(const RankResults& results) {
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
  EXPECT_NE(results[0].output.find("lost"), std::string::npos) << show(results);
  EXPECT_EQ(results[1].status.signal, SIGKILL);
}

TEST_P(LateLostPeer, ALostPeerIsAnErrorInTime) {
  const late::Scope scope;
  late::set_lost_peer(GetParam());
  const auto results = run_ranks(2, [](int rank) {
    const World world = World::join(late::join_options());
    Net model;
    DistributedDataParallel ddp(model, world, {.bucket_bytes = 256, .first_bucket_bytes = 256});
    for (int step = 0; step < 6; ++step) {
      // What this rank owes the others of earlier steps is done: they could wait for it anywhere.
      late::synchronize_all();
      FaultScript().kill_at(1, 3).play(rank, step);
      model->zero_grad();
      const auto began = std::chrono::steady_clock::now();
      try {
        loss_of(model->forward(batch(rank, step))).backward();
        EXPECT_LT(step, 3);
      } catch (const PeerLostError& error) {
        EXPECT_EQ(step, 3);
        EXPECT_EQ(error.peer(), 1) << error.what();
        EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(5));
        // Nothing of this process waits for the lost rank.
        EXPECT_TRUE(at::isfinite(model->first->weight.cpu()).all().item<bool>());
        std::printf("lost\n");
        return;
      }
    }
  });
  late::set_lost_peer(late::LostPeer::kFails);
  expect_rank1_lost(results);
}

// Weights are added up after the numbers. Rank 1 has sent these when it dies, and its collectives
// have not begun.
TEST_P(LateLostPeer, APeerLostAfterItsNumbersIsAnErrorInTime) {
  const late::Scope scope;
  late::set_lost_peer(GetParam());
  const auto results = run_ranks(2, [](int rank) {
    const World world = World::join(late::join_options());
    Net model;
    DistributedDataParallel ddp(model, world, {.bucket_bytes = 256, .first_bucket_bytes = 256});
    const auto train = [&](const at::Tensor& input) {
      ddp.set_weight(rank + 1);
      model->zero_grad();
      loss_of(model->forward(input)).backward();
    };
    for (int step = 0; step < 3; ++step) train(batch(rank, step));
    const at::Tensor input = batch(rank, 3);
    late::synchronize_all();
    world.barrier();
    if (rank == 1) {
      late::enqueue(late::stream().id(), [] { std::this_thread::sleep_for(seconds(60)); });
      late::die_in_wait();
    }
    const auto began = std::chrono::steady_clock::now();
    EXPECT_THROW(train(input), PeerLostError);
    EXPECT_TRUE(at::isfinite(model->first->weight.cpu()).all().item<bool>());
    EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(5));
    EXPECT_FALSE(model->first->weight.grad().defined()) << "the step is dropped";
    std::printf("lost\n");
  });
  late::set_lost_peer(late::LostPeer::kFails);
  expect_rank1_lost(results);
}

TEST(LateFaults, ARankThatDoesNotComeIsATimeout) {
  const late::Scope scope;
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    JoinOptions options = late::join_options();
    options.timeout = seconds(2);
    const World world = World::join(options);
    Net model;
    DistributedDataParallel ddp(model, world);
    loss_of(model->forward(batch(rank))).backward();
    if (rank == 1) return std::this_thread::sleep_for(seconds(5));
    const auto began = std::chrono::steady_clock::now();
    EXPECT_THROW(loss_of(model->forward(batch(rank))).backward(), TimeoutError);
    EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(4));
  })));
}

// A model that is trained again and again with the same data, and a collective that fails on
// rank 1.
struct Failing {
  explicit Failing(const World& its_world, const DdpOptions& options = {})
      : world(its_world), ddp(model, its_world, options), input(batch(its_world.rank())) {
    model->first->weight.register_hook([this](const at::Tensor&) {
      if (on_last_gradient) std::exchange(on_last_gradient, nullptr)();
    });
    train();
    train();
    late::synchronize_all();
    world.barrier();
  }

  void train() {
    model->zero_grad();
    loss_of(model->forward(input)).backward();
  }

  void expect_mean(double tolerance) {
    world.barrier();
    train();
    const auto means = mean_gradients(
        2, [](Net& local, int rank) { loss_of(local->forward(batch(rank))).backward(); });
    expect_gradients(model, means, tolerance);
  }

  World world;
  Net model;
  DistributedDataParallel ddp;
  at::Tensor input;
  std::function<void()> on_last_gradient;
};

const char* const kFailure = "A test has asked for this failure";

struct FailureCase {
  bool has_hook = false;
  late::AfterFailure then = late::AfterFailure::kGoesOn;

  DdpOptions options() const {
    return {
        .bucket_bytes = 256, .first_bucket_bytes = 256, .hook = has_hook ? bf16_hook() : nullptr};
  }
  double tolerance() const { return has_hook ? 1e-2 : 1e-6; }
};
class LateFailure : public testing::TestWithParam<FailureCase> {};
INSTANTIATE_TEST_SUITE_P(Reducer, LateFailure,
                         testing::Values(FailureCase{}, FailureCase{.has_hook = true},
                                         FailureCase{.then = late::AfterFailure::kRefusesAll},
                                         FailureCase{.has_hook = true,
                                                     .then = late::AfterFailure::kRefusesAll}),
                         [](const auto& one) {
                           return std::string(one.param.has_hook ? "OfAHook" : "OfABucket") +
                                  (one.param.then == late::AfterFailure::kRefusesAll ? "ForGood"
                                                                                     : "");
                         });

// The host has ended that step, and others, when the collective fails, on one rank.
TEST_P(LateFailure, IsALaterStepsErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [kind = GetParam()](const World& world) {
    Failing failing(world, kind.options());
    const at::Tensor& weight = failing.model->first->weight;
    if (world.rank() == 1) late::fail_next(kind.then);
    const auto go = std::make_shared<late::Mark>();
    late::block(late::stream().id(), go);
    std::string told;
    std::int64_t step = 2;
    for (; told.empty() && step < 1000; ++step) {
      if (step == 5) go->reach();  // the host is three steps ahead
      try {
        failing.train();
      } catch (const Error& error) {
        told = error.what();
        EXPECT_EQ(error.peer(), 1) << told;
      }
    }
    go->reach();
    EXPECT_GT(step, 5) << "the device was not late";
    EXPECT_TRUE(has(told, kind.has_hook ? "A collective of the hook bf16 in step 2 failed"
                                        : "all_reduce of bucket 0 (last."))
        << told;
    EXPECT_FALSE(has(told, "all_reduce of all_reduce")) << told;
    EXPECT_TRUE(has(told, kFailure)) << told;
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_EQ(world.sum(static_cast<double>(step)), 2.0 * static_cast<double>(step));
    const auto began = std::chrono::steady_clock::now();
    EXPECT_TRUE(at::isfinite(weight.cpu()).all().item<bool>());
    EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(5));
    if (kind.then == late::AfterFailure::kGoesOn) failing.expect_mean(kind.tolerance());
  })));
}

// The host sees it before the numbers of that step go.
TEST_P(LateFailure, BeforeTheEndOfBackwardIsThatStepsErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [kind = GetParam()](const World& world) {
    Failing failing(world, kind.options());
    if (world.rank() == 1) {  // alone: rank 0's device waits for collectives that rank 1 may refuse
      failing.on_last_gradient = [] { late::synchronize_all(); };
      late::fail_next(kind.then);
    }
    const std::string error = error_of([&] { failing.train(); });
    EXPECT_TRUE(has(error, kFailure)) << error;
    if (kind.then == late::AfterFailure::kGoesOn) failing.expect_mean(kind.tolerance());
  })));
}

// Once the numbers are written, this step cannot fail on one rank alone.
TEST(LateFaults, AFailureAfterTheNumbersIsTheNextStepsErrorOnAllRanks) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Failing failing(world);
    bool waits = true;
    failing.ddp.stop_when([&] {  // asked when they are written
      if (std::exchange(waits, false)) late::synchronize_all();
      return false;
    });
    if (world.rank() == 1) late::fail_next();
    EXPECT_EQ(error_of([&] { failing.train(); }), "no error");
    const std::string error = error_of([&] { failing.train(); });
    EXPECT_TRUE(has(error, kFailure)) << error;
    failing.expect_mean(1e-6);
  })));
}

// The program of rank 1 ends the backward in which it would have heard of it.
TEST(LateFaults, AFailureIsToldAfterABackwardThatWasNotEnded) {
  EXPECT_TRUE(all_passed(late::run(2, [](const World& world) {
    Failing failing(world);
    if (world.rank() == 1) late::fail_next();
    const auto go = std::make_shared<late::Mark>();
    late::block(late::stream().id(), go);
    failing.train();
    go->reach();
    late::synchronize_all();
    world.barrier();
    if (world.rank() == 1) {
      failing.on_last_gradient = [] { throw std::runtime_error("The program has failed."); };
      EXPECT_THROW(failing.train(), std::runtime_error);
    }
    const std::string error = error_of([&] { failing.train(); });
    EXPECT_TRUE(has(error, kFailure)) << error;
    failing.expect_mean(1e-6);
  })));
}

}  // namespace
}  // namespace lockstep::test
