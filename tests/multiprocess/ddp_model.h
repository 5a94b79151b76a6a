// Small models and data for the tests of DistributedDataParallel.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>

#include <string>
#include <vector>

namespace lockstep::test {

// Where models and their data are: a test of a device says which.
inline at::Device& place() {
  static at::Device device = at::kCPU;
  return device;
}
inline at::Tensor here(const at::Tensor& tensor) { return tensor.to(place()); }
inline void move_here(torch::nn::Module& model) {
  if (!place().is_cpu()) model.to(place());
}

// The same numbers everywhere, and others for another seed.
inline at::Tensor numbers(std::vector<std::int64_t> sizes, int seed) {
  at::Tensor tensor = torch::empty(sizes, at::kDouble);
  auto* data = tensor.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    data[i] = std::sin(0.37 * static_cast<double>(i + 1) + 1.3 * seed);
  }
  return here(tensor.to(at::kFloat));
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    left = register_module("left", torch::nn::Linear(8, 8));
    right = register_module("right", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(8, 3));
    move_here(*this);
    const torch::NoGradGuard no_grad;
    int seed = 0;
    for (auto& parameter : parameters())
      parameter.copy_(0.3 * numbers(parameter.sizes().vec(), ++seed));
  }
  // Which of the two branches are used.
  at::Tensor forward(const at::Tensor& input, bool use_left = true, bool use_right = true) {
    const at::Tensor hidden = torch::tanh(first(input));
    at::Tensor sum = hidden;
    if (use_left) sum = sum + torch::tanh(left(hidden));
    if (use_right) sum = sum + torch::tanh(right(hidden));
    return last(sum);
  }
  torch::nn::Linear first{nullptr}, left{nullptr}, right{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

// A parameter used outside and inside of a backward within backward.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight) {
    context->save_for_backward({input, weight});
    return input * weight.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad_mode(true);
    const auto input = saved[0].detach().requires_grad_();
    (input * saved[1].sum() * grads[0].detach()).sum().backward();  // adds to weight.grad here
    return {input.grad(), at::Tensor()};
  }
};

inline at::Tensor loss_of(const at::Tensor& output) { return output.pow(2).mean(); }

inline at::Tensor batch(int rank, int step = 0, std::int64_t rows = 5) {
  return numbers({rows, 6}, 10 * step + rank + 1);
}

// The gradients that `backward` of each rank leaves in a model of its own, and their mean over
// ranks:
// ((g0 + g1) + g2) ... in the order of the engine's tree for up to three ranks. Undefined where no
// rank has one.
using Backward = std::function<void(Net& model, int rank)>;
inline std::vector<at::Tensor> mean_gradients(int size, const Backward& backward) {
  std::vector<std::vector<at::Tensor>> all;
  for (int rank = 0; rank < size; ++rank) {
    Net model;
    backward(model, rank);
    auto& mine = all.emplace_back();
    for (const auto& parameter : model->parameters()) mine.push_back(parameter.grad());
  }
  std::vector<at::Tensor> means;
  for (std::size_t i = 0; i < all[0].size(); ++i) {
    at::Tensor sum;
    for (int rank = 0; rank < size; ++rank) {
      const at::Tensor& one = all[static_cast<std::size_t>(rank)][i];
      if (one.defined()) sum = sum.defined() ? sum + one : one.clone();
    }
    means.push_back(sum.defined() ? sum / size : sum);
  }
  return means;
}

inline void expect_gradients(const Net& model, const std::vector<at::Tensor>& expected,
                             double tolerance = 1e-6) {
  const auto named = model->named_parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& grad = named[i].value().grad();
    ASSERT_EQ(grad.defined(), expected[i].defined()) << named[i].key();
    if (grad.defined()) {
      EXPECT_TRUE(at::allclose(grad, expected[i], tolerance, tolerance)) << named[i].key() << "\n"
                                                                         << grad << "\nexpected\n"
                                                                         << expected[i];
    }
  }
}

// The same bits on all ranks.
inline void expect_same_bits(const World& world, const at::Tensor& tensor,
                             const std::string& what) {
  at::Tensor dense = tensor.is_sparse() ? tensor.to_dense() : tensor.detach();
  if (dense.is_complex()) dense = at::view_as_real(dense);  // Gloo gathers no complex numbers
  const at::Tensor all = world.all_gather(dense);
  for (int rank = 1; rank < world.size(); ++rank) {
    EXPECT_TRUE(at::equal(all[rank], all[0])) << what << " differs on rank " << rank;
  }
}
inline void expect_same_bits(const World& world, const torch::nn::Module& model) {
  for (const auto& one : model.named_parameters()) {
    expect_same_bits(world, one.value(), one.key());
    if (one.value().grad().defined()) {
      expect_same_bits(world, one.value().grad(), one.key() + ".grad");
    }
  }
}

}  // namespace lockstep::test
