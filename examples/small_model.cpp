// Data-parallel training of a small model: every rank trains on its own part of the data,
// backward() averages gradients over all ranks, and every replica takes the same step.
//
//   lockstep run -n 2 -- build/release/examples/small_model     (or mpirun, torchrun --no-python,
//   alone; --device cpu: not on GPUs)
//
// Expected: the loss falls from about 1.1 to below 0.1, and "replicas equal: yes".

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

int main(int argc, char** argv) try {
  const bool has_device = argc == 3 && std::string(argv[1]) == "--device";
  if (argc > 1 && !has_device) throw std::invalid_argument("usage: small_model [--device NAME]");
  const auto world = lockstep::World::join();
  const auto device = world.device(has_device ? argv[2] : "auto");
  torch::set_num_threads(1);

  torch::manual_seed(1);
  auto model =
      torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  const auto truth = torch::randn({16, 1}).to(device);
  model->to(device);
  lockstep::DistributedDataParallel ddp(model, world);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);

  // Different data on each rank.
  torch::manual_seed(100 + world.rank());
  const auto inputs = torch::randn({512, 16}).to(device);
  const auto targets = torch::sin(inputs.matmul(truth) / 2);

  for (int step = 0; step <= 200; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(inputs), targets);
    loss.backward();
    optimizer.step();
    if (step % 50 == 0) {
      const double mean = world.mean(loss);
      if (world.rank() == 0) std::printf("step %3d  loss %.4f\n", step, mean);
    }
  }

  bool is_equal = true;
  for (const auto& parameter : model->parameters()) {
    const auto all = world.all_gather(parameter);
    for (int rank = 1; rank < world.size(); ++rank) is_equal &= torch::equal(all[0], all[rank]);
  }
  if (world.rank() == 0) {
    std::printf("%d rank%s, replicas equal: %s\n", world.size(), world.size() == 1 ? "" : "s",
                is_equal ? "yes" : "NO");
  }
  return is_equal ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
