#include "peers/bare.h"

#include <malloc.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "world/host_memory.h"

namespace lockstep::bench {
namespace {

struct DropGradient : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& tensor) override { tensor.mutable_grad().reset(); }
};

}  // namespace

void make_bare(const World& world, const std::vector<at::Tensor>& parameters) {
  constexpr std::int64_t kAlign = 16;  // elements
  const auto room_for = [](const at::Tensor& tensor) {
    return (tensor.numel() + kAlign - 1) / kAlign * kAlign;
  };
  std::int64_t elements = 0;
  for (const at::Tensor& parameter : parameters) elements += room_for(parameter);
  const at::Tensor memory = allocate_on_host(world, elements, at::kFloat);
  std::int64_t place = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor shared = memory.narrow(0, place, parameter.numel()).view(parameter.sizes());
    if (world.rank() == 0) shared.copy_(parameter.detach());
    parameter.set_data(shared);
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<DropGradient>());
    place += room_for(parameter);
  }
  ::malloc_trim(0);  // gives back what the parameters were in
  world.barrier();
}

}  // namespace lockstep::bench
