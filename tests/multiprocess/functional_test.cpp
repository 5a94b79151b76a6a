// Collectives with gradients, against one process that computes what all ranks do.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <thread>

#include "multiprocess/ddp_model.h"
#include "multiprocess/on_engines.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

constexpr int kSize = 3;

class Functional : public testing::TestWithParam<OnEngine> {};
INSTANTIATE_TEST_SUITE_P(Engines, Functional, testing::ValuesIn(all_engines(kSize)), name_of);

// The same numbers in f64, so that sums in another order differ by rounding alone.
at::Tensor input_of(int rank, std::vector<std::int64_t> sizes) {
  return numbers(std::move(sizes), rank + 1).to(at::kDouble).requires_grad_();
}

// Ranks use the result in different ways: one a part of it, one all of it, one almost nothing.
at::Tensor loss_of_rank(int rank, const at::Tensor& result) {
  if (rank == 0) return (3 * result.select(0, 0)).sum();
  if (rank == 1) return result.pow(3).sum() + result.sum().sin();
  return 0.5 * result.reshape({-1})[-1];
}

using Inputs = std::vector<at::Tensor>;
// What rank `rank` gets, of all ranks' inputs, in one process.
using Whole = std::function<at::Tensor(const Inputs& inputs, int rank)>;
using Call = std::function<at::Tensor(const at::Tensor& input)>;

void expect_as_in_one_process(const World& world, const std::vector<std::int64_t>& sizes,
                              const Call& call, const Whole& whole) {
  Inputs inputs;
  for (int rank = 0; rank < kSize; ++rank) inputs.push_back(input_of(rank, sizes));
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int rank = 0; rank < kSize; ++rank) loss = loss + loss_of_rank(rank, whole(inputs, rank));
  loss.backward();

  const at::Tensor mine = input_of(world.rank(), sizes);
  const at::Tensor before = mine.detach().clone();
  const at::Tensor result = call(mine);
  EXPECT_TRUE(result.requires_grad());
  EXPECT_TRUE(at::allclose(result, whole(inputs, world.rank()), 1e-12, 1e-12));
  EXPECT_TRUE(at::equal(mine, before));  // nothing is done in place
  loss_of_rank(world.rank(), result).backward();
  const auto& expected = inputs[static_cast<std::size_t>(world.rank())].grad();
  EXPECT_TRUE(at::allclose(mine.grad(), expected, 1e-12, 1e-12)) << mine.grad() << "\nexpected\n"
                                                                 << expected;
}

at::Tensor sum_of(const Inputs& inputs) { return at::stack(inputs).sum(0); }

TEST_P(Functional, GradientsAreThoseOfOneProcess) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    expect_as_in_one_process(
        world, {4, 2}, [&](const auto& x) { return functional::all_gather(x, world); },
        [](const Inputs& all, int) { return at::stack(all); });
    expect_as_in_one_process(
        world, {4, 2}, [&](const auto& x) { return functional::all_reduce(x, world); },
        [](const Inputs& all, int) { return sum_of(all); });
    expect_as_in_one_process(
        world, {5}, [&](const auto& x) { return functional::all_reduce(x, world, ReduceOp::AVG); },
        [](const Inputs& all, int) { return sum_of(all) / kSize; });
    expect_as_in_one_process(
        world, {kSize, 2, 3}, [&](const auto& x) { return functional::reduce_scatter(x, world); },
        [](const Inputs& all, int rank) { return sum_of(all)[rank]; });
    expect_as_in_one_process(
        world, {kSize, 4},
        [&](const auto& x) { return functional::reduce_scatter(x, world, ReduceOp::AVG); },
        [](const Inputs& all, int rank) { return sum_of(all)[rank] / kSize; });
    expect_as_in_one_process(
        world, {kSize, 2}, [&](const auto& x) { return functional::all_to_all(x, world); },
        [](const Inputs& all, int rank) {
          Inputs parts;
          for (const at::Tensor& one : all) parts.push_back(one[rank]);
          return at::stack(parts);
        });
  })));
}

// Several at once, used in another order than made, and differently on each rank.
TEST_P(Functional, BackwardComesInOneOrderWhateverRanksUse) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const int rank = world.rank();
    const auto loss_from = [](int of_rank, const at::Tensor& a, const at::Tensor& b) {
      if (of_rank == 0) return (b * 2).sum() + a.pow(2).sum();
      if (of_rank == 1) return a.sum().exp() + b.select(0, 1).sum() * a.mean();
      return 0 * a.sum() + b.mean();
    };
    Inputs all;
    for (int each = 0; each < kSize; ++each) all.push_back(input_of(each, {kSize}));
    at::Tensor whole = at::zeros({}, at::kDouble);
    for (int each = 0; each < kSize; ++each) {
      whole = whole + loss_from(each, at::stack(all), sum_of(all));
    }
    whole.backward();
    const at::Tensor mine = input_of(rank, {kSize});
    const at::Tensor gathered = functional::all_gather(mine, world);
    const at::Tensor reduced = functional::all_reduce(mine, world);
    loss_from(rank, gathered, reduced).backward();
    EXPECT_TRUE(at::allclose(mine.grad(), all[static_cast<std::size_t>(rank)].grad(), 1e-12, 1e-12))
        << mine.grad();
  })));
}

TEST_P(Functional, GradientsOfGradients) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const auto penalty = [](const at::Tensor& loss, const Inputs& inputs) {
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const auto& one :
           torch::autograd::grad({loss}, inputs, {}, true, /*create_graph=*/true)) {
        sum = sum + one.pow(2).sum();
      }
      return sum;
    };
    Inputs all;
    for (int rank = 0; rank < kSize; ++rank) all.push_back(input_of(rank, {2, 2}));
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < kSize; ++rank) loss = loss + (rank + 1) * at::stack(all).pow(3).sum();
    penalty(loss, all).backward();
    const at::Tensor mine = input_of(world.rank(), {2, 2});
    const at::Tensor result = functional::all_gather(mine, world);
    penalty((world.rank() + 1) * result.pow(3).sum(), {mine}).backward();
    EXPECT_TRUE(
        at::allclose(mine.grad(), all[static_cast<std::size_t>(world.rank())].grad(), 1e-10, 1e-10))
        << mine.grad();
  })));
}

// The loss of rank 0 has a constant gradient, that of the others has not: also then all ranks make
// the same calls in the second backward.
TEST_P(Functional, GradientsOfGradientsOfDifferentLosses) {
  const auto loss_of_rank = [](int rank, const at::Tensor& result) {
    return rank == 0 ? (2 * result).sum() : result.pow(3).sum();
  };
  const auto expect_as_in_one_process = [&](const World& world, const Call& call,
                                            const Whole& whole) {
    const std::vector<std::int64_t> sizes = {kSize, 2};
    const auto penalty = [](const at::Tensor& loss, const Inputs& inputs) {
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const auto& one :
           torch::autograd::grad({loss}, inputs, {}, true, /*create_graph=*/true)) {
        sum = sum + one.pow(2).sum();
      }
      return sum;
    };
    Inputs all;
    for (int rank = 0; rank < kSize; ++rank) all.push_back(input_of(rank, sizes));
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < kSize; ++rank) loss = loss + loss_of_rank(rank, whole(all, rank));
    penalty(loss, all).backward();
    const at::Tensor mine = input_of(world.rank(), sizes);
    penalty(loss_of_rank(world.rank(), call(mine)), {mine}).backward();
    const at::Tensor& expected = all[static_cast<std::size_t>(world.rank())].grad();
    EXPECT_TRUE(at::allclose(mine.grad(), expected, 1e-10, 1e-10)) << mine.grad() << expected;
  };
  const auto body = [&](const World& world) {
    expect_as_in_one_process(
        world, [&](const auto& x) { return functional::all_gather(x, world); },
        [](const Inputs& all, int) { return at::stack(all); });
    expect_as_in_one_process(
        world, [&](const auto& x) { return functional::all_reduce(x, world, ReduceOp::AVG); },
        [](const Inputs& all, int) { return sum_of(all) / kSize; });
    expect_as_in_one_process(
        world, [&](const auto& x) { return functional::reduce_scatter(x, world, ReduceOp::AVG); },
        [](const Inputs& all, int rank) { return sum_of(all)[rank] / kSize; });
    expect_as_in_one_process(
        world, [&](const auto& x) { return functional::all_to_all(x, world); },
        [](const Inputs& all, int rank) {
          Inputs parts;
          for (const at::Tensor& one : all) parts.push_back(one[rank]);
          return at::stack(parts);
        });
  };
  EXPECT_TRUE(all_passed(run_on(GetParam(), body, std::chrono::seconds(15))));
}

TEST_P(Functional, ResultsMayBeChangedInPlace) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const auto x = at::ones({kSize, 2}).requires_grad_();
    at::Tensor sum = functional::all_gather(x, world).mul_(0.5).sum();
    sum = sum + functional::all_reduce(x, world).mul_(0.5).sum();
    sum = sum + functional::reduce_scatter(x, world).mul_(0.5).sum();
    sum = sum + functional::all_to_all(x, world).mul_(0.5).sum();
    sum.backward();
    // all_gather and all_reduce: of every rank's loss; the others: of one.
    EXPECT_TRUE(at::equal(x.grad(), at::full({kSize, 2}, kSize + 1.0f)));
  })));
}

// As CLIP does: each rank scores its samples against those of all ranks.
TEST_P(Functional, AContrastiveLossTrainsAsInOneProcess) {
  const auto body = [](const World& world) {
    const auto loss_for = [](const at::Tensor& outputs, const at::Tensor& all, int rank) {
      const auto targets = at::arange(outputs.size(0)) + rank * outputs.size(0);
      return torch::nn::functional::cross_entropy(outputs.matmul(all.t()), targets);
    };
    Net whole;
    std::vector<at::Tensor> outputs;
    for (int rank = 0; rank < kSize; ++rank) outputs.push_back(whole->forward(batch(rank)));
    at::Tensor mean = at::zeros({});
    for (int rank = 0; rank < kSize; ++rank) {
      const at::Tensor& one = outputs[static_cast<std::size_t>(rank)];
      mean = mean + loss_for(one, at::cat(outputs), rank) / kSize;
    }
    mean.backward();
    std::vector<at::Tensor> expected;
    for (const auto& parameter : whole->parameters()) expected.push_back(parameter.grad());

    Net model;
    const DistributedDataParallel ddp(model, world);
    const at::Tensor mine = model->forward(batch(world.rank()));
    const at::Tensor all = functional::all_gather(mine, world).flatten(0, 1);
    loss_for(mine, all, world.rank()).backward();
    expect_gradients(model, expected, 1e-5);
    expect_same_bits(world, *model);
  };
  EXPECT_TRUE(all_passed(run_on(GetParam(), body)));
}

TEST_P(Functional, WithoutAGradientTheyAreThePlainOnes) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const at::Tensor ranks =
        functional::all_gather(at::scalar_tensor(world.rank(), at::kInt), world);
    EXPECT_TRUE(at::equal(ranks, at::arange(kSize, at::kInt)));
    const at::NoGradGuard no_grad;
    const at::Tensor sum = functional::all_reduce(input_of(world.rank(), {2}), world);
    EXPECT_FALSE(sum.requires_grad());
  })));
}

TEST_P(Functional, CallsThatDifferAreErrorsOfAllRanks) {
  EXPECT_TRUE(all_passed(run_on(GetParam(), [](const World& world) {
    const bool is_odd = world.rank() == 1;
    const auto x = at::ones({kSize, 2}).requires_grad_();
    const auto frozen =
        thrown_by<MismatchError>([&] { functional::all_gather(is_odd ? x.detach() : x, world); });
    expect_says(frozen, {"with a gradient on rank 0", "without a gradient on rank 1"});
    const auto shape =
        thrown_by<MismatchError>([&] { functional::all_reduce(is_odd ? x.t() : x, world); });
    expect_says(shape, {"Float[3, 2]", "Float[2, 3]", "rank 1"});
    const auto type = thrown_by<MismatchError>(
        [&] { functional::all_to_all(is_odd ? x.to(at::kDouble) : x, world); });
    expect_says(type, {"Float[3, 2]", "Double[3, 2]"});
    const auto parts = thrown_by<UsageError>([&] {
      functional::reduce_scatter(is_odd ? at::ones({kSize + 1}) : at::ones({kSize}), world);
    });
    expect_says(parts, {"one part per rank"});
    if (!is_odd) expect_says(parts, {"Because rank 1"});
    const auto op = thrown_by<UsageError>(
        [&] { functional::all_reduce(x, world, is_odd ? ReduceOp::MAX : ReduceOp::SUM); });
    expect_says(op, {"ReduceOp::SUM or ReduceOp::AVG"});
    EXPECT_EQ(world.sum(1), kSize);  // and the world is as it was
  })));
}

// A rank whose loss does not depend on the result has no part in backward: the others are told.
TEST(FunctionalUse, ARankThatDoesNotUseTheResultIsAnError) {
  EXPECT_TRUE(all_passed(run_on({"shm", "aa"}, [](const World& world) {
    const auto x = at::ones({2}).requires_grad_();
    const at::Tensor all = functional::all_gather(x, world);
    const auto error = thrown_by<MismatchError>([&] {
      (world.rank() == 0 ? all.sum() : x.sum()).backward();
      world.barrier();
    });
    expect_says(error, {"backward of a collective (reduce_scatter", "barrier on rank 1"});
    std::this_thread::sleep_for(std::chrono::seconds(1));
  })));
}

TEST(FunctionalAlone, AWorldOfOne) {
  const World world = World::join();
  const auto x = at::ones({1, 2}).requires_grad_();
  const at::Tensor sum =
      functional::all_gather(x, world).sum() + functional::all_reduce(x, world).sum() +
      functional::reduce_scatter(x, world).sum() + functional::all_to_all(x, world).sum();
  sum.backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({1, 2}, 4.0f)));
}

}  // namespace
}  // namespace lockstep::test
