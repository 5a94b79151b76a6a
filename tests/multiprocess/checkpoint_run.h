// A run with all that a checkpoint has to bring back: dropout, momentum, a schedule, a loss scale,
// accumulation, and data in the middle of an epoch.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/nn.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/temp_folder.h"

namespace lockstep::test {

struct DropNetImpl : torch::nn::Module {
  DropNetImpl() {
    first = register_module("first", torch::nn::Linear(4, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    last = register_module("last", torch::nn::Linear(16, 2));
  }
  at::Tensor forward(const at::Tensor& input) {
    return last(torch::dropout(torch::relu(norm(first(input))), 0.3, is_training()));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(DropNet);

struct Training {
  explicit Training(const World& its_world, const std::string& optimizer_name = "AdamW",
                    std::size_t batch_size = 4, int accumulated = 2, const DdpOptions& options = {})
      : world(its_world), num_accumulated(accumulated) {
    seed_all(7, world);
    model = DropNet();
    ddp.emplace(model, world, options);
    ddp->accumulate(num_accumulated);
    if (optimizer_name == "AdamW") {
      optimizer = std::make_unique<optim::AdamW>(model->parameters(),
                                                 torch::optim::AdamWOptions(0.01).amsgrad(true));
    } else if (optimizer_name == "Adam") {
      optimizer =
          std::make_unique<optim::Adam>(model->parameters(), torch::optim::AdamOptions(0.01));
    } else if (optimizer_name == "SGD") {
      optimizer = std::make_unique<optim::SGD>(
          model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true));
    } else if (optimizer_name == "RMSprop") {
      optimizer = std::make_unique<torch::optim::RMSprop>(
          model->parameters(), torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
    } else {
      optimizer = std::make_unique<torch::optim::Adagrad>(
          model->parameters(), torch::optim::AdagradOptions(0.01).lr_decay(0.1));
    }
    schedule.emplace(*optimizer, optim::warm_up(5, optim::cosine(50)));
    scaler.emplace(world, ScalerOptions{.scale = 16, .growth_interval = 3});
    torch::manual_seed(1);  // the data: the same on all ranks
    const at::Tensor data = torch::randn({48, 4});
    seed_all(8, world);
    data_set = std::make_shared<TensorDataset>(data, data.sum(1).gt(0).to(at::kLong));
    loader.emplace(data_set, DistributedSampler(data_set->size(), world, {.seed = 3}),
                   LoaderOptions{.batch_size = batch_size});
  }

  void add_to(Checkpointer& checkpoints) {
    checkpoints.add(model).add(*optimizer).add(*schedule).add(*scaler).add(*loader).add(*ddp);
  }

  Batch next() {
    while (true) {
      if (auto batch = loader->next()) return *batch;
    }
  }

  // One step of the optimizer; returns the samples that it used.
  std::vector<std::size_t> step() {
    std::vector<std::size_t> used;
    optimizer->zero_grad();
    for (int i = 0; i < num_accumulated; ++i) {
      const Batch batch = next();
      used.insert(used.end(), batch.indices.begin(), batch.indices.end());
      scaler->scale(torch::cross_entropy_loss(model(batch.data), batch.target)).backward();
    }
    scaler->step(*optimizer);
    scaler->update();
    schedule->step();
    return used;
  }

  std::vector<at::Tensor> state() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& one : model->parameters()) all.push_back(one.detach().clone());
    for (const at::Tensor& one : model->buffers()) all.push_back(one.detach().clone());
    return all;
  }

  World world;
  int num_accumulated;
  DropNet model{nullptr};
  std::optional<DistributedDataParallel> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<optim::Schedule> schedule;
  std::optional<GradScaler> scaler;
  std::shared_ptr<TensorDataset> data_set;
  std::optional<Loader> loader;
};

inline bool is_equal(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  if (left.size() != right.size()) return false;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (!at::equal(left[i], right[i])) return false;
  }
  return true;
}

}  // namespace lockstep::test
