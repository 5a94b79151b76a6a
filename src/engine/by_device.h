// ByDevice: an engine of two: one for tensors in main memory, the other for those on GPUs.
//
// The tensors of a call are all on one side, which is checked before either engine hears of it.
// Threading: as the engines'.
#pragma once

#include <ATen/ATen.h>
#include <lockstep/backend.h>

#include <string>
#include <vector>

namespace lockstep {

class ByDevice : public c10d::Backend {
 public:
  using Engine = c10::intrusive_ptr<c10d::Backend>;
  using Tensors = std::vector<at::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  // A rank that is late is found in main memory first, where that is an exception in time: what
  // happens on GPUs has a multiple of the timeout.
  static constexpr int kGpuPatience = 2;

  // `global_rank` is what errors call this rank.
  ByDevice(std::string name, int global_rank, Engine cpu, Engine gpu)
      : c10d::Backend(cpu->getRank(), cpu->getSize()),
        name_(std::move(name)),
        global_rank_(global_rank),
        cpu_(std::move(cpu)),
        gpu_(std::move(gpu)) {}

  const std::string getBackendName() const override { return name_; }
  const Engine& for_main_memory() const { return cpu_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  // What is under way on GPUs. In main memory every wait ends by itself.
  void abort() override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Between these two, tensors are on GPUs.
  bool supportsCoalescing() const override { return gpu_->supportsCoalescing(); }
  void startCoalescing() override;
  Work endCoalescing() override;

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int peer, int tag) override;
  Work recv(Tensors& tensors, int peer, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

 private:
  template <typename... Lists>
  c10d::Backend& engine_for(const char* operation, const Lists&... lists) const;
  c10d::Backend& engine_for_devices(const char* operation, bool has_cpu, bool has_gpu) const;

  const std::string name_;
  const int global_rank_;
  const Engine cpu_;
  const Engine gpu_;
  bool is_coalescing_ = false;
};

// The engine itself, or of two the one for main memory.
inline c10d::Backend& for_main_memory(c10d::Backend& engine) {
  const auto* both = dynamic_cast<const ByDevice*>(&engine);
  return both == nullptr ? engine : *both->for_main_memory();
}

}  // namespace lockstep
