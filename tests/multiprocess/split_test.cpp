// Parts of a world: who is in them, that they work at once and apart, on every engine, and what is
// said of bad calls and of ranks that are gone.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <cmath>
#include <csignal>
#include <iostream>
#include <thread>

#include "multiprocess/ddp_model.h"
#include "multiprocess/on_engines.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::seconds;

class Split : public testing::TestWithParam<OnEngine> {};
INSTANTIATE_TEST_SUITE_P(Engines, Split, testing::ValuesIn(all_engines(4)), name_of);

class SplitWithComparedCalls : public Split {};
INSTANTIATE_TEST_SUITE_P(Engines, SplitWithComparedCalls,
                         testing::ValuesIn(engines_where(4, &OnEngine::compares_calls)), name_of);

class SplitWithLostRanks : public Split {};
INSTANTIATE_TEST_SUITE_P(Engines, SplitWithLostRanks,
                         testing::ValuesIn(engines_where(4, can_lose_ranks)), name_of);

double sum_of_global_ranks(const World& world) {
  return world.sum(static_cast<double>(world.global_rank()));
}

TEST_P(Split, PartsHaveTheirOwnRanksAndCalls) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
    const int rank = world.rank();
    EXPECT_EQ(world.global_rank(), rank);
    // {0, 2} and {1, 3}, the second in reverse.
    const auto part = world.split(rank % 2, rank % 2 == 0 ? 0 : 3 - rank);
    ASSERT_TRUE(part);
    EXPECT_EQ(part->size(), 2);
    EXPECT_EQ(part->rank(), rank % 2 == 0 ? rank / 2 : (3 - rank) / 2);
    EXPECT_EQ(part->global_rank(), rank);
    EXPECT_EQ(part->members()[static_cast<std::size_t>(part->rank())].rank, rank);
    EXPECT_EQ(part->host(), world.host());
    const std::string hosts = GetParam().hosts;
    const bool is_one_host = hosts[static_cast<std::size_t>(rank)] ==
                             hosts[static_cast<std::size_t>(rank < 2 ? rank + 2 : rank - 2)];
    EXPECT_EQ(part->local_size(), is_one_host ? 2 : 1);
    EXPECT_LT(part->local_rank(), part->local_size());
    // Numbers of calls differ between the parts: they do not meet.
    for (int i = 0; i < 5 + 3 * (rank % 2); ++i) {
      EXPECT_EQ(sum_of_global_ranks(*part), rank % 2 == 0 ? 2 : 4);
    }
    EXPECT_EQ(sum_of_global_ranks(world), 6);
    const at::Tensor order = part->all_gather(at::scalar_tensor(rank, at::kInt));
    EXPECT_EQ(order[0].item<int>(), rank % 2 == 0 ? 0 : 3);
    const auto from_first = part->on_rank0([&] { return part->global_rank(); });
    EXPECT_EQ(from_first, rank % 2 == 0 ? 0 : 3);
    const World again = part->duplicate();
    EXPECT_EQ(sum_of_global_ranks(again), rank % 2 == 0 ? 2 : 4);
    EXPECT_EQ(again.global_rank(), rank);
    // Parts of parts, and a part of all ranks.
    const auto alone = part->split(part->rank());
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->global_rank(), rank);
    EXPECT_EQ(sum_of_global_ranks(*alone), rank);
    const auto whole = world.split(7, 10 - rank);
    EXPECT_EQ(whole->rank(), 3 - rank);
    EXPECT_EQ(sum_of_global_ranks(*whole), 6);
    // Also among the ranks of its host it is in the reverse order.
    int before = 0;
    for (int other = 3; other > rank; --other) {
      const auto at = static_cast<std::size_t>(other);
      before += hosts[at] == hosts[static_cast<std::size_t>(rank)] ? 1 : 0;
    }
    EXPECT_EQ(whole->local_rank(), before);
    EXPECT_EQ(whole->local_size(), world.local_size());
    EXPECT_EQ(whole->duplicate().local_rank(), before);
  })));
}

TEST_P(Split, ARankWithoutAColorBelongsToNoPart) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const bool is_in = world.rank() != 1;
    const auto part = world.split(is_in ? std::optional<int>(5) : std::nullopt);
    EXPECT_EQ(part.has_value(), is_in);
    if (part) {
      EXPECT_EQ(sum_of_global_ranks(*part), 5);
    }
    EXPECT_EQ(world.sum(1), 4);
    EXPECT_FALSE(world.split(std::nullopt));
    EXPECT_EQ(sum_of_global_ranks(*world.split(0)), 6);  // numbers are still the same on all
  })));
}

TEST_P(Split, BadColorsAndKeysAreErrorsOfAllRanks) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const bool is_bad = world.rank() == 2;
    const auto color = thrown_by<UsageError>([&] { world.split(is_bad ? -3 : 0); });
    expect_says(color, {"split was given color -3 on rank 2", "0 or more"});
    const auto key = thrown_by<UsageError>([&] { world.split(0, is_bad ? -1 : 4); });
    expect_says(key, {"split was given key -1 on rank 2"});
    const auto none = thrown_by<UsageError>([&] { world.split(std::nullopt, is_bad ? -7 : 0); });
    expect_says(none, {"key -7 on rank 2"});
    EXPECT_EQ(color.rank(), world.rank());
    const auto part = world.split(world.rank() / 2);  // and it goes on
    EXPECT_EQ(part->size(), 2);
    part->barrier();  // on Gloo a rank may come out while another still connects: none ends before
  })));
}

// Where the engine compares calls; Gloo does not. The engine of a part fails, and with MPI the
// ranks then do not end as mpirun wants it: they say themselves that all is well.
TEST_P(SplitWithComparedCalls, ErrorsNameRanksOfTheWholeWorld) {
  const auto results = run_on(GetParam(), [](const World& world) {
    const int rank = world.rank();
    const auto part = world.split(rank / 2, 0);
    if (rank < 2) {
      EXPECT_EQ(sum_of_global_ranks(*part), 1);
      std::this_thread::sleep_for(seconds(2));
      EXPECT_EQ(sum_of_global_ranks(*part), 1);  // what is wrong there is nothing to this part
    } else {
      const auto usage = thrown_by<UsageError>([&] { part->broadcast(at::zeros({3}), 2); });
      EXPECT_EQ(usage.rank(), rank);
      const auto error =
          thrown_by<MismatchError>([&] { part->all_reduce(at::zeros({rank == 2 ? 3 : 5})); });
      EXPECT_EQ(error.rank(), rank);
      EXPECT_EQ(error.peer(), 5 - rank);
      expect_says(error, {"on rank 2", "on rank 3"});
      std::this_thread::sleep_for(seconds(2));
    }
    if (!testing::Test::HasFailure()) std::cout << "all is well" << std::endl;
  });
  std::size_t count = 0;
  const std::string all = show(results);
  for (std::size_t at = 0; (at = all.find("all is well", at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, 4U) << all;
}

TEST_P(Split, WhatFRaisesOnRank0NamesItsGlobalRank) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const auto part = world.split(world.rank() / 2);
    const auto fail = [] { throw_error(ErrorKind::kUsage, {}, "no such file"); };
    const auto error = thrown_by<UsageError>([&] { part->on_rank0(fail); });
    if (part->rank() == 1) {
      EXPECT_EQ(error.rank(), world.rank());
      EXPECT_EQ(error.peer(), world.rank() - 1);
      expect_says(error, {world.rank() == 3 ? "Because rank 2: no such" : "Because rank 0: no"});
    }
  })));
}

// Rank 3 dies while rank 1 waits for it; ranks 0 and 2 do not notice.
TEST_P(SplitWithLostRanks, ALostRankIsSeenByThoseWhoWaitForIt) {
  const auto results = run_on(GetParam(), [](const World& world) {
    const int rank = world.rank();
    const auto part = world.split(rank % 2);
    if (rank == 3) {
      part->barrier();
      ::raise(SIGKILL);
    }
    if (rank == 1) {
      part->barrier();
      const auto error = thrown_by<PeerLostError>([&] {
        for (int i = 0; i < 3; ++i) part->all_reduce(at::ones({1000}));
      });
      EXPECT_EQ(error.rank(), 1);
      EXPECT_EQ(error.peer(), 3);
      expect_says(error, {"rank 3 ("});
    } else {
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(sum_of_global_ranks(*part), 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }
    std::this_thread::sleep_for(seconds(1));  // so that none is seen to be gone before
  });
  for (const int rank : {0, 1, 2}) {
    EXPECT_TRUE(results[static_cast<std::size_t>(rank)].status.is_ok()) << show(results);
  }
  EXPECT_LT(results[1].seconds, 30) << show(results);
}

// Each half trains a model of its own, and all ranks together another one, in the same backward.
TEST_P(Split, HalvesTrainTwoModelsAndTheWholeWorldAThird) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const int color = world.rank() / 2;
    const auto half = world.split(color);
    Net own;
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : own->parameters()) parameter.mul_(1.0 + color);
    }
    Net common;
    const DistributedDataParallel of_half(own, *half, {.name = "own"});
    const DistributedDataParallel of_all(common, world, {.name = "common"});
    for (int step = 0; step < 3; ++step) {
      own->zero_grad();
      common->zero_grad();
      const at::Tensor input = batch(world.rank(), step);
      (loss_of(own->forward(input)) + loss_of(common->forward(input))).backward();
      const auto of_own = mean_gradients(2, [&](Net& model, int rank) {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) parameter.mul_(1.0 + color);
        const torch::AutoGradMode with_grad(true);
        loss_of(model->forward(batch(2 * color + rank, step))).backward();
      });
      expect_gradients(own, of_own);
      const auto of_common = mean_gradients(
          4, [&](Net& model, int rank) { loss_of(model->forward(batch(rank, step))).backward(); });
      expect_gradients(common, of_common, 1e-5);
    }
    expect_same_bits(*half, *own);
    expect_same_bits(world, *common);
    // The halves have been apart.
    const at::Tensor weights = world.all_gather(own->first->weight);
    EXPECT_FALSE(at::equal(weights[0], weights[2]));
  })));
}

// The part's first rank is not rank 0 of the world: errors of training say which it is, too.
TEST(SplitTraining, ErrorsOfTrainingNameRanksOfTheWholeWorld) {
  EXPECT_TRUE(all_passed(run_on({"shm", "aaa"}, [](const World& world) {
    const int rank = world.rank();
    const auto part = world.split(rank > 0 ? std::optional<int>(0) : std::nullopt);
    if (!part) return;
    const torch::nn::Linear model(4, rank == 2 ? 3 : 2);
    const auto error =
        thrown_by<MismatchError>([&] { const DistributedDataParallel ddp(model.ptr(), *part); });
    EXPECT_EQ(error.rank(), rank);
    EXPECT_EQ(error.peer(), 3 - rank);
    expect_says(error, {"\n  rank 1: ", "\n  rank 2: "});
    const auto sampler = thrown_by<UsageError>([&] { const DistributedSampler none(0, *part); });
    EXPECT_EQ(sampler.rank(), rank);
    const auto loss = thrown_by<UsageError>(
        [&] { finite_mean(at::scalar_tensor(rank == 2 ? std::nan("") : 1.0), *part); });
    expect_says(loss, {"nan on rank 2"});
  })));
}

// Ranks of one part that wait for each other in different calls hear of it, like those of a world.
TEST(SplitWaits, CrossedCallsOfPartAndWorldAreFound) {
  EXPECT_TRUE(all_passed(run_on({"shm", "aaa"}, [](const World& world) {
    const int rank = world.rank();
    const auto part = world.split(rank < 2 ? std::optional<int>(0) : std::nullopt, 0, "the pair");
    const auto error = thrown_by<MismatchError>([&] {
      if (rank == 0) {
        part->barrier();
      } else {
        world.barrier();
      }
    });
    expect_says(error, {"rank 0 in barrier, of the pair", "ranks 1, 2 in barrier, of the world"});
    std::this_thread::sleep_for(seconds(1));
  })));
}

// Ranks that are late in one part are no reason for an alarm in the other.
TEST(SplitWaits, APartThatIsSlowIsNoMismatch) {
  EXPECT_TRUE(all_passed(run_on({"shm", "aaaa"}, [](const World& world) {
    const auto part = world.split(world.rank() % 2);
    for (int step = 0; step < 3; ++step) {
      if (world.rank() == step) std::this_thread::sleep_for(std::chrono::milliseconds(900));
      EXPECT_EQ(part->sum(1), 2);
    }
    EXPECT_EQ(world.sum(1), 4);
  })));
}

TEST(SplitAlone, AWorldOfOneHasPartsOfOne) {
  const World world = World::join();
  const auto part = world.split(3, 4);
  EXPECT_EQ(part->size(), 1);
  EXPECT_EQ(part->sum(5), 5);
  EXPECT_FALSE(world.split(std::nullopt));
  EXPECT_THROW(world.split(-1), UsageError);
  EXPECT_THROW(world.split(0, -1), UsageError);
}

}  // namespace
}  // namespace lockstep::test
