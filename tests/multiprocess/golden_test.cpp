// Golden: the same training as Python's DistributedDataParallel, step for step.
//
// tests/golden/make_ddp_golden.py has run it in Python and written down what was given and what
// came out. Here lockstep trains the same on 2 ranks, on every engine: losses of each rank at each
// step, which parameters have a gradient, the first gradients and the last parameters must agree.

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
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "base/posix.h"
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

at::Tensor to_tensor(const json& value) {
  if (!value.is_array()) return at::scalar_tensor(value.get<double>(), at::kDouble).to(at::kFloat);
  std::vector<at::Tensor> parts;
  for (const json& part : value) parts.push_back(to_tensor(part));
  return at::stack(parts);
}

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
    std::ifstream file(LOCKSTEP_GOLDEN_DIR "/ddp_golden.json");
    all = json::parse(file);
    const auto made_with = all["made_with"].get<std::string>();
    is_same_machine =
        all["made_on"] == this_machine() && std::string("torch ") + TORCH_VERSION == made_with;
  }

  // The mean of two gradients has one value in float32 whoever computes it, and the rest is the
  // same LibTorch: so the bits are Python's. On another processor, or with another LibTorch, matrix
  // products may add in another order: Python itself then differs from the file, by 1.5e-7 where
  // that was tried (other instruction sets), a few units in the last place.
  void expect_same(const at::Tensor& actual, const json& expected, const std::string& what) const {
    const auto wanted = to_tensor(expected);
    const double difference = (actual - wanted).abs().max().item<double>();
    if (is_same_machine) {
      EXPECT_TRUE(at::equal(actual, wanted)) << what << " differs by up to " << difference;
    } else {
      EXPECT_LE(difference, 1e-6) << what;
    }
  }

  json all;
  bool is_same_machine = false;
};

// What the script's train() does, with lockstep in DistributedDataParallel's place.
class GoldenTraining {
 public:
  GoldenTraining(const Golden& golden, const std::string& name, const std::string& engine, int rank)
      : golden_(golden),
        expected_(golden.all["cases"][name]),
        inputs_(to_tensor(golden.all["given"]["inputs"])[rank]),
        targets_(to_tensor(golden.all["given"]["targets"])[rank]),
        losses_(expected_["losses"][static_cast<std::size_t>(rank)]),
        net_(std::make_shared<Net>(name == "unused")) {
    const at::NoGradGuard guard;
    for (auto& item : net_->named_parameters()) {
      item->fill_(-1);  // the others must get rank 0's
      if (rank == 0) item->copy_(to_tensor(golden.all["given"][item.key()]));
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

}  // namespace
}  // namespace lockstep
