#include "models.h"

#include <lockstep/error.h>
#include <torch/nn.h>

#include "base/text.h"

namespace lockstep::bench {
namespace {

namespace nn = torch::nn;

struct Mlp : Model {
  Mlp() {
    register_module("first", first);
    register_module("second", second);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& input) override {
    return last(torch::relu(second(torch::relu(first(input)))));
  }
  nn::Linear first{784, 100};
  nn::Linear second{100, 60};
  nn::Linear last{60, 10};
};

struct Cnn : Model {
  Cnn() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& input) override {
    auto x = torch::relu(conv1(input));
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    return fc2(torch::relu(fc1(x.flatten(1))));
  }
  nn::Conv2d conv1{nn::Conv2dOptions(1, 32, 3)};
  nn::Conv2d conv2{nn::Conv2dOptions(32, 64, 3)};
  nn::Linear fc1{9216, 128};
  nn::Linear fc2{128, 10};
};

struct GptOptions {
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t width;
  std::int64_t vocabulary;
  std::int64_t positions;
  bool is_tied;  // the last layer is the table of tokens, as in GPT-2
};

struct BlockImpl : nn::Module {
  explicit BlockImpl(const GptOptions& options)
      : heads(options.heads),
        norm1(nn::LayerNormOptions({options.width})),
        qkv(options.width, 3 * options.width),
        out(options.width, options.width),
        norm2(nn::LayerNormOptions({options.width})),
        up(options.width, 4 * options.width),
        down(4 * options.width, options.width) {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), tokens = x.size(1), width = x.size(2);
    const auto split = [&](const at::Tensor& part) {
      return part.view({batch, tokens, heads, width / heads}).transpose(1, 2);
    };
    const auto parts = qkv(norm1(x)).split(width, 2);
    const auto mixed = at::scaled_dot_product_attention(split(parts[0]), split(parts[1]),
                                                        split(parts[2]), {}, 0.0, true);
    x = x + out(mixed.transpose(1, 2).reshape({batch, tokens, width}));
    return x + down(torch::gelu(up(norm2(x)), "tanh"));
  }
  std::int64_t heads;
  nn::LayerNorm norm1;
  nn::Linear qkv, out;
  nn::LayerNorm norm2;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

struct Gpt : Model {
  explicit Gpt(const GptOptions& options)
      : tokens(options.vocabulary, options.width),
        positions(options.positions, options.width),
        norm(nn::LayerNormOptions({options.width})) {
    register_module("tokens", tokens);
    register_module("positions", positions);
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
    register_module("blocks", blocks);
    register_module("norm", norm);
    if (!options.is_tied) {
      head = register_module(
          "head", nn::Linear(nn::LinearOptions(options.width, options.vocabulary).bias(false)));
    }
  }
  at::Tensor forward(const at::Tensor& input) override {
    auto x = tokens(input) + positions(torch::arange(input.size(1)));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    const auto& weight = head ? head->weight : tokens->weight;
    return torch::linear(norm(x), weight).flatten(0, 1);
  }
  nn::Embedding tokens, positions;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head{nullptr};
};

struct Many : Model {
  Many() {
    for (int i = 0; i < 1000; ++i) {
      rows.push_back(register_parameter(text::format("row{}", i), torch::randn({10})));
    }
  }
  at::Tensor forward(const at::Tensor& input) override { return input.matmul(at::stack(rows)); }
  std::vector<at::Tensor> rows;
};

std::shared_ptr<Model> make_model(const std::string& name) {
  if (name == "mlp") return std::make_shared<Mlp>();
  if (name == "cnn") return std::make_shared<Cnn>();
  if (name == "gpt") return std::make_shared<Gpt>(GptOptions{6, 6, 384, 65, 256, false});
  if (name == "gpt2") return std::make_shared<Gpt>(GptOptions{12, 12, 768, 50257, 1024, true});
  if (name == "gpt2_medium") {
    return std::make_shared<Gpt>(GptOptions{24, 16, 1024, 50257, 1024, true});
  }
  if (name == "many") return std::make_shared<Many>();
  throw UsageError({.operation = "bench"},
                   text::format("There is no model '{}'.\n"
                                "Choose of: mlp, cnn, gpt, gpt2, gpt2_medium, many.",
                                name));
}

}  // namespace

at::Tensor Workload::loss() const {
  return torch::nn::functional::cross_entropy(model->forward(input), target);
}

Workload make_workload(const std::string& name, int rank) {
  torch::manual_seed(1);
  Workload workload;
  workload.model = make_model(name);
  torch::manual_seed(100 + rank);
  if (name == "many") {
    workload.input = torch::randn({4, 1000});
    workload.target = torch::randint(10, {4}, torch::kLong);
  } else if (name == "mlp" || name == "cnn") {
    workload.input = name == "mlp" ? torch::randn({64, 784}) : torch::randn({64, 1, 28, 28});
    workload.target = torch::randint(10, {64}, torch::kLong);
  } else {
    const bool is_small = name == "gpt";
    const std::vector<std::int64_t> shape =
        is_small ? std::vector<std::int64_t>{4, 128}
                 : std::vector<std::int64_t>{1, name == "gpt2" ? 64 : 32};
    workload.input = torch::randint(is_small ? 65 : 50257, shape, torch::kLong);
    workload.target = torch::randint(is_small ? 65 : 50257, {shape[0] * shape[1]}, torch::kLong);
  }
  return workload;
}

}  // namespace lockstep::bench
