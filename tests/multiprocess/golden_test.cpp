// Golden: the same training as Python's DistributedDataParallel, step for step.
//
// tests/golden/make_ddp_golden.py has run it in Python and written down what was given and what
// came out. Here lockstep trains the same on 2 ranks, on every engine: losses of each rank at each
// step, which parameters have a gradient, the first gradients and the last parameters must agree.
// Comm hooks, sparse gradients and buffers, one by one, after it.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <lockstep/world.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "base/posix.h"
#include "multiprocess/ddp_model.h"
#include "support/golden.h"
#include "support/golden_tensor.h"
#include "support/run_ranks.h"

namespace lockstep {
namespace {

using nlohmann::json;

struct Net : torch::nn::Module {
  explicit Net(bool has_branch) {
    register_module("first", first);
    register_module("second", second);
    if (has_branch) branch = register_module("branch", torch::nn::Linear(16, 4));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_branch) {
    const auto hidden = torch::tanh(first(x));
    const auto output = second(hidden);
    return uses_branch ? output + branch(hidden) : output;
  }
  torch::nn::Linear first{8, 16};
  torch::nn::Linear second{16, 4};
  torch::nn::Linear branch{nullptr};
};

// As the script names the machine it ran on.
std::string this_machine() {
  std::istringstream lines(read_small_file("/proc/cpuinfo"));
  std::string name = "unknown";
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("model name")) continue;
    name = line.substr(line.find(": ") + 2);
    break;
  }
  return name + ", " + at::get_cpu_capability();
}

struct Golden {
  Golden() {
    const auto made_with = all["made_with"].get<std::string>();
    is_same_machine =
        all["made_on"] == this_machine() && std::string("torch ") + TORCH_VERSION == made_with;
  }

  // The mean of two gradients has one value in float32 whoever computes it, and the rest is the
  // same LibTorch: so the bits are Python's. On another processor, or with another LibTorch, matrix
  // products may add in another order: Python itself then differs from the file, by 1.5e-7 where
  // that was tried (other instruction sets), a few units in the last place.
  void expect_same(const at::Tensor& actual, const json& expected, const std::string& what) const {
    const auto wanted = test::to_tensor(expected);
    const double difference = (actual - wanted).abs().max().item<double>();
    if (is_same_machine) {
      EXPECT_TRUE(at::equal(actual, wanted)) << what << " differs by up to " << difference;
    } else {
      EXPECT_LE(difference, 1e-6) << what;
    }
  }

  const json all = test::read_golden("ddp_golden.json");
  bool is_same_machine = false;
};

// What the script's train() does, with lockstep in DistributedDataParallel's place.
class GoldenTraining {
 public:
  GoldenTraining(const Golden& golden, const std::string& name, const std::string& engine, int rank)
      : golden_(golden),
        expected_(golden.all["cases"][name]),
        inputs_(test::to_tensor(golden.all["given"]["inputs"])[rank]),
        targets_(test::to_tensor(golden.all["given"]["targets"])[rank]),
        losses_(expected_["losses"][static_cast<std::size_t>(rank)]),
        net_(std::make_shared<Net>(name == "unused")) {
    const at::NoGradGuard guard;
    for (auto& item : net_->named_parameters()) {
      item->fill_(-1);  // the others must get rank 0's
      if (rank == 0) item->copy_(test::to_tensor(golden.all["given"][item.key()]));
    }
    ddp_.emplace(net_, World::join({.engine = engine}));
    optimizer_.emplace(net_->parameters(),
                       torch::optim::SGDOptions(golden.all["learning_rate"].get<double>())
                           .momentum(golden.all["momentum"].get<double>()));
  }

  void zero_grad() { optimizer_->zero_grad(); }

  void backward(bool uses_branch = false) {
    const auto batch = static_cast<std::int64_t>(num_backwards_) % inputs_.size(0);
    const auto loss = torch::mse_loss(net_->forward(inputs_[batch], uses_branch), targets_[batch]);
    loss.backward();
    golden_.expect_same(loss.detach(), losses_.at(num_backwards_),
                        "loss " + std::to_string(num_backwards_));
    ++num_backwards_;
  }

  void backward_apart() {
    const auto guard = ddp_->no_sync();
    backward();
  }

  void step() {
    std::vector<std::string> without_gradient;
    for (const auto& item : net_->named_parameters()) {
      if (!item->grad().defined()) {
        without_gradient.push_back(item.key());
      } else if (num_steps_ == 0) {
        golden_.expect_same(item->grad(), expected_["first_gradients"].at(item.key()),
                            "first gradient of " + item.key());
      }
    }
    EXPECT_EQ(json(without_gradient), expected_["without_gradient"].at(num_steps_)) << num_steps_;
    optimizer_->step();
    ++num_steps_;
  }

  void finish() {
    EXPECT_EQ(num_backwards_, losses_.size());
    EXPECT_EQ(num_steps_, expected_["without_gradient"].size());
    EXPECT_EQ(net_->parameters().size(), expected_["parameters"].size());
    for (const auto& item : net_->named_parameters()) {
      golden_.expect_same(item->detach(), expected_["parameters"].at(item.key()), item.key());
    }
  }

  std::size_t num_steps() const { return expected_["without_gradient"].size(); }

 private:
  const Golden& golden_;
  const json expected_;
  const at::Tensor inputs_;
  const at::Tensor targets_;
  const json losses_;  // of this rank
  std::shared_ptr<Net> net_;
  std::optional<DistributedDataParallel> ddp_;
  std::optional<torch::optim::SGD> optimizer_;
  std::size_t num_backwards_ = 0;
  std::size_t num_steps_ = 0;
};

class GoldenTest : public testing::TestWithParam<std::string> {
 protected:
  // Runs `body` for each rank; the engine is the test's parameter.
  void train(const std::string& name, const std::function<void(GoldenTraining&, int rank)>& body) {
    const auto results = test::run_ranks(2, [&](int rank) {
      at::set_num_threads(1);
      const Golden golden;
      GoldenTraining training(golden, name, GetParam(), rank);
      body(training, rank);
      training.finish();
    });
    EXPECT_TRUE(test::all_passed(results));
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, GoldenTest, testing::Values("shm", "gloo"),
                         [](const auto& row) { return row.param; });

TEST_P(GoldenTest, Plain) {
  train("plain", [](GoldenTraining& training, int) {
    for (std::size_t step = 0; step < training.num_steps(); ++step) {
      training.zero_grad();
      training.backward();
      training.step();
    }
  });
}

TEST_P(GoldenTest, Accumulate) {
  train("accumulate", [](GoldenTraining& training, int) {
    for (std::size_t step = 0; step < training.num_steps(); ++step) {
      training.zero_grad();
      training.backward_apart();
      training.backward_apart();
      training.backward();
      training.step();
    }
  });
}

TEST_P(GoldenTest, Unused) {
  train("unused", [](GoldenTraining& training, int rank) {
    for (std::size_t step = 0; step < training.num_steps(); ++step) {
      training.zero_grad();
      training.backward(rank % 2 == 0 && step % 2 == 1);
      training.step();
    }
  });
}

using Body = std::function<void(const World&, const json& golden)>;

void run_with_golden(const std::string& engine, const Body& body) {
  EXPECT_TRUE(test::all_passed(test::run_ranks(2, [&](int) {
    body(World::join({.engine = engine}), test::read_golden("ddp_golden.json"));
  })));
}

void expect_close(const at::Tensor& actual, const json& expected, const std::string& what) {
  const at::Tensor wanted = test::to_tensor(expected);
  EXPECT_TRUE(at::allclose(actual, wanted, 1e-5, 1e-6)) << what << "\n"
                                                        << actual << "\nexpected\n"
                                                        << wanted;
}

// The same roundings, so the same bits.
TEST_P(GoldenTest, HooksOf16Bits) {
  run_with_golden(GetParam(), [](const World& world, const json& golden) {
    for (const auto& hook : {fp16_hook(), bf16_hook()}) {
      const auto weight = at::zeros({3, 6}).requires_grad_();
      const DistributedDataParallel ddp({{"weight", weight}}, world, {.hook = hook});
      (weight * test::numbers({3, 6}, world.rank() + 1)).sum().backward();
      const at::Tensor wanted = test::to_tensor(golden["hooks"][hook->text()]);
      EXPECT_TRUE(at::equal(weight.grad(), wanted)) << hook->text() << "\n" << weight.grad();
    }
  });
}

TEST_P(GoldenTest, PowerSgd) {
  run_with_golden(GetParam(), [](const World& world, const json& golden) {
    const auto hook = power_sgd_hook({.rank = 2, .start_step = 0, .min_compression = 1});
    // Where the script's right factor begins, too: random ones are drawn otherwise here.
    hook->load_state({{"num_steps", at::zeros({}, at::kLong)},
                      {"0.0.right", test::numbers({6, 2}, 9).t().contiguous()}},
                     0);
    HookComm comm(world);
    const json& expected = golden["hooks"]["power_sgd"];
    ASSERT_EQ(expected.size(), 4);
    for (int step = 2; step < 6; ++step) {
      const auto gradient = test::numbers({8, 6}, 10 * step + world.rank() + 1).pow(3);
      hook->start({.flat = gradient.view(-1), .gradients = {gradient}, .names = {"weight"}},
                  comm)();
      expect_close(gradient, expected[static_cast<std::size_t>(step - 2)],
                   "step " + std::to_string(step));
    }
  });
}

TEST_P(GoldenTest, Sparse) {
  run_with_golden(GetParam(), [](const World& world, const json& golden) {
    const std::int64_t rank = world.rank();
    auto options = torch::nn::EmbeddingBagOptions(9, 2).mode(torch::kSum).sparse(true);
    torch::nn::EmbeddingBag model(options);
    const DistributedDataParallel ddp(model, world);
    const auto bags = torch::tensor({rank, 7L, 7L, 3 + rank, 2L, 8 * rank}).view({2, 3});
    (model(bags) * test::numbers({2, 2}, world.rank() + 1)).sum().backward();
    ASSERT_TRUE(model->weight.grad().is_sparse());
    const at::Tensor gradient = model->weight.grad().coalesce();
    const auto rows = golden["sparse"]["rows"].get<std::vector<std::int64_t>>();
    EXPECT_TRUE(at::equal(gradient.indices()[0], torch::tensor(rows))) << gradient;
    expect_close(gradient.values(), golden["sparse"]["values"], "rows");
  });
}

// After a backward all ranks have what rank 0 has in Python, where others get it with the next
// forward.
TEST_P(GoldenTest, Buffers) {
  run_with_golden(GetParam(), [](const World& world, const json& golden) {
    torch::nn::BatchNorm1d model(4);
    const DistributedDataParallel ddp(model, world);
    for (int step = 0; step < 3; ++step) {
      model(test::numbers({5, 4}, 10 * step + world.rank() + 1)).pow(2).mean().backward();
    }
    expect_close(model->running_mean, golden["buffers"]["mean"], "mean");
    expect_close(model->running_var, golden["buffers"]["variance"], "variance");
  });
}

}  // namespace
}  // namespace lockstep
