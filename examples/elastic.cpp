// A training that survives the loss of ranks: kill one while it runs, and the result is the same.
//
//   lockstep run -n 4 --elastic -- build/release/examples/elastic [STEPS] [FOLDER]
//   pkill -9 -n -x elastic      (in another terminal: kills the newest rank)
//
// The others go on within a second, the launcher starts a replacement, and at the end all print the
// same weights as a run that lost nobody, also on another number of ranks.
// Expected: "weights 1.00 2.00 3.00 4.00 (sum ...)", with the same sum each time.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

// Points of a plane; a sample is made from its index.
struct Points : lockstep::Dataset {
  std::size_t size() const override { return 8192; }
  lockstep::Sample get(std::size_t index) const override {
    const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(index);
    const torch::Tensor x = torch::randn({4}, generator);
    return {x, x.dot(torch::tensor({1.F, 2.F, 3.F, 4.F})).reshape({1})};
  }
};

int main(int argc, char** argv) try {
  const std::int64_t total = argc > 1 ? std::atoll(argv[1]) : 2000;
  const std::string folder = argc > 2 ? argv[2] : "elastic-run";
  if (total < 1) throw std::runtime_error("usage: elastic [STEPS] [FOLDER]");

  // The result depends on these, not on the number of ranks that play them.
  const auto world = lockstep::World::join({.logical_ranks = 4});
  lockstep::seed_all(1, world);

  torch::nn::Linear model(4, 1);
  lockstep::DistributedDataParallel ddp(model, world);
  lockstep::optim::AdamW optimizer(model->parameters(),
                                   torch::optim::AdamWOptions(3e-2).weight_decay(0));
  lockstep::optim::Schedule schedule(optimizer, lockstep::optim::cosine(total));
  const auto data = std::make_shared<Points>();
  lockstep::Loader loader(data, lockstep::DistributedSampler(data->size(), world),
                          {.batch_size = 16});

  // What is saved to the disk, and what a replacement is given from the memory of the others.
  lockstep::Checkpointer checkpoints(folder, world);
  checkpoints.add(model).add(optimizer).add(schedule).add(loader).add(ddp);
  lockstep::Elastic elastic(checkpoints, checkpoints.load_latest().step);

  const bool is_complete = elastic.run([&] {  // called again each time the ranks have changed
    while (elastic.steps() < total) {
      for (const lockstep::Batch& batch : loader) {  // goes on after the last complete step
        const auto turn = ddp.play();
        torch::mse_loss(model->forward(batch.data), batch.target).backward();
        if (!turn.is_last) continue;
        optimizer.step();
        optimizer.zero_grad();
        schedule.step();
        elastic.commit();  // the step is complete
        if (elastic.steps() % 500 == 0) checkpoints.save_async(elastic.steps());
        if (elastic.steps() == total) break;
      }
    }
  });
  if (!is_complete) return 0;  // `lockstep scale` has told this rank to leave

  if (world.rank() == 0) {
    const auto weights = model->weight.detach().flatten();
    std::printf("weights %.2f %.2f %.2f %.2f (sum %a), %d ranks, generation %d\n",
                weights[0].item<float>(), weights[1].item<float>(), weights[2].item<float>(),
                weights[3].item<float>(), weights.sum().item<float>(), world.size(),
                world.generation());
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
