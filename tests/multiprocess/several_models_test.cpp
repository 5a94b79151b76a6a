// Programs with several wrapped models, each with an engine of its own: calls that do not match are
// found across them.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <thread>

#include "multiprocess/ddp_model.h"
#include "support/mismatch.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::seconds;

struct ActorAndCritic {
  World world = World::join();
  Net actor;
  Net critic;
  DistributedDataParallel of_actor{actor, world, {.name = "actor"}};
  DistributedDataParallel of_critic{critic, world, {.name = "critic"}};
};

void train(Net& model, int rank) { loss_of(model->forward(batch(rank))).backward(); }

class SeveralModels : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Hosts, SeveralModels, testing::Values("aa", "ab"),
                         [](const auto& test) { return test.param; });

TEST_P(SeveralModels, ActorOnOneRankAndCriticOnTheOther) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int rank) {
        ActorAndCritic models;
        train(models.actor, rank);
        train(models.critic, rank);
        expect_mismatch([&] { train(rank == 0 ? models.actor : models.critic, rank); },
                        {"rank 0 in all_reduce of f32[", "of the model actor; rank 1 in all_reduce",
                         "of the model critic"});
      },
      on_hosts(GetParam()))));
}

TEST_P(SeveralModels, BackwardAgainstASumOfTheWorld) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int rank) {
        const World world = World::join();
        Net model;
        const DistributedDataParallel ddp(model, world);
        expect_mismatch(
            [&] {
              if (rank == 0) {
                train(model, rank);
              } else {
                world.sum(1);
              }
            },
            {"of wrapped model 0 (first.weight and 7 more); rank 1 in all_reduce of f64[1], 8 "
             "bytes, of the world"});
      },
      on_hosts(GetParam()))));
}

TEST_P(SeveralModels, WrappingAgainstBackward) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int rank) {
        const World world = World::join();
        Net actor;
        Net critic;
        const DistributedDataParallel of_actor(actor, world, {.name = "actor"});
        expect_mismatch(
            [&] {
              if (rank == 0) {
                train(actor, rank);
              } else {
                const DistributedDataParallel of_critic(critic, world, {.name = "critic"});
              }
            },
            {"of the model actor; rank 1 in DistributedDataParallel (barrier), of the world"});
      },
      on_hosts(GetParam()))));
}

// Rank 0 evaluates for longer than the board's patience while rank 1 trains on.
TEST_P(SeveralModels, ARankThatIsLateIsNotAMismatch) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int rank) {
        ActorAndCritic models;
        for (int step = 0; step < 4; ++step) {
          if (step % 2 == rank) std::this_thread::sleep_for(seconds(1));
          train(models.actor, rank);
          if (step % 2 != rank) std::this_thread::sleep_for(seconds(1));
          train(models.critic, rank);
          EXPECT_EQ(models.world.sum(1), 2);
        }
      },
      on_hosts(GetParam()))));
}

}  // namespace
}  // namespace lockstep::test
