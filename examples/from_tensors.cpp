// Without torch::nn::Module: fits the constants of a damped spring to observations, of which each
// rank has its own. Whatever is a tensor with a gradient can be trained: a solver's coefficients, a
// game's parameters, the tensors of a binding.
//
//   lockstep run -n 2 -- build/release/examples/from_tensors --device cpu    (without it: the GPUs)
//
// Expected: stiffness near 3.0 and damping near 0.4.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

// Positions of springs that begin at `x`, at rest, at several times: a row each.
torch::Tensor simulate(torch::Tensor x, const torch::Tensor& stiffness,
                       const torch::Tensor& damping) {
  auto velocity = torch::zeros_like(x);
  std::vector<torch::Tensor> seen;
  for (int i = 1; i <= 60; ++i) {
    velocity = velocity - 0.02 * (stiffness * x + damping * velocity);
    x = x + 0.02 * velocity;
    if (i % 15 == 0) seen.push_back(x);
  }
  return torch::stack(seen);
}

int main(int argc, char** argv) try {
  const bool has_device = argc == 3 && std::string(argv[1]) == "--device";
  if (argc > 1 && !has_device) throw std::invalid_argument("usage: from_tensors [--device NAME]");
  const auto world = lockstep::World::join();
  const auto device = world.device(has_device ? argv[2] : "auto");
  torch::set_num_threads(1);

  // Observations of this rank, with noise.
  torch::manual_seed(1 + world.rank());
  const auto begin = torch::randn({1000}).to(device) * 2;
  const auto seen = simulate(begin, torch::tensor(3.0), torch::tensor(0.4)) +
                    0.01 * torch::randn({4, 1000}).to(device);

  auto stiffness = torch::tensor(1.0f, device).requires_grad_();
  auto damping = torch::tensor(0.0f, device).requires_grad_();
  lockstep::DistributedDataParallel ddp({{"stiffness", stiffness}, {"damping", damping}}, world);
  lockstep::optim::Adam optimizer(std::vector<torch::Tensor>{stiffness, damping}, 0.1);

  for (int step = 0; step < 600; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(simulate(begin, stiffness, damping), seen).backward();
    optimizer.step();
  }
  const double k = stiffness.item<double>();
  const double c = damping.item<double>();
  if (world.rank() == 0) std::printf("stiffness %.2f, damping %.2f\n", k, c);
  return std::abs(k - 3.0) < 0.1 && std::abs(c - 0.4) < 0.1 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
