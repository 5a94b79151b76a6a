// The collectives with plain names, and on_rank0, over the engine that `auto` chooses.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <stdexcept>

#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

class Collectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Collectives, testing::Values(1, 2, 3));

TEST_P(Collectives, AllReduceIsInPlaceAndReturnsItsTensor) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join();
    const auto tensor = at::full({4, 5}, rank + 1.0f);
    EXPECT_TRUE(world.all_reduce(tensor).is_same(tensor));
    const double sum = world.size() * (world.size() + 1) / 2.0;
    EXPECT_TRUE(at::equal(tensor, at::full({4, 5}, static_cast<float>(sum))));
    world.all_reduce(tensor, ReduceOp::AVG);
    EXPECT_TRUE(at::allclose(tensor, at::full({4, 5}, static_cast<float>(sum))));
    world.all_reduce(tensor.fill_(rank), ReduceOp::MAX);
    EXPECT_TRUE(at::equal(tensor, at::full({4, 5}, world.size() - 1.0f)));
  })));
}

TEST_P(Collectives, TakeAnyStrides) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join();
    const auto whole = at::full({6, 8}, rank + 1.0f);
    const auto part = whole.slice(0, 1, 6, 2).t();  // every second row, transposed
    world.all_reduce(part);
    const float sum = static_cast<float>(world.size() * (world.size() + 1) / 2);
    EXPECT_TRUE(at::equal(part, at::full({8, 3}, sum)));
    EXPECT_TRUE(at::equal(whole[0], at::full({8}, rank + 1.0f)));  // the rest is untouched
    world.broadcast(part.fill_(rank), world.size() - 1);
    EXPECT_TRUE(at::equal(whole[1], at::full({8}, world.size() - 1.0f)));
    EXPECT_TRUE(at::equal(world.all_gather(part)[0], at::full({8, 3}, world.size() - 1.0f)));
  })));
}

TEST_P(Collectives, GatherStacksAndScatterReverses) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join();
    const auto all = world.all_gather(at::full({2, 3}, rank, at::kLong));
    EXPECT_EQ(all.sizes(), (std::vector<std::int64_t>{world.size(), 2, 3}));
    for (int peer = 0; peer < world.size(); ++peer) {
      EXPECT_TRUE(at::equal(all[peer], at::full({2, 3}, peer, at::kLong)));
    }
    const auto mine = world.reduce_scatter(all);
    EXPECT_TRUE(at::equal(mine, at::full({2, 3}, rank * world.size(), at::kLong)));
    EXPECT_TRUE(at::equal(world.all_gather(at::scalar_tensor(rank, at::kInt)),
                          at::arange(world.size(), at::kInt)));  // from numbers to a vector
  })));
}

TEST_P(Collectives, GradientsAndParametersMayTakePart) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join();
    const auto parameter = at::full({3}, rank + 0.0f).requires_grad_();
    world.broadcast(parameter);
    EXPECT_TRUE(at::equal(parameter.detach(), at::zeros({3})));
    EXPECT_TRUE(parameter.requires_grad());
    EXPECT_FALSE(world.all_gather(parameter).requires_grad());
    const auto conjugate =
        world.on_rank0([] { return at::full({2}, c10::complex<float>(1, 2)).conj(); });
    EXPECT_TRUE(at::equal(conjugate, at::full({2}, c10::complex<float>(1, -2))));
    EXPECT_TRUE(at::equal(world.all_gather(at::ones({1}).expand({3}))[0], at::ones({3})));
  })));
}

TEST_P(Collectives, BadCallsAreRefusedOnTheSpot) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int) {
    const World world = World::join();
    EXPECT_THROW(world.all_reduce(at::Tensor()), UsageError);
    EXPECT_THROW(world.all_reduce(at::eye(3).to_sparse()), UsageError);
    EXPECT_THROW(world.all_reduce(at::ones({1}).expand({3})), UsageError);
    EXPECT_THROW(world.broadcast(at::zeros({3}), world.size()), UsageError);
    EXPECT_THROW(world.broadcast(at::zeros({3}), -1), UsageError);
    EXPECT_THROW(world.reduce_scatter(at::zeros({world.size() + 1, 2})), UsageError);
    EXPECT_THROW(world.reduce_scatter(at::scalar_tensor(1.0)), UsageError);
    world.barrier();  // and nothing is broken by it
  })));
}

struct Plain {
  int a;
  double b;
};

TEST_P(Collectives, OnRank0RunsOnceAndAllHaveTheResult) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join();
    int calls = 0;
    EXPECT_EQ(world.on_rank0([&] { return ++calls; }), 1);
    EXPECT_EQ(calls, rank == 0 ? 1 : 0);
    EXPECT_EQ(world.on_rank0([] { return std::string("a text"); }), "a text");
    EXPECT_EQ(world.on_rank0([] { return std::string(); }), "");
    EXPECT_EQ(world.on_rank0([] {
      return std::vector<double>{1, 2.5};
    }),
              (std::vector<double>{1, 2.5}));
    EXPECT_EQ(world.on_rank0([] { return Plain{3, 4.5}; }).b, 4.5);
    const auto tensor = world.on_rank0([] { return at::arange(6, at::kInt).reshape({2, 3}).t(); });
    EXPECT_TRUE(at::equal(tensor, at::arange(6, at::kInt).reshape({2, 3}).t()));
    EXPECT_EQ(world.on_rank0([] {
                     return at::zeros({0, 4});
                   })
                  .sizes(),
              (std::vector<std::int64_t>{0, 4}));
    const std::string kept = "kept";
    EXPECT_EQ(world.on_rank0([&]() -> const std::string& { return kept; }), "kept");
    world.on_rank0([] {});
  })));
}

TEST_P(Collectives, OnRank0BringsExceptionsToAll) {
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), [](int rank) {
    const World world = World::join();
    const auto fail = [] { throw std::out_of_range("no such file"); };
    if (rank == 0) {
      EXPECT_THROW(world.on_rank0(fail), std::out_of_range);  // its own exception
    } else {
      try {
        world.on_rank0(fail);
        ADD_FAILURE();
      } catch (const UsageError& error) {
        EXPECT_EQ(error.message(), "Because rank 0: no such file");
        EXPECT_EQ(error.peer(), 0);
      }
    }
    EXPECT_THROW(world.on_rank0([] { throw_error(ErrorKind::kSystem, {}, "disk full"); }),
                 SystemError);                       // kinds are kept
    EXPECT_EQ(world.on_rank0([] { return 5; }), 5);  // and it goes on
  })));
}

}  // namespace
}  // namespace lockstep::test
