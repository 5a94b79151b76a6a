#include "engine/by_device.h"

#include "base/text.h"
#include "engine/engines.h"
#include "engine/tensor_checks.h"

namespace lockstep {
namespace {

// Calls f(tensor) for all tensors of a list, or of lists.
template <typename F>
void for_tensors(const at::Tensor& tensor, const F& f) {
  f(tensor);
}
template <typename List, typename F>
void for_tensors(const std::vector<List>& lists, const F& f) {
  for (const List& list : lists) for_tensors(list, f);
}

}  // namespace

Traits traits_of(const c10d::Backend& engine) {
  if (const auto* both = dynamic_cast<const ByDevice*>(&engine)) {
    return {.takes_devices = true,
            .writes_to_sockets = traits_of(*both->for_main_memory()).writes_to_sockets};
  }
  const std::string name = engine.getBackendName();
  return {.takes_devices = name == "solo", .writes_to_sockets = name == "gloo"};
}

template <typename... Lists>
c10d::Backend& ByDevice::engine_for(const char* operation, const Lists&... lists) const {
  bool has_cpu = false;
  bool has_gpu = false;
  const auto look = [&](const at::Tensor& tensor) {
    (tensor.defined() && !tensor.is_cpu() ? has_gpu : has_cpu) = true;
  };
  (for_tensors(lists, look), ...);
  return engine_for_devices(operation, has_cpu, has_gpu);
}

c10d::Backend& ByDevice::engine_for_devices(const char* operation, bool has_cpu,
                                            bool has_gpu) const {
  const bool is_mixed = has_cpu && has_gpu;
  if (is_mixed || (is_coalescing_ && !has_gpu)) {
    TensorChecks{global_rank_, size_}.refuse(
        operation,
        text::format("{} was given tensors in main memory {}.\nMove all to one device.", operation,
                     is_mixed ? "and on a GPU" : "between startCoalescing() and endCoalescing()"));
  }
  return has_gpu ? *gpu_ : *cpu_;
}

void ByDevice::setTimeout(std::chrono::milliseconds timeout) {
  cpu_->setTimeout(timeout);
  gpu_->setTimeout(kGpuPatience * timeout);
}

void ByDevice::abort() { gpu_->abort(); }

void ByDevice::setSequenceNumberForGroup() {
  cpu_->setSequenceNumberForGroup();
  gpu_->setSequenceNumberForGroup();
}

uint64_t ByDevice::getSequenceNumberForGroup() {
  return cpu_->getSequenceNumberForGroup() + gpu_->getSequenceNumberForGroup();
}

// Main memory has no index.
bool ByDevice::supportsTensorAlloc(c10::DeviceIndex device) {
  return (device < 0 ? cpu_ : gpu_)->supportsTensorAlloc(device);
}

at::Tensor ByDevice::allocateTensor(long size, at::TensorOptions options) {
  return (options.device().is_cpu() ? cpu_ : gpu_)->allocateTensor(size, options);
}

void ByDevice::startCoalescing() {
  gpu_->startCoalescing();
  is_coalescing_ = true;
}

ByDevice::Work ByDevice::endCoalescing() {
  is_coalescing_ = false;
  return gpu_->endCoalescing();
}

ByDevice::Work ByDevice::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return engine_for("all_reduce", tensors).allreduce(tensors, options);
}

ByDevice::Work ByDevice::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& options) {
  return engine_for("all_reduce", tensors).allreduce_coalesced(tensors, options);
}

ByDevice::Work ByDevice::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return engine_for("reduce", tensors).reduce(tensors, options);
}

ByDevice::Work ByDevice::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return engine_for("broadcast", tensors).broadcast(tensors, options);
}

// The other engine's would only put an operation into a stream.
ByDevice::Work ByDevice::barrier(const c10d::BarrierOptions& options) {
  return engine_for_devices("barrier", true, false).barrier(options);
}

ByDevice::Work ByDevice::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) {
  return engine_for("all_gather", outputs, inputs).allgather(outputs, inputs, options);
}

// NCCL has none. Its operations run in the order of calls, so that the last one is done when all
// are.
ByDevice::Work ByDevice::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  c10d::Backend& engine = engine_for("all_gather", outputs, inputs);
  if (&engine == cpu_.get()) return engine.allgather_coalesced(outputs, inputs, options);
  const TensorChecks checks{global_rank_, size_};
  checks.count("all_gather", outputs.size());
  for (const Tensors& of_rank : outputs) checks.pairs("all_gather", of_rank, inputs);
  Work last;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Tensors> of_input(1);
    for (const Tensors& of_rank : outputs) of_input[0].push_back(of_rank[i]);
    Tensors input = {inputs[i]};
    last = engine.allgather(of_input, input, options);
  }
  return last;
}

ByDevice::Work ByDevice::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) {
  return engine_for("all_gather", output, input)._allgather_base(output, input, options);
}

ByDevice::Work ByDevice::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& options) {
  return engine_for("all_gather", outputs, inputs)
      .allgather_into_tensor_coalesced(outputs, inputs, options);
}

ByDevice::Work ByDevice::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::GatherOptions& options) {
  return engine_for("gather", outputs, inputs).gather(outputs, inputs, options);
}

ByDevice::Work ByDevice::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ScatterOptions& options) {
  return engine_for("scatter", outputs, inputs).scatter(outputs, inputs, options);
}

ByDevice::Work ByDevice::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& options) {
  return engine_for("reduce_scatter", outputs, inputs).reduce_scatter(outputs, inputs, options);
}

ByDevice::Work ByDevice::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& options) {
  return engine_for("reduce_scatter", output, input)._reduce_scatter_base(output, input, options);
}

ByDevice::Work ByDevice::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return engine_for("reduce_scatter", outputs, inputs)
      .reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ByDevice::Work ByDevice::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& options) {
  return engine_for("all_to_all", outputs, inputs).alltoall(outputs, inputs, options);
}

ByDevice::Work ByDevice::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& options) {
  return engine_for("all_to_all", output, input)
      .alltoall_base(output, input, output_splits, input_splits, options);
}

ByDevice::Work ByDevice::send(Tensors& tensors, int peer, int tag) {
  return engine_for("send", tensors).send(tensors, peer, tag);
}

ByDevice::Work ByDevice::recv(Tensors& tensors, int peer, int tag) {
  return engine_for("recv", tensors).recv(tensors, peer, tag);
}

ByDevice::Work ByDevice::recvAnysource(Tensors& tensors, int tag) {
  return engine_for("recv", tensors).recvAnysource(tensors, tag);
}

}  // namespace lockstep
