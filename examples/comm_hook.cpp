// Fewer bytes between ranks: gradients in bf16, and a hook of one's own, which sends 8 bits.
//
//   lockstep run -n 2 -- build/release/examples/comm_hook --device cpu    (without it: the GPUs)
//
// Expected: all three losses fall alike; the bytes sent fall to a half and to about a quarter.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

// Each rank rounds its gradients to 8 bits of the largest one's size. What rounding has cut off is
// added to the next step's gradients.
class EightBits : public lockstep::CommHook {
 public:
  std::string text() const override { return "eight bits"; }

  std::function<void()> start(lockstep::GradBucket bucket, lockstep::HookComm& comm) override {
    if (bucket.epoch != epoch_) errors_.clear();  // the layout of buckets has changed
    epoch_ = bucket.epoch;
    auto& error = errors_[bucket.index];
    if (error.defined()) bucket.flat.add_(error);
    const auto scale = bucket.flat.abs().max().clamp_min(1e-30) / 127;
    const auto rounded = (bucket.flat / scale).round().to(torch::kChar);
    error = bucket.flat - rounded * scale;
    // Scales and numbers of all ranks: a row each.
    auto scales = std::make_shared<torch::Tensor>();
    auto numbers = std::make_shared<torch::Tensor>();
    const auto first = comm.all_gather(scale.reshape({1}), *scales);
    const auto second = comm.all_gather(rounded, *numbers);
    return [=] {
      first->wait();
      second->wait();
      bucket.flat.copy_((*numbers * *scales).mean(0));
    };
  }

 private:
  int epoch_ = -1;
  std::map<int, torch::Tensor> errors_;  // by bucket
};

void train(const char* name, const lockstep::World& world, torch::Device device,
           std::shared_ptr<lockstep::CommHook> hook) {
  torch::manual_seed(1);
  auto model = torch::nn::Sequential(torch::nn::Linear(64, 256), torch::nn::Tanh(),
                                     torch::nn::Linear(256, 1));
  model->to(device);
  lockstep::DistributedDataParallel ddp(model, world, {.hook = std::move(hook)});
  lockstep::optim::AdamW optimizer(model->parameters(), 3e-3);
  torch::manual_seed(100 + world.rank());
  const auto inputs = torch::randn({256, 64}).to(device);
  const auto targets = torch::sin(inputs.sum(1, true) / 4);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(inputs), targets);
    loss.backward();
    optimizer.step();
    last = world.mean(loss);
    if (step == 0) first = last;
  }
  if (world.rank() == 0) {
    std::printf("%-12s loss %.4f -> %.4f, %6ld bytes sent in a step\n", name, first, last,
                static_cast<long>(ddp.stats().bytes_sent));
  }
}

int main(int argc, char** argv) try {
  const bool has_device = argc == 3 && std::string(argv[1]) == "--device";
  if (argc > 1 && !has_device) throw std::invalid_argument("usage: comm_hook [--device NAME]");
  const auto world = lockstep::World::join();
  const auto device = world.device(has_device ? argv[2] : "auto");
  torch::set_num_threads(1);
  train("32 bits", world, device, nullptr);
  train("bf16", world, device, lockstep::bf16_hook());
  train("8 bits", world, device, std::make_shared<EightBits>());
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
