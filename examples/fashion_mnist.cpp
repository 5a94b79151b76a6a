// Trains a CNN on Fashion-MNIST to more than 90 % accuracy on all ranks, and goes on where it
// stopped.
//
//   lockstep run -- build/release/examples/fashion_mnist [--epochs N] [--steps N] [--folder FOLDER]
//       [--device cpu]      (without it the GPU of each rank, if there is one)
//
// Without -n, `lockstep run` takes all cores. With --folder a checkpoint is written after each
// epoch and when the job is told to stop (Ctrl-C, SIGTERM); the same command then resumes. --steps
// ends it early. Expected: "test accuracy" above 90 % after 8 epochs.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv1{register_module("conv1", torch::nn::Conv2d(1, 16, 3))};
  torch::nn::Conv2d conv2{register_module("conv2", torch::nn::Conv2d(16, 32, 3))};
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(32 * 5 * 5, 128))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(128, 10))};

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv1->forward(x)), 2);
    x = torch::max_pool2d(torch::relu(conv2->forward(x)), 2);
    x = torch::dropout(torch::relu(fc1->forward(x.flatten(1))), 0.2, is_training());
    return fc2->forward(x);
  }
};
TORCH_MODULE(Net);

// Every sample of the test set once, over all ranks.
double test(Net& model, const lockstep::World& world, torch::Device device) {
  static const auto data = std::make_shared<lockstep::FashionMnist>(false);
  lockstep::Loader loader(data, lockstep::EvalSampler(data->size(), world),
                          {.batch_size = 250, .device = device});
  lockstep::Accuracy accuracy;
  torch::NoGradGuard no_gradients;
  model->eval();
  for (const lockstep::Batch& batch : loader) {
    accuracy.add(model->forward(batch.data), batch.target);
  }
  model->train();
  return accuracy.over(world);
}

int main(int argc, char** argv) try {
  std::int64_t epochs = 8, max_steps = 0;  // 0: all of the epochs
  std::string folder, device_name = "auto";
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if ((name == "--folder" || name == "--device") && !value.empty()) {
      (name == "--folder" ? folder : device_name) = value;
    } else if ((name == "--epochs" || name == "--steps") && std::atoll(value.c_str()) > 0) {
      (name == "--epochs" ? epochs : max_steps) = std::atoll(value.c_str());
    } else {
      throw std::runtime_error(
          "Options: --epochs N, --steps N, --folder FOLDER, --device NAME; not " + name + " " +
          value);
    }
  }

  const auto world = lockstep::World::join();
  const torch::Device device = world.device(device_name);
  torch::set_num_threads(1);  // a rank for each core
  lockstep::seed_all(1, world);

  const auto data = std::make_shared<lockstep::FashionMnist>(true);
  constexpr std::size_t kBatch = 64;  // of each rank
  lockstep::DistributedSampler sampler(data->size(), world, {.drop_last = true});
  const auto steps_per_epoch = static_cast<std::int64_t>(sampler.samples_per_rank() / kBatch);
  const std::int64_t total = max_steps > 0 ? max_steps : epochs * steps_per_epoch;
  lockstep::Loader loader(data, sampler, {.batch_size = kBatch, .device = device});

  Net model;
  model->to(device);
  lockstep::DistributedDataParallel ddp(model, world);
  lockstep::optim::AdamW optimizer(model->parameters(), 2e-3);
  lockstep::optim::Schedule schedule(optimizer, lockstep::optim::one_cycle(total));

  std::int64_t step = 0;
  std::optional<lockstep::Checkpointer> checkpoints;
  if (!folder.empty()) {
    checkpoints.emplace(folder, world);
    checkpoints->add(model).add(optimizer).add(schedule).add(loader).add(ddp);
    checkpoints->on_signal(SIGTERM);
    checkpoints->on_signal(SIGINT);
    step = checkpoints->load_latest().step;
    if (world.rank() == 0 && step > 0) std::printf("going on after step %ld\n", long(step));
  }

  lockstep::StepClock clock(world.size(), 200);
  {
    lockstep::ProgressBar bar(total, world);
    while (step < total) {
      for (const lockstep::Batch& batch : loader) {  // what is left of an epoch, then the next one
        if (batch.data.size(0) < static_cast<std::int64_t>(kBatch)) break;
        optimizer.zero_grad();
        auto loss = torch::cross_entropy_loss(model->forward(batch.data), batch.target);
        loss.backward();  // .grad is the mean over all ranks
        optimizer.step();
        schedule.step();
        clock.step(batch.data.size(0));
        bar.update(++step, loss.item<double>(), clock.samples_per_second());
        if (checkpoints && checkpoints->must_stop()) {
          checkpoints->save(step);
          return lockstep::kExitPreempted;
        }
        if (step == total) break;
      }
      if (checkpoints) checkpoints->save_async(step);
    }
  }

  const double speed = world.sum(clock.samples_per_second()) / world.size();
  const double accuracy = max_steps > 0 ? 0 : test(model, world, device);
  if (world.rank() == 0) {
    if (max_steps == 0) std::printf("test accuracy %.2f %%\n", 100 * accuracy);
    std::printf("%d rank%s: %.0f samples/s\n", world.size(), world.size() == 1 ? "" : "s", speed);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
