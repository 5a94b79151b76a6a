// Post-local SGD, step by step: which gradients ranks and parts have, whatever way they come, and
// what is refused.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "multiprocess/ddp_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

World join_world() { return World::join({.timeout = std::chrono::seconds(20)}); }

// Two of four ranks.
std::shared_ptr<CommHook> of_two(const World& world, std::int64_t start_step = 0) {
  return post_local_sgd_hook({.start_step = start_step, .part = world.split(world.rank() / 2)});
}

std::shared_ptr<CommHook> own_hook(std::int64_t start_step = 0) {
  return post_local_sgd_hook({.start_step = start_step, .averages_in_part = false});
}

// The gradients that a rank would have alone.
std::vector<at::Tensor> own_gradients(int rank, int step = 0) {
  return mean_gradients(
      1, [&](Net& net, int) { loss_of(net->forward(batch(rank, step))).backward(); });
}

std::vector<at::Tensor> mix(const std::vector<at::Tensor>& a, double of_a,
                            const std::vector<at::Tensor>& b, double of_b) {
  std::vector<at::Tensor> mixed;
  for (std::size_t i = 0; i < a.size(); ++i) mixed.push_back(of_a * a[i] + of_b * b[i]);
  return mixed;
}

// A weight of a rank says nothing of a gradient that nobody shares.
TEST(LocalSgd, KeepsWeightsOutOfOwnGradients) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = join_world();
    Net net;
    DistributedDataParallel ddp(net, world, {.hook = own_hook()});
    ddp.set_weight(rank + 1);
    loss_of(net->forward(batch(rank))).backward();
    expect_gradients(net, own_gradients(rank));
  })));
}

TEST(LocalSgd, WeightsAreSharesOfAPart) {
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = join_world();
    Net net;
    DistributedDataParallel ddp(net, world, {.hook = of_two(world)});
    const int first = rank / 2 * 2;
    const auto step = [&](double weight) {
      net->zero_grad();
      ddp.set_weight(weight);
      loss_of(net->forward(batch(rank))).backward();
    };
    const auto expected = [&](double of_first, double of_second) {
      return mix(own_gradients(first), of_first, own_gradients(first + 1), of_second);
    };
    step(rank + 1);  // 1 and 2, 3 and 4
    expect_gradients(net, rank < 2 ? expected(1. / 3, 2. / 3) : expected(3. / 7, 4. / 7));
    step(rank == 0 ? 3 : 1);  // of one part only
    expect_gradients(net, rank < 2 ? expected(0.75, 0.25) : expected(0.5, 0.5));
    // No mean in one part is an error of all ranks, and the end of nothing.
    const std::string error = error_of([&] { step(rank < 2 ? 1 : 0); });
    EXPECT_TRUE(has(error, "All ranks of its part gave the weight 0")) << error;
    EXPECT_EQ(has(error, "Because rank 2"), rank != 2) << error;
    step(1);
    expect_gradients(net, expected(0.5, 0.5));
  })));
}

// What a rank adds to its gradients in ways of their own: rows of a table, and a gradient that
// comes when its bucket has gone.
void backward_with_table(Net& net, const at::Tensor& table, int rank, int step, bool has_rows) {
  at::Tensor input = batch(rank, step);
  if (has_rows) {
    const at::Tensor rows = torch::tensor({rank, 7, 7, 3 + rank, 2});
    input = input + torch::embedding(table, rows, -1, false, /*sparse=*/true);
  }
  const at::Tensor hidden = Reentrant::apply(net->first(input), net->last->weight);
  loss_of(net->last(torch::tanh(hidden))).backward();
}

at::Tensor make_table() { return numbers({20, 6}, 3).requires_grad_(); }

DdpOptions small_buckets(std::shared_ptr<CommHook> hook) {
  return {
      .bucket_bytes = 64, .first_bucket_bytes = 64, .hook = std::move(hook), .sparse = {"table"}};
}

std::vector<NamedTensor> all_of(const Net& net, const at::Tensor& table) {
  std::vector<NamedTensor> all = {{"table", table}};
  for (const auto& one : net->named_parameters()) all.push_back({one.key(), one.value()});
  return all;
}

TEST(LocalSgd, KeepsSparseAndLateGradientsOwn) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = join_world();
    Net net;
    at::Tensor table = make_table();
    DistributedDataParallel ddp(all_of(net, table), world, small_buckets(own_hook(1)));
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      const bool has_rows = step < 2 || rank == 0;
      Net alone;
      at::Tensor its_table = make_table();
      net->zero_grad();
      table.mutable_grad() = at::Tensor();
      backward_with_table(net, table, rank, step, has_rows);
      backward_with_table(alone, its_table, rank, step, has_rows);
      const at::Tensor weight = net->last->weight.grad();
      EXPECT_EQ(at::allclose(weight, alone->last->weight.grad(), 1e-5, 1e-6), step > 0);
      ASSERT_EQ(table.grad().defined(), has_rows);
      if (!has_rows) continue;
      const at::Tensor rows = table.grad().to_dense();
      EXPECT_EQ(at::allclose(rows, its_table.grad().to_dense(), 1e-5, 1e-6), step > 0);
    }
  })));
}

// With weights as well. In the last step only rank 0 has rows, so its part has them.
TEST(LocalSgd, SparseAndLateGradientsAreThoseOfAPart) {
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = join_world();
    Net net;
    at::Tensor table = make_table();
    DistributedDataParallel ddp(all_of(net, table), world, small_buckets(of_two(world, 1)));
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      const auto has_rows = [&](int of) { return step < 3 || of == 0; };
      net->zero_grad();
      table.mutable_grad() = at::Tensor();
      if (step == 2) ddp.set_weight(rank % 2 == 0 ? 3 : 1);
      backward_with_table(net, table, rank, step, has_rows(rank));
      at::Tensor weight = at::zeros_like(net->last->weight);
      at::Tensor rows = at::zeros({20, 6});
      const int first = step == 0 ? 0 : rank / 2 * 2;
      const int count = step == 0 ? 4 : 2;
      for (int one = first; one < first + count; ++one) {
        const double share = step != 2 ? 1. / count : one % 2 == 0 ? 0.75 : 0.25;
        Net alone;
        at::Tensor its_table = make_table();
        backward_with_table(alone, its_table, one, step, has_rows(one));
        weight += share * alone->last->weight.grad();
        if (its_table.grad().defined()) rows += share * its_table.grad().to_dense();
      }
      EXPECT_TRUE(at::allclose(net->last->weight.grad(), weight, 1e-5, 1e-6));
      ASSERT_TRUE(table.grad().defined());
      EXPECT_TRUE(at::allclose(table.grad().to_dense(), rows, 1e-5, 1e-6));
    }
  })));
}

// Steps are counted where there is no bucket, too.
TEST(LocalSgd, BeginsWhereAllGradientsAreSparse) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = join_world();
    at::Tensor table = make_table();
    DistributedDataParallel ddp({{"table", table}}, world, small_buckets(own_hook(1)));
    for (int step = 0; step < 3; ++step) {
      table.mutable_grad() = at::Tensor();
      torch::embedding(table, torch::tensor({rank}), -1, false, /*sparse=*/true).sum().backward();
      const at::Tensor rows = table.grad().to_dense().sum(1);
      EXPECT_EQ(rows[rank].item<double>(), step == 0 ? 3 : 6);
      EXPECT_EQ(rows[1 - rank].item<double>(), step == 0 ? 3 : 0);
    }
  })));
}

// All ranks hear of a part whose replicas have drifted apart; that parts differ is no drift.
TEST(LocalSgd, ReplicasAreComparedInTheirPart) {
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = join_world();
    Net net;
    DistributedDataParallel ddp(net, world, {.check_every = 1, .hook = of_two(world)});
    optim::SGD optimizer(net->parameters(), 0.1);
    const auto step = [&] {
      optimizer.zero_grad();
      loss_of(net->forward(batch(rank))).backward();
      optimizer.step();
    };
    for (int i = 0; i < 3; ++i) step();
    EXPECT_TRUE(has(error_of([&] { ddp.check_replicas(); }), "drifted apart")) << "over all";
    if (rank == 3) {
      const at::NoGradGuard no_grad;
      net->left->bias[2] += 1e-3;
    }
    const std::string error = error_of(step);
    EXPECT_TRUE(has(error, "left.bias is not the same on rank 2 and on rank 3")) << error;
  })));
}

// A rank out of data counts no more in its part; a part out of data has gradients of zero.
TEST(LocalSgd, JoinIsForPartsToo) {
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = join_world();
    Net net;
    DistributedDataParallel ddp(net, world, {.hook = of_two(world)});
    const int num_batches = std::max(1, 3 - rank);  // 3, 2, 1, 1
    int step = 0;
    const auto check = [&] {
      const int first = rank / 2 * 2;
      const auto zero = mix(own_gradients(0), 0, own_gradients(0), 0);
      const auto both = mix(own_gradients(first, step), 0.5, own_gradients(first + 1, step), 0.5);
      SCOPED_TRACE(step);
      expect_gradients(net, rank >= 2 && step >= 1 ? zero
                            : step >= 2            ? own_gradients(0, step)
                                                   : both);
      ++step;
    };
    while (step < num_batches) {
      net->zero_grad();
      loss_of(net->forward(batch(rank, step))).backward();
      check();
    }
    ddp.join(check);
    EXPECT_EQ(step, 3);
    const std::string error = error_of([&] {
      if (rank == 1) return ddp.join();
      loss_of(net->forward(batch(rank))).backward();
    });
    EXPECT_TRUE(has(error, "join() was called without a step while ranks train apart")) << error;
  })));
}

TEST(LocalSgd, HooksRefuseWhatDoesNotFitOnAllRanks) {
  EXPECT_TRUE(all_passed(run_ranks(4, [](int rank) {
    const World world = join_world();
    const auto wrap = [&](const World& its_world, const PostLocalSgdOptions& options) {
      return error_of([&] {
        Net net;
        const DistributedDataParallel ddp(net, its_world, {.hook = post_local_sgd_hook(options)});
      });
    };
    const auto pairs = world.split(rank / 2);
    const auto crossed = world.split(rank % 2);
    EXPECT_TRUE(has(wrap(world, {.start_step = -1}), "start_step is -1"));
    const std::string mixed = wrap(world, {.part = rank == 3 ? crossed : pairs});
    EXPECT_TRUE(has(mixed, "part of rank 2 has ranks 2, 3, and that of rank 3 has ranks 1, 3"))
        << mixed;
    const std::string stranger = wrap(*pairs, {.part = crossed});
    EXPECT_TRUE(has(stranger, rank < 2 ? "part of rank 0 has ranks 0, 2, of which 2 does not train"
                                       : "part of rank 2 has ranks 0, 2, of which 0 does not"))
        << stranger;
    const std::string some = wrap(world, {.part = rank == 1 ? std::nullopt : pairs});
    EXPECT_TRUE(has(some, "rank 1: options") && has(some, "averages in each host")) << some;
    EXPECT_TRUE(has(some, "averages in a given part")) << some;
    EXPECT_TRUE(has(wrap(world, {.start_step = rank == 2 ? 5 : 6}), "start_step=5"));
    EXPECT_TRUE(has(wrap(world, {.averages_in_part = rank != 0}), "averages in no part"));
    EXPECT_EQ(wrap(world, {.part = pairs}), "no error");
  })));
}

// Also a rank of another part, whose gradients nobody here waits for. When they look, rank 2 has
// seen it and left.
TEST(LocalSgd, ALostRankIsNamedByAllParts) {
  const RankResults results = run_ranks(4, [](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(30)});
    Net net;
    DistributedDataParallel ddp(net, world, {.hook = of_two(world)});
    loss_of(net->forward(batch(rank))).backward();
    if (rank == 3) ::raise(SIGKILL);
    if (rank < 2) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    try {
      loss_of(net->forward(batch(rank))).backward();
      FAIL() << "rank 3 is gone";
    } catch (const PeerLostError& error) {
      EXPECT_EQ(error.peer(), 3) << error.what();
    }
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(results[rank].status.is_ok()) << results[rank].output;
    EXPECT_LT(results[rank].seconds, 20);
  }
}

}  // namespace
}  // namespace lockstep::test
