// A LibTorch program for one process, in the shape of the usual first example: a model by value,
// torch::data, functions that train and test. tests/e2e/ported.sh makes it distributed.

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

struct Net : torch::nn::Module {
  Net() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("drop", drop);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1->forward(x), 2));
    x = torch::relu(torch::max_pool2d(drop->forward(conv2->forward(x)), 2));
    x = torch::relu(fc1->forward(x.flatten(1)));
    return torch::log_softmax(fc2->forward(torch::dropout(x, 0.5, is_training())), 1);
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 10, 5)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(10, 20, 5)};
  torch::nn::Dropout2d drop;
  torch::nn::Linear fc1{320, 50};
  torch::nn::Linear fc2{50, 10};
};

template <typename Loader>
void train(Net& model, torch::Device device, Loader& loader, torch::optim::Optimizer& optimizer,
           int steps) {
  model.train();
  for (auto& batch : loader) {
    if (steps-- == 0) return;
    auto data = batch.data.to(device);
    auto targets = batch.target.to(device);
    optimizer.zero_grad();
    auto loss = torch::nll_loss(model.forward(data), targets);
    loss.backward();
    optimizer.step();
  }
}

template <typename Loader>
double test(Net& model, torch::Device device, Loader& loader) {
  torch::NoGradGuard no_grad;
  model.eval();
  double correct = 0;
  double count = 0;
  for (const auto& batch : loader) {
    auto output = model.forward(batch.data.to(device));
    correct += output.argmax(1).eq(batch.target.to(device)).sum().template item<double>();
    count += static_cast<double>(batch.data.size(0));
  }
  return correct / count;
}

int main(int /*count*/, char** arguments) {
  torch::manual_seed(1);
  torch::Device device(torch::kCPU);
  Net model;
  model.to(device);
  using Mnist = torch::data::datasets::MNIST;
  auto train_set = Mnist(arguments[1])
                       .map(torch::data::transforms::Normalize<>(0.1307, 0.3081))
                       .map(torch::data::transforms::Stack<>());
  auto test_set = Mnist(arguments[1], Mnist::Mode::kTest)
                      .map(torch::data::transforms::Normalize<>(0.1307, 0.3081))
                      .map(torch::data::transforms::Stack<>());
  const auto size = train_set.size().value();
  auto sampler = torch::data::samplers::RandomSampler(size);
  auto train_loader = torch::data::make_data_loader(std::move(train_set), sampler, 64);
  auto test_loader = torch::data::make_data_loader(std::move(test_set), 1000);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.5));
  train(model, device, *train_loader, optimizer, 150);
  double sum = 0;
  for (const auto& one : model.parameters()) sum += one.to(torch::kDouble).sum().item<double>();
  std::printf("accuracy %.3f\nparameters %.17g\n", test(model, device, *test_loader), sum);
}
