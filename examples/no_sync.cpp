// Larger batches than memory holds: gradients of several small batches add up locally, and are
// averaged over ranks once.
//
//   lockstep run -n 2 -- build/release/examples/no_sync --device cpu    (without it: the GPUs)
//
// Expected: "gradients equal: yes", and that 4 micro-batches were averaged once, not 4 times.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

int main(int argc, char** argv) try {
  const bool has_device = argc == 3 && std::string(argv[1]) == "--device";
  if (argc > 1 && !has_device) throw std::invalid_argument("usage: no_sync [--device NAME]");
  const auto world = lockstep::World::join();
  const auto device = world.device(has_device ? argv[2] : "auto");
  torch::set_num_threads(1);
  auto model = torch::nn::Linear(64, 8);
  model->to(device);
  lockstep::DistributedDataParallel ddp(model, world);
  constexpr int kMicroBatches = 4;

  lockstep::seed_all(1, world);
  const auto inputs = torch::randn({kMicroBatches * 16, 64}).to(device);
  const auto targets = torch::randn({kMicroBatches * 16, 8}).to(device);
  const auto batches = inputs.chunk(kMicroBatches);
  const auto answers = targets.chunk(kMicroBatches);
  // Gradients add up, so that each loss counts for its part of the batch.
  const auto loss_of = [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    return torch::mse_loss(model->forward(batches[at]), answers[at]) / kMicroBatches;
  };

  // One way: say where gradients stay local.
  {
    const auto guard = ddp.no_sync();
    for (int i = 0; i < kMicroBatches - 1; ++i) loss_of(i).backward();
  }
  loss_of(kMicroBatches - 1).backward();  // averages what has added up
  const auto by_hand = model->weight.grad().clone();
  const auto averaged_by_hand = ddp.stats().steps;

  // The other: every 4th backward averages.
  model->zero_grad();
  ddp.accumulate(kMicroBatches);
  for (int i = 0; i < kMicroBatches; ++i) loss_of(i).backward();
  const auto by_count = model->weight.grad().clone();

  // The whole batch at once, for comparison.
  model->zero_grad();
  ddp.accumulate(1);
  torch::mse_loss(model->forward(inputs), targets).backward();

  const bool is_equal =
      torch::equal(by_hand, by_count) && torch::allclose(by_hand, model->weight.grad(), 1e-4, 1e-6);
  if (world.rank() == 0) {
    std::printf("%d micro-batches, averaged %ld time%s; gradients equal: %s\n", kMicroBatches,
                static_cast<long>(averaged_by_hand), averaged_by_hand == 1 ? "" : "s",
                is_equal ? "yes" : "NO");
  }
  return is_equal ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
