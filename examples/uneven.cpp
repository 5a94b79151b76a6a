// Ranks with different amounts of data: every sample counts the same, and nobody waits for ever.
//
//   lockstep run -n 3 -- build/release/examples/uneven --device cpu    (without it: the GPUs)
//
// Expected: ranks have 5, 6, 7, ... batches; "replicas equal: yes", and the weights that one
// process with all the data would have.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

int main(int argc, char** argv) try {
  const bool has_device = argc == 3 && std::string(argv[1]) == "--device";
  if (argc > 1 && !has_device) throw std::invalid_argument("usage: uneven [--device NAME]");
  const auto world = lockstep::World::join();
  const auto device = world.device(has_device ? argv[2] : "auto");
  torch::set_num_threads(1);
  torch::manual_seed(1);
  auto model = torch::nn::Linear(8, 1);
  model->to(device);
  lockstep::DistributedDataParallel ddp(model, world);
  lockstep::optim::SGD optimizer(model->parameters(), 0.05);

  // Batch b of rank r; every process can make all of them. The last one of each rank is short.
  const auto batches_of = [](int rank) { return 5 + rank; };
  const auto size_of = [&](int rank, int b) { return b + 1 == batches_of(rank) ? 3 : 16; };
  const auto batch_of = [&](int rank, int b) {
    torch::manual_seed(1000 * rank + b);
    return torch::randn({size_of(rank, b), 8}).to(device);
  };
  const auto loss_of = [](torch::nn::Linear& net, const torch::Tensor& input) {
    return torch::mse_loss(net->forward(input), input.sum(1, true));
  };

  auto reference = torch::nn::Linear(8, 1);  // what one process would do
  reference->to(device);
  lockstep::optim::SGD reference_optimizer(reference->parameters(), 0.05);
  {
    torch::NoGradGuard no_gradients;
    reference->weight.copy_(model->weight);
    reference->bias.copy_(model->bias);
  }

  for (int b = 0; b < batches_of(world.rank()); ++b) {
    const auto input = batch_of(world.rank(), b);
    optimizer.zero_grad();
    ddp.set_weight(static_cast<double>(input.size(0)));  // a short batch counts for less
    loss_of(model, input).backward();
    optimizer.step();
  }
  std::printf("rank %d had %d batches\n", world.rank(), batches_of(world.rank()));
  ddp.join([&] { optimizer.step(); });  // takes part in the steps of those that have more

  for (int b = 0; b < batches_of(world.size() - 1); ++b) {
    std::vector<torch::Tensor> parts;
    for (int rank = 0; rank < world.size(); ++rank) {
      if (b < batches_of(rank)) parts.push_back(batch_of(rank, b));
    }
    reference_optimizer.zero_grad();
    loss_of(reference, torch::cat(parts)).backward();
    reference_optimizer.step();
  }
  const auto all = world.all_gather(model->weight);
  bool is_equal = torch::allclose(model->weight, reference->weight, 1e-4, 1e-5);
  for (int rank = 1; rank < world.size(); ++rank) is_equal &= torch::equal(all[0], all[rank]);
  if (world.rank() == 0) {
    std::printf("replicas equal, and equal to one process with all data: %s\n",
                is_equal ? "yes" : "NO");
  }
  return is_equal ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
