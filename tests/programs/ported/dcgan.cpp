// A LibTorch program for one process: two networks that are trained against each other, whose
// graphs cross: the generator learns through the discriminator. tests/e2e/ported.sh makes it
// distributed.

#include <torch/torch.h>

#include <cstdio>

constexpr int kNoise = 16;

struct GeneratorImpl : torch::nn::Module {
  GeneratorImpl() {
    register_module("conv1", conv1);
    register_module("norm1", norm1);
    register_module("conv2", conv2);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm1->forward(conv1->forward(x)));
    return torch::tanh(conv2->forward(x));
  }
  torch::nn::ConvTranspose2d conv1{torch::nn::ConvTranspose2dOptions(kNoise, 16, 7).bias(false)};
  torch::nn::BatchNorm2d norm1{16};
  torch::nn::ConvTranspose2d conv2{
      torch::nn::ConvTranspose2dOptions(16, 1, 4).stride(4).bias(false)};
};
TORCH_MODULE(Generator);

torch::nn::Sequential make_discriminator() {
  return torch::nn::Sequential(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 4).stride(4).bias(false)),
      torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)),
      torch::nn::BatchNorm2d(16), torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 1, 7).bias(false)),
      torch::nn::Sigmoid());
}

int main(int /*count*/, char** arguments) {
  torch::manual_seed(1);
  Generator generator;
  auto discriminator = make_discriminator();
  auto data = torch::data::datasets::MNIST(arguments[1])
                  .map(torch::data::transforms::Normalize<>(0.5, 0.5))
                  .map(torch::data::transforms::Stack<>());
  const auto size = data.size().value();
  auto sampler = torch::data::samplers::RandomSampler(size);
  auto loader = torch::data::make_data_loader(std::move(data), sampler, 64);
  torch::optim::Adam of_generator(generator->parameters(), torch::optim::AdamOptions(2e-4));
  torch::optim::Adam of_discriminator(discriminator->parameters(), torch::optim::AdamOptions(5e-4));
  int step = 0;
  torch::Tensor d_loss, g_loss;
  for (auto& batch : *loader) {
    if (step++ == 30) break;
    // The discriminator, on real and on generated images.
    discriminator->zero_grad();
    const auto count = batch.data.size(0);
    auto real_loss = torch::binary_cross_entropy(discriminator->forward(batch.data).flatten(),
                                                 torch::empty(count).uniform_(0.8, 1.0));
    auto noise = torch::randn({count, kNoise, 1, 1});
    auto fake = generator->forward(noise);
    auto fake_loss = torch::binary_cross_entropy(discriminator->forward(fake.detach()).flatten(),
                                                 torch::zeros(count));
    d_loss = real_loss + fake_loss;
    d_loss.backward();
    of_discriminator.step();
    // The generator, by what the discriminator says.
    generator->zero_grad();
    g_loss =
        torch::binary_cross_entropy(discriminator->forward(fake).flatten(), torch::ones(count));
    g_loss.backward();
    of_generator.step();
  }
  double sum = 0;
  for (const auto& one : generator->parameters())
    sum += one.to(torch::kDouble).sum().item<double>();
  for (const auto& one : discriminator->parameters()) {
    sum += one.to(torch::kDouble).sum().item<double>();
  }
  std::printf("losses %.4f %.4f\nparameters %.17g\n", d_loss.item<double>(), g_loss.item<double>(),
              sum);
}
