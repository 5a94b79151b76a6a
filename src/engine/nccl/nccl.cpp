// The NCCL engine: LibTorch's ProcessGroupNCCL for tensors on GPUs, and the engine that the ranks
// would have without GPUs for tensors in main memory, which NCCL does not take.
//
// Compiled and linked against a LibTorch with CUDA; not run by our tests, as no machine of theirs
// has a GPU (docs/design/0010-nccl.md).

#include <lockstep/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/text.h"
#include "engine/engines.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

class NcclEngine : public c10d::Backend {
 public:
  NcclEngine(lockstep::Backend cpu, lockstep::Backend gpu, int rank, int size)
      : c10d::Backend(rank, size), cpu_(std::move(cpu)), gpu_(std::move(gpu)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    cpu_->setTimeout(timeout);
    gpu_->setTimeout(timeout);
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return cpu_->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (options.device().is_cpu()) return cpu_->allocateTensor(size, options);
    return at::empty({size}, options);
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return for_device(tensors).broadcast(tensors, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return for_device(tensors).allreduce(tensors, options);
  }
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override {
    return for_device(tensors).allreduce_coalesced(tensors, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return for_device(tensors).reduce(tensors, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override {
    return for_device(inputs).allgather(outputs, inputs, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override {
    return for_device(input)._allgather_base(output, input, options);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override {
    return for_device(inputs).gather(outputs, inputs, options);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override {
    return for_device(outputs).scatter(outputs, inputs, options);
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    return for_device(outputs).reduce_scatter(outputs, inputs, options);
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    return for_device(input)._reduce_scatter_base(output, input, options);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                     std::vector<std::int64_t>& input_sizes,
                     const c10d::AllToAllOptions& options) override {
    return for_device(input).alltoall_base(output, input, output_sizes, input_sizes, options);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    return for_device(tensors).send(tensors, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    return for_device(tensors).recv(tensors, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return cpu_->barrier(options); }

 private:
  c10d::Backend& for_device(const at::Tensor& tensor) const {
    return tensor.is_cuda() ? *gpu_ : *cpu_;
  }
  c10d::Backend& for_device(const Tensors& tensors) const {
    return tensors.empty() ? *cpu_ : for_device(tensors.front());
  }

  lockstep::Backend cpu_;
  lockstep::Backend gpu_;
};

}  // namespace

std::string why_no_nccl() { return {}; }

Backend make_nccl(const EngineContext& context, const Backend& cpu) {
  using Nccl = c10d::ProcessGroupNCCL;
  auto options = Nccl::Options::create();
  options->timeout = context.timeout;
  Backend gpu =
      c10::make_intrusive<Nccl>(c10::make_intrusive<c10d::PrefixStore>("nccl", context.store),
                                context.rank, context.size(), options);
  return c10::make_intrusive<NcclEngine>(cpu, gpu, context.rank, context.size());
}

}  // namespace lockstep
