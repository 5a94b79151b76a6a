// DistributedDataParallel: the contract, over sizes, buckets, and shapes of graphs. Tests of
// several programs run these checks, over engines (ddp_test.cpp) and devices
// (late_ddp_test.cpp).

#include <lockstep/lockstep.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim.h>

#include "multiprocess/checks.h"
#include "multiprocess/ddp_model.h"

namespace lockstep {
namespace {

using namespace test;  // NOLINT: a test

void step_by(Net& model, double rate = 0.1) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), rate);
  }
}

const Check GradientsAreTheMeanAndReplicasStayEqual(
    "GradientsAreTheMeanAndReplicasStayEqual", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world);
      for (int step = 0; step < 5; ++step) {
        model->zero_grad(step % 2 == 0);  // set to none, or to zero
        loss_of(model->forward(batch(world.rank(), step))).backward();
        if (step == 0) {
          expect_gradients(model, mean_gradients(world.size(), [&](Net& local, int rank) {
                             loss_of(local->forward(batch(rank))).backward();
                           }));
        }
        step_by(model);
      }
      expect_same_bits(world, *model);
      if (world.size() > 1) {
        EXPECT_EQ(ddp.stats().steps, 5);
      }
    });

const Check ReplicasBeginWithRank0sState("ReplicasBeginWithRank0sState", [](const World& world) {
  Net model;
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.add_(world.rank());
  }
  model->last->bias.set_requires_grad(false);  // only sent
  const DistributedDataParallel ddp(model, world);
  EXPECT_TRUE(at::equal(model->first->weight, Net()->first->weight));
  EXPECT_TRUE(at::equal(model->last->bias, Net()->last->bias));
  // Larger than what is packed, in strides of its own.
  const at::Tensor large =
      here(torch::full({3000, 2000}, world.rank() + 1.0F)).t().requires_grad_();
  const DistributedDataParallel of_large({{"large", large}}, world);
  EXPECT_TRUE(at::equal(large, here(torch::ones({2000, 3000}))));
});

// Unused everywhere, unused on some ranks, and branches that change sides.
const Check BranchesMayDifferBetweenRanksAndSteps(
    "BranchesMayDifferBetweenRanksAndSteps", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world);
      const std::vector<std::function<std::pair<bool, bool>(int)>> steps = {
          [](int) { return std::pair(true, false); },
          [](int rank) { return std::pair(rank % 2 == 0, rank % 2 != 0); },
          [](int rank) { return std::pair(rank != 0, true); },
          [](int) { return std::pair(false, false); },
          [](int) { return std::pair(true, true); },
      };
      for (std::size_t i = 0; i < steps.size(); ++i) {
        model->zero_grad();
        const auto backward = [&](Net& local, int rank) {
          const auto [use_left, use_right] = steps[i](rank);
          loss_of(local->forward(batch(rank), use_left, use_right)).backward();
        };
        backward(model, world.rank());
        expect_gradients(model, mean_gradients(world.size(), backward));
        expect_same_bits(world, *model);
      }
    });

const Check ALossThatReachesNoParameterCountsAsZero(
    "ALossThatReachesNoParameterCountsAsZero", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world);
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        if (world.rank() == 0) {
          ddp.backward(step == 0 ? torch::zeros({}) : torch::zeros({}, torch::requires_grad()) * 2);
        } else {
          ddp.backward(loss_of(model->forward(batch(world.rank()))));
        }
        expect_gradients(model, mean_gradients(world.size(), [&](Net& local, int rank) {
                           if (rank != 0) loss_of(local->forward(batch(rank))).backward();
                         }));
      }
    });

const Check SeveralForwardsAndBackwardsNeedNothingSpecial(
    "SeveralForwardsAndBackwardsNeedNothingSpecial", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world);
      const std::vector<Backward> cases = {
          // Two forwards, one backward.
          [](Net& local, int rank) {
            (loss_of(local->forward(batch(rank))) + loss_of(local->forward(batch(rank, 1))))
                .backward();
          },
          // Two forwards, two backwards: averages of averages are averages.
          [](Net& local, int rank) {
            const auto first = loss_of(local->forward(batch(rank)));
            const auto second = loss_of(local->forward(batch(rank, 1)));
            first.backward();
            second.backward();
          },
          // One graph, twice.
          [](Net& local, int rank) {
            const auto loss = loss_of(local->forward(batch(rank)));
            loss.backward({}, /*retain_graph=*/true);
            loss.backward();
          },
          [](Net& local, int rank) {
            loss_of(local->forward(batch(rank))).backward({}, {}, /*create_graph=*/true);
          },
          // A gradient of a gradient, by autograd::grad, which leaves .grad alone.
          [](Net& local, int rank) {
            const auto input = batch(rank).requires_grad_();
            const auto output = local->forward(input);
            const auto slope =
                torch::autograd::grad({output.sum()}, {input}, {}, {}, /*create_graph=*/true)[0];
            (loss_of(output) + slope.pow(2).mean()).backward();
          },
      };
      for (const Backward& backward : cases) {
        model->zero_grad();
        backward(model, world.rank());
        expect_gradients(model, mean_gradients(world.size(), backward));
        expect_same_bits(world, *model);
        for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
      }
    });

const Check AccumulationIsAveragedOnce("AccumulationIsAveragedOnce", [](const World& world) {
  Net model;
  DistributedDataParallel ddp(model, world);
  const auto three = [](Net& local, int rank) {
    for (int i = 0; i < 3; ++i) loss_of(local->forward(batch(rank, i), i != 1)).backward();
  };
  const auto expected = mean_gradients(world.size(), three);
  for (int round = 0; round < 3; ++round) {
    model->zero_grad(round != 2);
    {
      auto guard = ddp.no_sync();
      for (int i = 0; i < 2; ++i) {
        loss_of(model->forward(batch(world.rank(), i), i != 1)).backward();
      }
      if (world.size() > 1 && round == 0) {
        const auto local = mean_gradients(1, [&](Net& alone, int) {
          for (int i = 0; i < 2; ++i) {
            loss_of(alone->forward(batch(world.rank(), i), i != 1)).backward();
          }
        });
        expect_gradients(model, local);
      }
    }
    loss_of(model->forward(batch(world.rank(), 2))).backward();
    expect_gradients(model, expected);
    expect_same_bits(world, *model);
  }
  ddp.accumulate(3);
  for (int round = 0; round < 2; ++round) {
    model->zero_grad();
    three(model, world.rank());
    expect_gradients(model, expected);
    expect_same_bits(world, *model);
  }
  EXPECT_THROW(ddp.accumulate(0), UsageError);
});

const Check WeightsMakeUnevenBatchesOneBatch(
    "WeightsMakeUnevenBatchesOneBatch", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world);
      const auto rows = [](int rank) { return std::int64_t{3} + 2 * rank; };
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp.set_weight(static_cast<double>(rows(world.rank())));
        loss_of(model->forward(batch(world.rank(), step, rows(world.rank())))).backward();
        expect_gradients(model, mean_gradients(1, [&](Net& whole, int) {
                           std::vector<at::Tensor> all;
                           for (int rank = 0; rank < world.size(); ++rank) {
                             all.push_back(batch(rank, step, rows(rank)));
                           }
                           loss_of(whole->forward(torch::cat(all))).backward();
                         }));
        expect_same_bits(world, *model);
      }
      // A weight is for one step.
      model->zero_grad();
      loss_of(model->forward(batch(world.rank()))).backward();
      expect_gradients(model, mean_gradients(world.size(), [](Net& local, int rank) {
                         loss_of(local->forward(batch(rank))).backward();
                       }));
      EXPECT_THROW(ddp.set_weight(-1), UsageError);
      EXPECT_THROW(ddp.set_weight(std::nan("")), UsageError);
    });

// Rank r has 2 + r batches. Those that are done early follow the others, and end with the same
// bits.
const Check RanksOutOfDataJoinTheOthers("RanksOutOfDataJoinTheOthers", [](const World& world) {
  Net model;
  DistributedDataParallel ddp(model, world);
  torch::optim::Adam optimizer(model->parameters(), 0.01);
  Net alone;  // all by itself
  torch::optim::Adam its_optimizer(alone->parameters(), 0.01);
  const auto has_data = [](int rank, int step) { return step < 2 + rank; };
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int step = 0; has_data(world.rank(), step); ++step) {
      optimizer.zero_grad();
      loss_of(model->forward(batch(world.rank(), step))).backward();
      optimizer.step();
    }
    ddp.join([&] { optimizer.step(); });
    for (int step = 0; has_data(world.size() - 1, step); ++step) {
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < world.size(); ++rank) {
        if (has_data(rank, step)) all.push_back(batch(rank, step));
      }
      its_optimizer.zero_grad();
      loss_of(alone->forward(torch::cat(all))).backward();
      its_optimizer.step();
    }
    expect_same_bits(world, *model);
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(model->parameters()[i], alone->parameters()[i], 1e-4, 1e-5));
    }
  }
  // Without a step the last one's state is sent to all.
  for (int step = 0; has_data(world.rank(), step); ++step) {
    optimizer.zero_grad();
    loss_of(model->forward(batch(world.rank(), step))).backward();
    optimizer.step();
  }
  ddp.join();
  expect_same_bits(world, *model);
});

// What a rank has added up locally when its data ends is not lost: the others' next step has it.
const Check JoiningTakesLocalGradientsAlong(
    "JoiningTakesLocalGradientsAlong", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world);
      const auto backward = [](Net& net, int rank) {
        loss_of(net->forward(batch(rank))).backward();
      };
      if (world.rank() == world.size() - 1 && world.size() > 1) {
        {
          const auto guard = ddp.no_sync();
          backward(model, world.rank());
        }
        ddp.join();
        return;
      }
      backward(model, world.rank());
      expect_gradients(model, mean_gradients(world.size(), backward), 1e-5);
      ddp.join();
    });

const Check ABackwardWithinBackwardIsAveragedToo(
    "ABackwardWithinBackwardIsAveragedToo", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world, {.bucket_bytes = 64, .first_bucket_bytes = 64});
      const std::vector<Backward> cases = {
          // Inner first: last.weight is reached before its own layer.
          [](Net& local, int rank) {
            const auto output = local->forward(batch(rank));
            Reentrant::apply(output, local->last->weight).pow(2).mean().backward();
          },
          // Late: last.weight has been posted when the inner backward reaches it again.
          [](Net& local, int rank) {
            const auto hidden = Reentrant::apply(local->first(batch(rank)), local->last->weight);
            loss_of(local->last(torch::tanh(hidden))).backward();
          },
          // Only on some ranks.
          [](Net& local, int rank) {
            at::Tensor hidden = local->first(batch(rank));
            if (rank == 1) hidden = Reentrant::apply(hidden, local->last->weight);
            loss_of(local->last(torch::tanh(hidden))).backward();
          },
      };
      for (int round = 0; round < 3; ++round) {  // before and after the order is learnt
        for (std::size_t i = 0; i < cases.size(); ++i) {
          // An inner backward that comes first ends as a backward of its own, on all ranks alike.
          model->zero_grad();
          cases[i](model, world.rank());
          expect_gradients(model, mean_gradients(world.size(), cases[i]), 1e-5);
          expect_same_bits(world, *model);
          if (i == 0) continue;
          // Late gradients have their rank's weight, too: rank r's is r + 1.
          const double total = world.size() * (world.size() + 1) / 2.0;
          model->zero_grad();
          ddp.set_weight(world.rank() + 1);
          cases[i](model, world.rank());
          const auto expected = mean_gradients(world.size(), [&](Net& local, int rank) {
            cases[i](local, rank);
            for (at::Tensor& parameter : local->parameters()) {
              if (parameter.grad().defined())
                parameter.grad().mul_((rank + 1) * world.size() / total);
            }
          });
          expect_gradients(model, expected, 1e-5);
        }
      }
    });

struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("spoilt");
  }
};

const Check AfterAnExceptionInBackwardTheNextStepWorks(
    "AfterAnExceptionInBackwardTheNextStepWorks", [](const World& world) {
      Net model;
      DistributedDataParallel ddp(model, world, {.bucket_bytes = 64, .first_bucket_bytes = 64});
      const auto good_step = [&](int step) {
        model->zero_grad();
        loss_of(model->forward(batch(world.rank(), step))).backward();
        expect_gradients(model, mean_gradients(world.size(), [&](Net& local, int rank) {
                           loss_of(local->forward(batch(rank, step))).backward();
                         }));
        expect_same_bits(world, *model);
      };
      const auto bad_step = [&] {
        model->zero_grad();
        const auto hidden = Throws::apply(torch::tanh(model->first(batch(world.rank()))));
        loss_of(model->last(hidden)).backward();
      };
      good_step(0);
      EXPECT_THROW(bad_step(), std::runtime_error);  // on all ranks
      good_step(1);
      if (world.size() == 1) return;
      // On one rank: the others are told.
      if (world.rank() == 1) {
        EXPECT_THROW(bad_step(), std::runtime_error);
      } else {
        try {
          model->zero_grad();
          loss_of(model->forward(batch(world.rank()))).backward();
          ADD_FAILURE() << "rank 1's exception went unnoticed";
        } catch (const UsageError& error) {
          EXPECT_EQ(error.peer(), 1);
          EXPECT_NE(error.message().find("Because rank 1"), std::string::npos) << error.what();
          EXPECT_FALSE(model->first->weight.grad().defined());
        }
      }
      good_step(2);
      // While gradients add up locally it concerns nobody else.
      {
        auto guard = ddp.no_sync();
        EXPECT_THROW(bad_step(), std::runtime_error);
      }
      good_step(3);
    });

const Check BitsDoNotDependOnBuckets("BitsDoNotDependOnBuckets", [](const World& world) {
  std::vector<at::Tensor> first;
  for (const std::size_t bytes : {1 << 10, 1 << 12, 1 << 16, 25 << 20, 1 << 30}) {
    Net model;
    DistributedDataParallel ddp(model, world,
                                {.bucket_bytes = bytes, .first_bucket_bytes = bytes / 2});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      loss_of(model->forward(batch(world.rank(), step), world.rank() != step)).backward();
      step_by(model);
    }
    expect_same_bits(world, *model);
    // Gloo adds in an order of its own, that depends on the size; of two numbers there is one.
    if (world.backend()->getBackendName() == "gloo" && world.size() > 2) continue;
    if (first.empty()) {
      for (const auto& parameter : model->parameters()) first.push_back(parameter.detach().clone());
    }
    for (std::size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(at::equal(first[i], model->parameters()[i]))
          << bytes << " bytes, parameter " << i;
    }
  }
});

const Check TypesLayoutsAndOddShapes("TypesLayoutsAndOddShapes", [](const World& world) {
  const auto make = [] {
    std::vector<NamedTensor> all;
    const auto add = [&](const char* name, at::Tensor tensor) {
      all.push_back({name, tensor.detach().requires_grad_()});
    };
    add("f32", numbers({7, 5}, 1));
    add("f64", numbers({3, 4}, 2).to(at::kDouble));
    add("bf16", numbers({33}, 3).to(at::kBFloat16));
    add("f16", numbers({9}, 4).to(at::kHalf));
    add("complex", torch::complex(numbers({4, 3}, 5), numbers({4, 3}, 6)));
    add("empty", here(torch::zeros({0, 4})));
    add("scalar", here(torch::tensor(0.5F)));
    add("channels_last", numbers({2, 3, 4, 5}, 7).contiguous(at::MemoryFormat::ChannelsLast));
    add("transposed", numbers({6, 5}, 8).t());
    add("with_gaps", numbers({8, 8}, 9).slice(1, 0, 8, 2));
    return all;
  };
  // Uses every tensor, with gradients that have strides of their own.
  const auto backward = [](const std::vector<NamedTensor>& all, int rank) {
    at::Tensor loss = here(torch::zeros({}, at::kDouble));
    for (const NamedTensor& one : all) {
      const at::Tensor real = one.tensor.is_complex() ? at::view_as_real(one.tensor) : one.tensor;
      loss = loss + (real.to(at::kDouble) * (rank + 1)).pow(2).sum() +
             (real.dim() == 2 ? real.t() : real).to(at::kDouble).sum();
    }
    loss.backward();
  };
  const auto mine = make();
  DistributedDataParallel ddp(mine, world, {.bucket_bytes = 128, .first_bucket_bytes = 128});
  for (int step = 0; step < 3; ++step) {
    for (const NamedTensor& one : mine) one.tensor.mutable_grad() = at::Tensor();
    backward(mine, world.rank());
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < world.size(); ++rank) {
      const auto theirs = make();
      backward(theirs, rank);
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        const auto wide = theirs[i].tensor.grad().to(
            theirs[i].tensor.is_complex() ? at::kComplexDouble : at::kDouble);
        if (rank == 0) {
          sums.push_back(wide);
        } else {
          sums[i] = sums[i] + wide;
        }
      }
    }
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const at::Tensor& parameter = mine[i].tensor;
      const at::Tensor& grad = parameter.grad();
      ASSERT_TRUE(grad.defined()) << mine[i].name;
      EXPECT_EQ(grad.scalar_type(), parameter.scalar_type());
      if (parameter.is_non_overlapping_and_dense() && parameter.numel() > 0) {
        EXPECT_EQ(grad.strides(), parameter.strides()) << mine[i].name;
      }
      const double tolerance = parameter.element_size() == 2 ? 1e-2 : 1e-5;
      const at::Tensor expected = (sums[i] / world.size()).to(parameter.scalar_type());
      EXPECT_TRUE(at::allclose(grad, expected, tolerance, tolerance)) << mine[i].name;
      expect_same_bits(world, grad, mine[i].name);
    }
  }
});

struct TableImpl : torch::nn::Module {
  TableImpl() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 4).sparse(true)));
    other = register_module("other",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 4).sparse(true)));
    last = register_module("last", torch::nn::Linear(4, 2));
    const torch::NoGradGuard no_grad;
    int seed = 0;
    move_here(*this);
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes().vec(), ++seed));
  }
  torch::nn::Embedding table{nullptr}, other{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Table);

const Check SparseGradientsStaySparse("SparseGradientsStaySparse", [](const World& world) {
  const auto backward = [](Table& model, int rank) {
    at::Tensor rows = model->table(here(torch::tensor({rank, 7, 7, 3 + rank})));
    if (rank == 1) rows = rows + model->other(here(torch::tensor({1, 2, 3, 2})));
    model->last(rows).pow(2).mean().backward();
  };
  Table model;
  DistributedDataParallel ddp(model, world);
  for (int step = 0; step < 3; ++step) {
    const auto weight_of = [&](int rank) { return step < 2 ? 1.0 : 2.0 + rank; };
    model->zero_grad();
    if (step == 2) ddp.set_weight(weight_of(world.rank()));
    backward(model, world.rank());
    at::Tensor table = here(torch::zeros({20, 4}));
    at::Tensor other = here(torch::zeros({20, 4}));
    double weights = 0;
    for (int rank = 0; rank < world.size(); ++rank) {
      Table local;
      backward(local, rank);
      weights += weight_of(rank);
      table += weight_of(rank) * local->table->weight.grad().to_dense();
      if (local->other->weight.grad().defined())
        other += weight_of(rank) * local->other->weight.grad().to_dense();
    }
    EXPECT_TRUE(model->table->weight.grad().is_sparse());
    EXPECT_TRUE(at::allclose(model->table->weight.grad().to_dense(), table / weights, 1e-4));
    EXPECT_EQ(model->other->weight.grad().defined(), world.size() > 1);
    if (world.size() > 1) {
      EXPECT_TRUE(at::allclose(model->other->weight.grad().to_dense(), other / weights, 1e-4));
    }
    expect_same_bits(world, *model);
  }
  // One that nobody named.
  if (world.size() == 1) return;
  const at::Tensor weight = here(torch::ones({5, 2})).requires_grad_();
  DistributedDataParallel unnamed({{"weight", weight}}, world);
  try {
    torch::embedding(weight, here(torch::tensor({1, 2})), -1, false, /*sparse=*/true)
        .sum()
        .backward();
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(error.message().find("gradient of weight is sparse"), std::string::npos);
  }
  DistributedDataParallel named({{"weight", weight}}, world, {.sparse = {"weight"}});
  EXPECT_THROW(DistributedDataParallel misspelt({{"weight", weight}}, world, {.sparse = {"wight"}}),
               UsageError);
});

// Which parameters travel in which order.
class Witness : public CommHook {
 public:
  std::string text() const override { return "witness"; }
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    names.insert(names.end(), bucket.names.begin(), bucket.names.end());
    const auto work = comm.all_reduce(bucket.flat);
    return [work, flat = bucket.flat, size = comm.size()] {
      work->wait();
      at::Tensor(flat).div_(size);
    };
  }
  std::vector<std::string> names;
};

// Parameters are used in another order than they are registered in; and rank 0's order counts.
const Check TheOrderOfBucketsIsLearntFromRank0(
    "TheOrderOfBucketsIsLearntFromRank0", [](const World& world) {
      std::vector<NamedTensor> parameters;
      for (const char* name : {"a", "b", "c"}) {
        parameters.push_back({name, here(torch::full({4}, 2.0)).requires_grad_()});
      }
      const auto witness = std::make_shared<Witness>();
      DistributedDataParallel ddp(parameters, world, {.hook = witness});
      // Gradients come in the reverse of the order of use, which is b, a, c on rank 0.
      const std::vector<std::size_t> use =
          world.rank() == 0 ? std::vector<std::size_t>{1, 0, 2} : std::vector<std::size_t>{2, 1, 0};
      for (int step = 0; step < 2; ++step) {
        witness->names.clear();
        at::Tensor value = here(torch::ones({4}));
        for (const std::size_t one : use) value = (value * parameters[one].tensor).tanh();
        value.sum().backward();
        const std::vector<std::string> expected = step == 0 || world.size() == 1
                                                      ? std::vector<std::string>{"c", "b", "a"}
                                                      : std::vector<std::string>{"c", "a", "b"};
        EXPECT_EQ(witness->names, expected) << "step " << step;
      }
    });

const Check TiedParametersCountOnce("TiedParametersCountOnce", [](const World& world) {
  struct Tied : torch::nn::Module {
    Tied()
        : a(register_module("a", torch::nn::Linear(4, 4))),
          b(register_module("b", torch::nn::Linear(4, 4))) {
      b->weight = b->register_parameter("weight2", a->weight);
      move_here(*this);
      const torch::NoGradGuard no_grad;
      a->weight.copy_(numbers({4, 4}, 1));
    }
    torch::nn::Linear a, b;
  };
  auto model = std::make_shared<Tied>();
  DistributedDataParallel ddp(std::static_pointer_cast<torch::nn::Module>(model), world);
  const at::Tensor input = numbers({2, 4}, world.rank());
  torch::matmul(torch::matmul(input, model->a->weight), model->b->weight).sum().backward();
  at::Tensor sum = here(torch::zeros({4, 4}));
  for (int rank = 0; rank < world.size(); ++rank) {
    const at::Tensor weight = numbers({4, 4}, 1).requires_grad_();
    torch::matmul(torch::matmul(numbers({2, 4}, rank), weight), weight).sum().backward();
    sum = sum + weight.grad();
  }
  EXPECT_TRUE(at::allclose(model->a->weight.grad(), sum / world.size()));
});

// Two models in one graph, as in a GAN, and a model wrapped twice.
const Check SeveralWrappersLiveTogether("SeveralWrappersLiveTogether", [](const World& world) {
  Net generator;
  Net critic;
  DistributedDataParallel first(generator, world);
  DistributedDataParallel second(critic, world);
  const auto both = [](Net& a, Net& b, int rank) {
    const at::Tensor made = torch::cat({a->forward(batch(rank)), a->forward(batch(rank, 1))}, 1);
    loss_of(b->forward(made)).backward();
  };
  both(generator, critic, world.rank());
  const auto expected_critic = mean_gradients(world.size(), [&](Net& local, int rank) {
    Net other;
    both(other, local, rank);
  });
  const auto expected_generator = mean_gradients(world.size(), [&](Net& local, int rank) {
    Net other;
    both(local, other, rank);
  });
  expect_gradients(critic, expected_critic);
  expect_gradients(generator, expected_generator);
  {
    // Averaged once more: a mean of equals.
    DistributedDataParallel again(critic, world);
    critic->zero_grad();
    both(generator, critic, world.rank());
    expect_gradients(critic, expected_critic);
  }
  // The inner wrapper is gone, its hooks with it.
  critic->zero_grad();
  both(generator, critic, world.rank());
  expect_gradients(critic, expected_critic);
  expect_same_bits(world, *critic);
});

const Check MayGoBeforeOrAfterItsModelAndItsWorld(
    "MayGoBeforeOrAfterItsModelAndItsWorld", [](const World& world) {
      at::Tensor kept;
      {
        auto model = std::make_unique<Net>();
        auto ddp = std::make_unique<DistributedDataParallel>(*model, world);
        loss_of((*model)->forward(batch(world.rank()))).backward();
        kept = (*model)->first->weight.grad();
        ddp.reset();
        (*model)->zero_grad();
        loss_of((*model)->forward(batch(world.rank()))).backward();  // local again
        ddp = std::make_unique<DistributedDataParallel>(*model, world);
        model.reset();
      }
      EXPECT_TRUE(kept.sum().isfinite().item<bool>()) << "a gradient outlives its reducer";
      auto moved = [&] {
        Net model;
        return std::pair(model, DistributedDataParallel(model, world));
      }();
      loss_of(moved.first->forward(batch(world.rank()))).backward();
      expect_same_bits(world, *moved.first);
    });

}  // namespace
}  // namespace lockstep
