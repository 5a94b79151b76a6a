// Saves a checkpoint of many kinds of tensors, for tests.
//
//   saver FOLDER            a small model, trained for three steps
//   saver FOLDER LAYERS     so many linear layers, without an optimizer

#include <ATen/ATen.h>
#include <lockstep/checkpoint.h>
#include <lockstep/comm_hook.h>
#include <lockstep/optim.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>

namespace {

// tests/e2e/dcp.sh has the same in Python.
struct Net : torch::nn::Module {
  torch::nn::Conv2d conv{register_module("conv", torch::nn::Conv2d(1, 4, 3))};
  torch::nn::BatchNorm2d norm{register_module("norm", torch::nn::BatchNorm2d(4))};
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(64, 8))};
  torch::nn::Linear small{register_module("small", torch::nn::Linear(8, 4))};  // 16 bits
  at::Tensor scale = register_parameter("scale", at::ones({}));                // no dimension

  Net() { small->to(at::kBFloat16); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = fc(norm(conv(x)).flatten(1));
    return small(hidden.to(at::kBFloat16)).to(at::kFloat) * scale;
  }
};

void save_layers(const std::string& folder, const lockstep::World& world, int layers) {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(64, 64));
  for (at::Tensor& one : model->parameters()) world.broadcast(one, 0);
  lockstep::Checkpointer checkpoints(folder, world);
  checkpoints.add(model).save(0);
}

void save_trained(const std::string& folder, const lockstep::World& world) {
  const auto model = std::make_shared<Net>();
  // What it keeps makes a file of each rank.
  lockstep::DistributedDataParallel ddp(model, world,
                                        {.hook = lockstep::top_k_hook({.fraction = 0.1})});
  lockstep::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  optimizer.use_master_weights();
  const std::vector<lockstep::NamedTensor> more = {{"phase", at::arange(6).to(at::kComplexDouble)},
                                                   {"waves", at::arange(4).to(at::kComplexFloat)},
                                                   {"counts", at::arange(5)},
                                                   {"flags", at::ones({3}, at::kBool)},
                                                   {"nothing", at::empty({0, 7})},
                                                   {"a \"name\" with ü", at::full({2, 2}, 0.5)}};
  lockstep::Checkpointer checkpoints(folder, world);
  checkpoints.add(model).add(optimizer).add(ddp).add(more, "more");
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model->forward(at::randn({8, 1, 6, 6})).square().mean().backward();
    optimizer.step();
  }
  checkpoints.save(3);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) return 2;
  const lockstep::World world = lockstep::World::join();
  if (argc == 3) {
    save_layers(argv[1], world, std::atoi(argv[2]));
  } else {
    save_trained(argv[1], world);
  }
}
