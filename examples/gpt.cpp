// A small GPT that learns to write C++, after minGPT and nanoGPT: tokens are characters, the text
// is this machine's headers of the C++ standard library, or any file. Shows a whole training loop:
// loader, accumulation, bf16, clipping, schedule, metrics. bench/gpt.py compares it with Python's.
//
//   lockstep run -n 2 -- build/release/examples/gpt     (or mpirun, torchrun --no-python, alone)
//       [--steps N] [--text FILE] [--bf16] [--batch N] [--seed N] [--loss-file FILE]
//       [--device cuda] [--shard]     (--shard: the ranks of a host have the model once)
//
// Expected: the loss falls from 4.6 to below 1.5, then 500 characters that look like C++.

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>

namespace fs = std::filesystem;
namespace nn = torch::nn;

constexpr std::int64_t kLayers = 4, kHeads = 4, kWidth = 128, kContext = 64;
constexpr int kAccumulate = 2;  // backwards to a step

struct Block : nn::Module {
  nn::LayerNorm norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::LayerNorm norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(4 * kWidth, kWidth));

  torch::Tensor forward(torch::Tensor x) {
    const auto parts =
        qkv(norm1(x)).unflatten(2, {3, kHeads, -1}).permute({2, 0, 3, 1, 4}).unbind();
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
    x = x + out(mixed.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x)), "tanh"));
  }
};

struct Gpt : nn::Module {
  nn::Embedding tokens;  // also the last layer, as in GPT-2
  nn::Embedding positions = register_module("positions", nn::Embedding(kContext, kWidth));
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));

  explicit Gpt(std::int64_t vocabulary)
      : tokens(register_module("tokens", nn::Embedding(vocabulary, kWidth))) {
    for (int i = 0; i < kLayers; ++i) blocks->push_back(std::make_shared<Block>());
    for (auto& parameter : named_parameters()) {  // begins as GPT-2 does
      if (parameter->dim() == 2) nn::init::normal_(*parameter, 0, 0.02);
      if (parameter.key().ends_with("bias")) nn::init::zeros_(*parameter);
    }
  }
  torch::Tensor forward(const torch::Tensor& input) {  // scores of every next character
    const auto x = tokens(input) + positions(torch::arange(input.size(1), input.device()));
    return torch::linear(norm(blocks->forward(x)), tokens->weight);
  }
};

// Puts the headers, one after the other, into a file, and returns its name.
std::string gather_headers() {
  std::map<int, fs::path> folders;  // by version
  std::error_code is_missing;
  for (const auto& entry : fs::directory_iterator("/usr/include/c++", is_missing)) {
    folders[std::atoi(entry.path().filename().c_str())] = entry.path();
  }
  if (folders.empty()) throw std::runtime_error("/usr/include/c++ is empty: give --text FILE.");
  std::set<fs::path> headers;
  for (const auto& entry : fs::directory_iterator(folders.rbegin()->second)) {
    if (entry.is_regular_file()) headers.insert(entry.path());
  }
  const auto name = fs::temp_directory_path() / ("gpt-" + std::to_string(getpid()));
  std::ofstream file(name);
  for (const auto& header : headers) file << std::ifstream(header).rdbuf();
  return name;
}

int main(int argc, char** argv) try {
  using lockstep::SampleOrder, lockstep::Shard, lockstep::optim::cosine, lockstep::optim::warm_up;
  std::map<std::string, std::string> options = {{"--steps", "800"},   {"--batch", "8"},
                                                {"--seed", "1"},      {"--text", ""},
                                                {"--bf16", ""},       {"--loss-file", "/dev/null"},
                                                {"--device", "auto"}, {"--shard", ""}};
  for (int i = 1; i < argc; ++i) {
    const auto option = options.find(argv[i]);
    if (option == options.end()) throw std::runtime_error(std::string("No option: ") + argv[i]);
    option->second = i + 1 < argc && argv[i + 1][0] != '-' ? argv[++i] : "yes";
  }
  const std::int64_t steps = std::atoll(options["--steps"].c_str());
  const std::uint64_t batch_size = std::strtoul(options["--batch"].c_str(), nullptr, 10),
                      seed = std::strtoul(options["--seed"].c_str(), nullptr, 10);
  if (steps < 1 || batch_size < 1) throw std::runtime_error("--steps and --batch want numbers.");
  const auto world = lockstep::World::join();
  lockstep::seed_all(seed, world);
  const auto device = world.device(options["--device"]);
  const std::string given = options["--text"], path = given.empty() ? gather_headers() : given;
  const auto text = std::make_shared<lockstep::TextFile>(path, kContext);
  if (given.empty()) fs::remove(path);  // it stays mapped
  lockstep::DistributedSampler sampler(text->size(), world, {SampleOrder::kAsPython, seed});
  lockstep::Loader loader(text, sampler, {.batch_size = batch_size, .device = device});
  const auto model = std::make_shared<Gpt>(text->vocabulary().size());
  model->to(device);
  const Shard shard = options["--shard"].empty() ? Shard::kNone : Shard::kGradients;
  lockstep::DistributedDataParallel ddp(model, world, {.shard = shard});
  ddp.accumulate(kAccumulate);
  lockstep::optim::Sharded<lockstep::optim::AdamW> optimizer(  // AdamW itself without --shard
      model->parameters(), torch::optim::AdamWOptions(3e-3).betas({0.9, 0.95}));
  lockstep::optim::Schedule schedule(optimizer, warm_up(1 + steps / 20, cosine(steps, 0.1)));
  lockstep::JsonLines losses(options["--loss-file"], world);
  for (std::int64_t step = 1; step <= steps; ++step) {
    auto loss_sum = torch::zeros({}, device);
    for (int i = 0; i < kAccumulate; ++i) {
      auto batch = loader.next();
      if (!batch) batch = loader.next();  // of the next epoch
      std::optional<lockstep::Autocast> autocast;
      if (!options["--bf16"].empty()) autocast.emplace(torch::kBFloat16, device.type());
      const auto scores = model->forward(batch->data).flatten(0, 1);
      const auto loss = torch::cross_entropy_loss(scores, batch->target.flatten()) / kAccumulate;
      autocast.reset();
      loss.backward();  // the last one averages over ranks what all of them have added up
      loss_sum += loss.detach();
    }
    lockstep::optim::clip_grad_norm_async(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    schedule.step();
    const double mean_loss = lockstep::finite_mean(loss_sum, world);
    losses.write(step, {{"loss", mean_loss}});
    if (step % 50 == 0 && world.rank() == 0) std::printf("step %3ld  loss %.3f\n", step, mean_loss);
  }

  if (world.rank() == 0) {  // goes on from some characters of the text
    const torch::NoGradGuard no_grad;
    auto written = text->get(text->size() / 2).data.slice(0, 0, 32).unsqueeze(0).to(device);
    for (int i = 0; i < 500; ++i) {
      const auto scores = model->forward(written.slice(1, -kContext)).select(1, -1);
      written = torch::cat({written, torch::multinomial(torch::softmax(scores / 0.8, 1), 1)}, 1);
    }
    std::printf("%s\n", text->decode(written.cpu()).c_str());
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
