// A small training program that saves its state when it is told to stop, for tests.
//
//   trainer FOLDER STEPS

#include <ATen/ATen.h>
#include <lockstep/checkpoint.h>
#include <lockstep/optim.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "base/text.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const lockstep::World world = lockstep::World::join();
  const auto say = [&](const std::string& text) {
    lockstep::text::print("rank {} {}\n", world.rank(), text);
    std::fflush(stdout);
  };
  torch::nn::Linear model(2, 1);
  {
    const at::NoGradGuard no_grad;
    model->weight.zero_();
  }
  lockstep::DistributedDataParallel ddp(model, world);
  lockstep::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1));
  lockstep::Checkpointer checkpoints(argv[1], world);
  checkpoints.add(model).add(optimizer).add(ddp);
  checkpoints.on_signal(SIGTERM);
  const lockstep::Loaded loaded = checkpoints.load_latest();
  if (!loaded.path.empty()) say(lockstep::text::format("goes on from step {}", loaded.step));
  say(lockstep::text::format("is process {}", ::getpid()));
  const std::int64_t steps = std::atoll(argv[2]);
  std::int64_t step = loaded.step;
  while (step < steps) {
    optimizer.zero_grad();
    model(at::ones({1, 2})).sum().backward();  // every step takes 1 from each weight
    optimizer.step();
    ++step;
    say(lockstep::text::format("is at step {} ", step));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (checkpoints.must_stop()) {
      say(lockstep::text::format("saves at step {}", step));
      checkpoints.save(step);
      return lockstep::kExitPreempted;
    }
  }
  const bool is_right = model->weight.eq(-static_cast<double>(steps)).all().item<bool>();
  say(is_right ? "weights are right" : "weights are wrong");
  return is_right ? 0 : 1;
}
