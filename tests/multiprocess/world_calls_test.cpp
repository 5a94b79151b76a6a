// gather, scatter, all_to_all, all_gather_uneven, messages, moments and started operations: on
// every engine, in a part of a world, and alone.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/cuda.h>

#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include "multiprocess/on_engines.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class WorldCalls : public testing::TestWithParam<OnEngine> {};
INSTANTIATE_TEST_SUITE_P(Engines, WorldCalls, testing::ValuesIn(all_engines(3)), name_of);

at::Tensor tensor_of(int rank) { return at::arange(6).reshape({2, 3}) + 100 * rank; }

void expect_moves(const World& world) {
  const int rank = world.rank();
  const int size = world.size();
  for (int root = 0; root < size; ++root) {
    const at::Tensor all = world.gather(tensor_of(rank).t(), root);  // any strides
    EXPECT_EQ(all.defined(), rank == root);
    for (int peer = 0; peer < size && rank == root; ++peer) {
      EXPECT_TRUE(at::equal(all[peer], tensor_of(peer).t()));
    }
    std::vector<at::Tensor> parts;
    for (int peer = 0; peer < size; ++peer) parts.push_back(tensor_of(peer + root));
    const at::Tensor room = at::zeros({3, 2}, at::kLong);
    const at::Tensor got =
        world.scatter(room.t(), rank == root ? at::stack(parts) : at::Tensor(), root);
    EXPECT_EQ(got.data_ptr(), room.data_ptr());
    EXPECT_TRUE(at::equal(room.t(), tensor_of(rank + root)));
  }
  // Part p of rank r is 10 r + p.
  const at::Tensor mine = (at::arange(size) + 10 * rank).unsqueeze(1).expand({size, 4});
  const at::Tensor theirs = world.all_to_all(mine);
  const at::Tensor expected = (at::arange(size) * 10 + rank).unsqueeze(1).expand({size, 4});
  EXPECT_TRUE(at::equal(theirs, expected)) << theirs;
}

void expect_uneven(const World& world) {
  const int rank = world.rank();
  // Rank 0 has nothing at all.
  const auto all = world.all_gather_uneven(at::full({2 * rank, 3}, rank, at::kFloat));
  ASSERT_EQ(static_cast<int>(all.size()), world.size());
  for (int peer = 0; peer < world.size(); ++peer) {
    EXPECT_TRUE(
        at::equal(all[static_cast<std::size_t>(peer)], at::full({2 * peer, 3}, peer, at::kFloat)));
  }
  const auto none = world.all_gather_uneven(at::zeros({0, 5}));
  EXPECT_EQ(none.back().sizes(), (std::vector<std::int64_t>{0, 5}));
}

// Each sends to the next, in a ring, with two tags that are received in the other order.
void expect_messages(const World& world) {
  const int next = (world.rank() + 1) % world.size();
  const int before = (world.rank() + world.size() - 1) % world.size();
  const at::Tensor large = at::full({300000}, world.rank() + 0.5);
  const Pending first = world.send_async(large, next, 7);
  const Pending second = world.send_async(tensor_of(world.rank()).t(), next, 8);
  const at::Tensor room = at::zeros({2, 3}, at::kLong);
  world.recv(room.t(), before, 8);  // the same strides as sent: t() of {2, 3}
  EXPECT_TRUE(at::equal(room, tensor_of(before)));
  const at::Tensor received = at::empty({300000});
  const Pending last = world.recv_async(received, before, 7);
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  while (!last.is_done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(last.is_done());  // found by asking alone
  EXPECT_TRUE(last.result().is_same(received));
  EXPECT_EQ(received.min().item<float>(), before + 0.5f);
  first.wait();
  second.wait();
  EXPECT_TRUE(first.is_done() && second.is_done());
  if (world.rank() == 0) world.send(at::full({3}, 2.0f), 1);
  if (world.rank() == 1) {
    EXPECT_EQ(world.recv(at::zeros({3}), 0).sum().item<float>(), 6);
  }
}

void expect_started(const World& world) {
  const double sum = world.size() * (world.size() + 1) / 2.0;
  const at::Tensor ones = at::full({1000}, world.rank() + 1.0);
  const at::Tensor odd = at::full({4, 6}, world.rank() + 1.0).slice(1, 0, 6, 2);
  std::vector<Pending> started;
  started.push_back(world.all_reduce_async(ones));
  started.push_back(world.all_reduce_async(odd));
  started.push_back(world.all_gather_async(at::scalar_tensor(world.rank(), at::kInt)));
  started.push_back(world.reduce_scatter_async(at::ones({world.size(), 2})));
  started.push_back(world.broadcast_async(at::full({2}, world.rank() + 3.0f), 1));
  started.push_back(world.all_to_all_async(at::full({world.size(), 2}, world.rank() + 0.0f)));
  started.push_back(world.gather_async(at::full({2}, world.rank() + 0.0f), 1));
  started.push_back(world.all_gather_uneven_async(at::ones({world.rank(), 2})));
  started.push_back(world.barrier_async());
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  while (!started.back().is_done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(started.back().is_done());
  for (const Pending& one : started) one.wait(seconds(20));
  EXPECT_TRUE(started[0].result().is_same(ones));
  EXPECT_EQ(ones[7].item<double>(), sum);
  EXPECT_TRUE(at::equal(started[1].result(), at::full({4, 3}, sum)));
  EXPECT_TRUE(at::equal(odd, at::full({4, 3}, sum)));
  EXPECT_TRUE(at::equal(started[2].result(), at::arange(world.size(), at::kInt)));
  EXPECT_TRUE(at::equal(started[3].result(), at::full({2}, world.size() + 0.0f)));
  EXPECT_TRUE(at::equal(started[4].result(), at::full({2}, 4.0f)));
  EXPECT_EQ(started[5].result()[1][0].item<float>(), 1);
  EXPECT_EQ(started[6].result().defined(), world.rank() == 1);
  const auto uneven = started[7].results();
  for (int peer = 0; peer < world.size(); ++peer) {
    EXPECT_TRUE(at::equal(uneven[static_cast<std::size_t>(peer)], at::ones({peer, 2})));
  }
  EXPECT_EQ(started[7].result().sizes(),
            (std::vector<std::int64_t>{world.size(), world.size() - 1, 2}));
  EXPECT_FALSE(started[8].result().defined());
}

TEST_P(WorldCalls, MoveWhatTheySay) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    expect_moves(world);
    expect_uneven(world);
    expect_messages(world);
    expect_started(world);
    const auto part = world.split(world.rank() == 1 ? 1 : 0, 5 - world.rank());
    expect_moves(*part);
    expect_uneven(*part);
    if (part->size() == 2) {
      expect_messages(*part);
      expect_started(*part);
    }
    world.barrier();
  })));
}

TEST_P(WorldCalls, WhatDiffersIsAnErrorOfAllRanks) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const bool is_odd = world.rank() == 2;
    const at::Tensor x = at::zeros({3, 2});
    // As many elements in another shape are another tensor, too.
    const auto gather = thrown_by<MismatchError>([&] { world.gather(is_odd ? x.t() : x); });
    expect_says(gather, {"gather was given Float[3, 2], root 0 on rank 0",
                         "Float[2, 3], root 0 on rank 2"});
    EXPECT_EQ(gather.peer(), is_odd ? 0 : 2);
    const auto root = thrown_by<MismatchError>([&] { world.gather(x, is_odd ? 1 : 0); });
    expect_says(root, {"root 0 on rank 0", "root 1 on rank 2"});
    const auto no_root = thrown_by<UsageError>([&] { world.gather(x, is_odd ? 3 : 0); });
    expect_says(no_root, {"root 3 in a world of 3"});
    const auto all_to_all =
        thrown_by<MismatchError>([&] { world.all_to_all(is_odd ? x.to(at::kDouble) : x); });
    expect_says(all_to_all, {"Float[3, 2] on rank 0", "Double[3, 2] on rank 2"});
    const auto not_parts = thrown_by<UsageError>([&] { world.all_to_all(is_odd ? x.t() : x); });
    expect_says(not_parts, {"one part per rank"});
    if (!is_odd) expect_says(not_parts, {"Because rank 2: "});
    const auto rows = thrown_by<MismatchError>([&] {
      world.all_gather_uneven(is_odd ? at::zeros({1, 3}) : at::zeros({2, 2}));
    });
    expect_says(rows, {"rows of Float[2] on rank 0", "rows of Float[3] on rank 2"});
    const auto scalar = thrown_by<UsageError>([&] {
      world.all_gather_uneven(is_odd ? at::scalar_tensor(1.0) : at::zeros({2, 2}));
    });
    expect_says(scalar, {"without dimensions"});
    // The root's parts are wrong: the others would wait for them.
    const auto parts = thrown_by<UsageError>([&] {
      world.scatter(at::zeros({2}), is_odd ? at::zeros({3, 4}) : at::Tensor(), 2);
    });
    expect_says(parts, {"parts Float[3, 4] for a tensor Float[2]"});
    const auto no_parts =
        thrown_by<UsageError>([&] { world.scatter(at::zeros({2}), at::Tensor(), 2); });
    expect_says(no_parts, {"an undefined tensor"});
    EXPECT_EQ(world.sum(1), 3);  // nothing is broken by it
    expect_moves(world);
  })));
}

TEST_P(WorldCalls, BadMessagesAreRefused) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const at::Tensor x = at::zeros({3});
    const auto self = thrown_by<UsageError>([&] { world.send(x, world.rank()); });
    expect_says(self, {"this rank itself"});
    EXPECT_THROW(world.recv(x, world.rank()), UsageError);
    expect_says(thrown_by<UsageError>([&] { world.send(x, 3); }),
                {"rank 3 in a world of 3", "from 0 to 2"});
    EXPECT_THROW(world.recv(x, -1), UsageError);
    EXPECT_THROW(world.send_async(x, (world.rank() + 1) % 3, -1), UsageError);
    EXPECT_THROW(world.recv_async(x, (world.rank() + 1) % 3, 1 << 20), UsageError);
    EXPECT_THROW(world.send(at::Tensor(), (world.rank() + 1) % 3), UsageError);
    // What does not fit is thrown away: the next message is received as it was sent.
    if (world.rank() == 0) {
      world.send(at::ones({5}), 1);
      world.send(at::ones({3}, at::kInt), 1);
      world.send(at::full({3}, 7.0f), 1);
    }
    if (world.rank() == 1) {
      const auto size = thrown_by<MismatchError>([&] { world.recv(x, 0); });
      expect_says(size, {"recv was given Float[3] on rank 1, but rank 0 sent Float[5]"});
      EXPECT_EQ(size.peer(), 0);
      const auto type = thrown_by<MismatchError>([&] { world.recv_async(x, 0).wait(); });
      expect_says(type, {"Int[3]"});
      EXPECT_EQ(world.recv(x, 0).sum().item<float>(), 21);
    }
    EXPECT_EQ(world.sum(1), 3);
  })));
}

// A tensor that the engine does not take is refused before anybody has heard of the call.
TEST_P(WorldCalls, ATensorOnAnotherDeviceIsRefusedWhole) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const at::Tensor elsewhere = at::empty({3, 2}, at::kMeta);
    if (world.rank() == 0) {
      const auto error = thrown_by<UsageError>([&] { world.send(elsewhere, 1); });
      expect_says(error, {"send was given a tensor on meta, and the engine '"});
      world.send(at::full({3, 2}, 4.0f), 1);
    } else if (world.rank() == 1) {
      EXPECT_THROW(world.recv(elsewhere, 0), UsageError);
      EXPECT_EQ(world.recv(at::zeros({3, 2}), 0).sum().item<float>(), 24);
    }
    const bool is_odd = world.rank() == 1;
    const at::Tensor mine = is_odd ? elsewhere : at::zeros({3, 2});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { world.gather(mine); }, [&] { world.all_to_all(mine); },
             [&] { world.all_gather_uneven(mine); },
             [&] { functional::all_reduce(mine, world); }}) {
      const auto error = thrown_by<UsageError>(call);
      expect_says(error, {"was given a tensor on meta"});
      if (!is_odd) expect_says(error, {"Because rank 1: "});
    }
    EXPECT_EQ(world.sum(1), 3);
  })));
}

// In a tensor that was made without a record of gradients, and is then used with one.
TEST_P(WorldCalls, ResultsMayBeChangedInPlace) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const int rank = world.rank();
    const at::Tensor z = at::full({2}, rank + 1.0).requires_grad_();
    const at::Tensor all = world.all_gather(z);
    all[rank] = z;
    (all * (rank + 1)).sum().backward();
    EXPECT_TRUE(at::equal(z.grad(), at::full({2}, rank + 1.0)));
    const at::Tensor part = world.reduce_scatter(at::ones({3, 2}));
    part.mul_(at::ones({2}).requires_grad_());
    EXPECT_TRUE(part.requires_grad());
    const at::Tensor exchanged = world.all_to_all(at::ones({3, 2}));
    exchanged.mul_(at::ones({2}).requires_grad_());
    const auto uneven = world.all_gather_uneven(at::ones({2}));
    uneven[0].mul_(at::ones({2}).requires_grad_());
    EXPECT_TRUE(uneven[0].requires_grad());
  })));
}

void expect_near(double value, double expected, double relative) {
  EXPECT_NEAR(value, expected, relative * std::abs(expected));
}

TEST_P(WorldCalls, MomentsAreThoseOfAllNumbersTogether) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const auto values_of = [](int rank) {  // of different lengths, rank 0 none
      return at::sin(at::arange(7 * rank, at::kDouble) + rank) * (rank + 1);
    };
    const auto weights_of = [](int rank) { return at::arange(7 * rank, at::kDouble).fmod(3); };
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> weights;
    for (int rank = 0; rank < world.size(); ++rank) {
      values.push_back(values_of(rank));
      weights.push_back(weights_of(rank));
    }
    const at::Tensor all = at::cat(values);
    const Moments plain = world.moments(values_of(world.rank()));
    expect_near(plain.mean, all.mean().item<double>(), 1e-12);
    expect_near(plain.deviation, all.std(/*unbiased=*/false).item<double>(), 1e-12);
    EXPECT_EQ(plain.weight, 21);
    const at::Tensor shares = at::cat(weights);
    const at::Tensor mean = (all * shares).sum() / shares.sum();
    const at::Tensor variance = ((all - mean).pow(2) * shares).sum() / shares.sum();
    const Moments weighted = world.moments(values_of(world.rank()), weights_of(world.rank()));
    expect_near(weighted.mean, mean.item<double>(), 1e-12);
    expect_near(weighted.deviation, variance.sqrt().item<double>(), 1e-12);
    EXPECT_EQ(weighted.weight, shares.sum().item<double>());
    // The same bits everywhere.
    const at::Tensor bits = world.all_gather(at::scalar_tensor(weighted.deviation, at::kDouble));
    EXPECT_EQ(bits.min().item<double>(), bits.max().item<double>());
  })));
}

TEST_P(WorldCalls, MomentsKeepTheirDigitsAndRefuseBadWeights) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    // Far from zero a sum of squares would have no digits left: 1e9 + {-1, 0, 1} by rank.
    const Moments far = world.moments(at::full({10}, 1e9 + world.rank() - 1, at::kDouble));
    EXPECT_EQ(far.mean, 1e9);
    expect_near(far.deviation, std::sqrt(2.0 / 3), 1e-12);
    // f32 values are added in f64.
    const Moments many = world.moments(at::full({100000}, 0.1f));
    expect_near(many.mean, static_cast<double>(0.1f), 1e-14);
    EXPECT_LT(many.deviation, 1e-12);
    const Moments nothing = world.moments(at::zeros({0}));
    EXPECT_EQ(nothing.weight, 0);
    EXPECT_EQ(nothing.mean, 0);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const Moments masked = world.moments(at::tensor({nan, 2.0}), at::tensor({0.0, 1.0}));
    EXPECT_EQ(masked.mean, 2);
    const bool is_odd = world.rank() == 1;
    const auto negative = thrown_by<UsageError>(
        [&] { world.moments(at::ones({2}), is_odd ? -at::ones({2}) : at::ones({2})); });
    expect_says(negative, {"negative or not finite"});
    const auto count = thrown_by<UsageError>(
        [&] { world.moments(at::ones({2}), is_odd ? at::ones({3}) : at::Tensor()); });
    expect_says(count, {"values Float[2] and weights Float[3]"});
    const auto complex = thrown_by<UsageError>([&] {
      world.moments(at::ones({2}), at::ones({2}, is_odd ? at::kComplexFloat : at::kFloat));
    });
    expect_says(complex, {"complex weights"});
    const auto device = thrown_by<UsageError>(
        [&] { world.moments(at::ones({2}), is_odd ? at::ones({2}, at::kMeta) : at::Tensor()); });
    expect_says(device, {"on meta"});
    // What LibTorch cannot compute with is an error of all ranks, too.
    const auto foreign = thrown_by<UsageError>(
        [&] { world.moments(at::empty({2}, is_odd ? at::kBits8 : at::kFloat)); });
    if (!is_odd) expect_says(foreign, {"Because rank 1: "});
    EXPECT_EQ(world.moments(at::ones({1})).weight, 3);
  })));
}

TEST(WorldCallsAlone, AWorldOfOne) {
  const World world = World::join();
  expect_moves(world);
  expect_uneven(world);
  const at::Tensor x = at::ones({2});
  EXPECT_TRUE(world.all_reduce_async(x).is_done());
  EXPECT_TRUE(world.all_reduce_async(x).result().is_same(x));
  EXPECT_THROW(world.send(x, 0), UsageError);  // to itself
  EXPECT_THROW(world.recv(x, 1), UsageError);
  EXPECT_EQ(world.moments(at::arange(3)).mean, 1);
  EXPECT_THROW(world.all_to_all(at::ones({2})), UsageError);
}

TEST(RankSeed, DiffersBetweenRanksAndIsTheSameInEachRun) {
  EXPECT_TRUE(all_passed(run_on({"shm", "aaa"}, [](const World& world) {
    std::set<std::int64_t> seeds;
    for (const std::uint64_t seed : {0, 1, 2}) {
      const auto mine = static_cast<std::int64_t>(rank_seed(seed, world));
      const at::Tensor all = world.all_gather(at::scalar_tensor(mine, at::kLong));
      for (int rank = 0; rank < 3; ++rank) seeds.insert(all[rank].item<std::int64_t>());
      EXPECT_EQ(all[0].item<std::int64_t>(), static_cast<std::int64_t>(seed));
      seed_all(seed, world);
      const at::Tensor drawn = at::rand({4});
      at::manual_seed(rank_seed(seed, world));
      EXPECT_TRUE(at::equal(drawn, at::rand({4})));
    }
    EXPECT_EQ(seeds.size(), 9U);
  })));
}

void expect_no_device(const World& world, const std::string& name, const std::string& words) {
  try {
    world.device(name);
    ADD_FAILURE() << name;
  } catch (const UsageError& error) {
    EXPECT_NE(error.message().find(words), std::string::npos) << error.what();
  }
}

TEST(WorldDevice, IsTheCpuWhereThereIsNothingElse) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is a GPU";
  const World world = World::join();
  EXPECT_TRUE(world.device().is_cpu());
  EXPECT_TRUE(world.device("cpu").is_cpu());
  expect_no_device(world, "cuda", "There is no device cuda on rank 0, which sees the CPU only");
  expect_no_device(world, "cuda:7", "There is no device cuda:7");
  expect_no_device(world, "gpu", "'gpu' is not a device");
}

}  // namespace
}  // namespace lockstep::test
