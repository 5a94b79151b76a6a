// Reinforcement learning: PPO balances a pole on a cart. There is no data set: every rank plays
// episodes of its own, of different lengths, and all learn from the steps of all.
//
//   lockstep run -n 2 -- build/release/examples/ppo 30 runs/ppo --device cpu    (updates, folder)
//
// Expected: the pole is balanced for 300 steps, the longest game, within 10 updates. Started again
// with the same folder, it goes on as if it had not stopped: the same weights to the bit.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <sstream>

// The usual equations of motion, 50 steps a second. The pole starts near the top.
struct CartPole {
  void reset() {
    std::uniform_real_distribution<float> small(-0.05F, 0.05F);
    position = small(random), speed = small(random), angle = small(random), spin = small(random);
    num_steps = 0;
  }
  bool step(bool to_right) {  // false if the pole has fallen
    const float sine = std::sin(angle), cosine = std::cos(angle);
    const float push = ((to_right ? 10.0F : -10.0F) + 0.05F * spin * spin * sine) / 1.1F;
    const float turn = (9.8F * sine - cosine * push) / (0.6667F - 0.0455F * cosine * cosine);
    position += 0.02F * speed;
    speed += 0.02F * (push - 0.0455F * turn * cosine);
    angle += 0.02F * spin, spin += 0.02F * turn;
    ++num_steps;
    return std::abs(position) < 2.4F && std::abs(angle) < 0.21F;
  }
  torch::Tensor seen() const { return torch::tensor({position, speed, angle, spin}).to(device); }

  torch::Device device;
  std::mt19937_64 random = {};
  float position = 0, speed = 0, angle = 0, spin = 0;
  int num_steps = 0;
};

torch::nn::Sequential make_net(int outputs) {
  using torch::nn::Linear, torch::nn::Tanh;
  return torch::nn::Sequential(Linear(4, 32), Tanh(), Linear(32, 32), Tanh(), Linear(32, outputs));
}

int main(int argc, char** argv) try {
  const bool has_device = argc > 2 && std::string(argv[argc - 2]) == "--device";
  if (has_device) argc -= 2;
  const int last_update = argc > 3 ? 0 : argc > 1 ? std::atoi(argv[1]) : 30;
  const std::string folder = argc > 2 ? argv[2] : "";
  if (last_update < 1) throw std::invalid_argument("usage: ppo [UPDATES [FOLDER]] [--device NAME]");
  const auto world = lockstep::World::join();
  const auto device = world.device(has_device ? argv[argc + 1] : "auto");
  torch::set_num_threads(1);
  lockstep::seed_all(1, world);
  auto policy = make_net(2), critic = make_net(1);
  policy->to(device), critic->to(device);
  lockstep::DistributedDataParallel policy_ddp(policy, world, {.name = "policy"});
  lockstep::DistributedDataParallel critic_ddp(critic, world, {.name = "critic"});
  auto parameters = policy->parameters();
  for (const auto& one : critic->parameters()) parameters.push_back(one);
  lockstep::optim::Adam optimizer(parameters, 3e-3);
  CartPole game{.device = device, .random = std::mt19937_64(lockstep::rank_seed(1000, world))};
  lockstep::StepClock clock;
  std::optional<lockstep::Checkpointer> checkpoints;
  int update = 0;
  if (!folder.empty()) {
    checkpoints.emplace(folder, world);
    checkpoints->add(policy, "policy").add(critic, "critic").add(optimizer);
    // Each rank's game: episodes end before a checkpoint, so its random numbers are all there is.
    const auto save = [&] { return (std::ostringstream() << game.random).str(); };
    const auto load = [&](const std::string& mine) { std::istringstream(mine) >> game.random; };
    const auto load_some = [&world, load](const std::vector<std::string>& all) {  // other ranks
      if (world.rank() < std::ssize(all)) load(all[static_cast<std::size_t>(world.rank())]);
    };
    checkpoints->add_per_rank("game", save, load, load_some);
    update = static_cast<int>(checkpoints->load_latest().step);
  }
  for (; update < last_update; ++update) {
    // Whole episodes, at least 400 steps: each rank has another number of them.
    std::vector<torch::Tensor> seen, chances;
    std::vector<std::int64_t> actions;
    std::vector<float> advantages, returns;
    while (actions.size() < 400) {
      const torch::NoGradGuard no_grad;
      std::vector<float> values;
      bool is_up = true;
      for (game.reset(); is_up && game.num_steps < 300;) {
        seen.push_back(game.seen());
        const auto logs = torch::log_softmax(policy->forward(seen.back()), 0);
        actions.push_back(torch::multinomial(logs.exp(), 1).item<std::int64_t>());
        chances.push_back(logs[actions.back()]);
        values.push_back(critic->forward(seen.back()).item<float>());
        is_up = game.step(actions.back() == 1);
      }
      values.push_back(is_up ? critic->forward(game.seen()).item<float>() : 0);
      advantages.resize(actions.size()), returns.resize(actions.size());
      float advantage = 0;
      for (std::size_t i = values.size() - 1, at = actions.size(); i-- > 0;) {
        advantage = 1 + 0.99F * values[i + 1] - values[i] + 0.94F * advantage;
        advantages[--at] = advantage;
        returns[at] = advantage + values[i];
      }
    }
    // Advantages are normalised over the steps of all ranks.
    auto gain = torch::tensor(advantages, device);
    const lockstep::Moments all = world.moments(gain);
    gain = (gain - all.mean) / (all.deviation + 1e-8);
    const auto inputs = torch::stack(seen), old = torch::stack(chances);
    const auto goal = torch::tensor(returns, device), taken = torch::tensor(actions, device);
    for (int i = 0; i < 4; ++i) {
      for (const auto& rows : torch::randperm(inputs.size(0), device).tensor_split(4)) {
        optimizer.zero_grad();
        policy_ddp.set_weight(static_cast<double>(rows.numel()));  // ranks' parts differ in size
        critic_ddp.set_weight(static_cast<double>(rows.numel()));
        const auto some = inputs.index({rows}), better = gain.index({rows});
        const auto logs = torch::log_softmax(policy->forward(some), 1);
        const auto now = logs.gather(1, taken.index({rows}).unsqueeze(1)).squeeze(1);
        const auto ratio = (now - old.index({rows})).exp();
        const auto loss = -torch::min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean();
        const auto values = critic->forward(some).squeeze(1);
        (loss + 0.5 * torch::mse_loss(values, goal.index({rows}))).backward();
        optimizer.step();
      }
    }
    clock.step(static_cast<std::int64_t>(actions.size()));
    if (checkpoints) checkpoints->save_async(update + 1);

    const double length = world.on_rank0([&] {  // without chance, in a game of its own
      const torch::NoGradGuard no_grad;
      CartPole test{.device = device};
      test.reset();
      while (test.num_steps < 300 && test.step(policy->forward(test.seen()).argmax().item<int>())) {
      }
      return static_cast<double>(test.num_steps);
    });
    const double speed = clock.samples_per_second(world);
    if (world.rank() == 0) {
      std::printf("update %3d  balanced for %.0f steps, %.0f steps/s\n", update + 1, length, speed);
    }
  }
  double sum = 0;
  for (const auto& one : parameters) sum += one.detach().to(torch::kDouble).sum().item<double>();
  if (world.rank() == 0) std::printf("update %3d  weights %.17g\n", last_update, sum);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
