// TensorEngine: a c10d::Backend over a Runner: tensors in, operations on raw memory out.
//
// Calls are checked before any other rank hears of them; tensors that are not dense go through
// dense copies. Threading: any thread may call; the runner has its own lock.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include <lockstep/backend.h>

#include "engine/tensor_call.h"
#include "engine/tensor_checks.h"
#include "shm/group.h"

namespace lockstep {

class TensorEngine : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `memory` hands out what others reach without a copy; nullptr if there is none.
  TensorEngine(std::string name, std::shared_ptr<collective::Runner> runner,
               std::shared_ptr<shm::Group> memory)
      : c10d::Backend(runner->rank(), runner->size()),
        name_(std::move(name)),
        checks_{runner->global_rank(runner->rank()), runner->size()},
        runner_(std::move(runner)),
        memory_(std::move(memory)) {}

  ~TensorEngine() override;

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override;  // of what is started from now on
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return memory_ != nullptr; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  // The sum over ranks, divided by another number.
  WorkPtr all_reduce_mean(const at::Tensor& tensor, int average_over);
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  // As alltoall_base, where every rank knows what all others give: nothing is compared, and the
  // call waits for nobody. `largest` is the largest part of any rank, in elements.
  WorkPtr all_to_all_known(at::Tensor& output, at::Tensor& input,
                           std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                           std::int64_t largest);
  bool sums_in_tree() const { return runner_->sums_in_tree(); }
  // reduce_once.h. Both tensors are contiguous: the output is written where it is, by other ranks.
  bool can_reduce_once() const { return runner_->can_reduce_once(); }
  bool is_needed_elsewhere() { return runner_->is_needed_elsewhere(); }
  WorkPtr reduce_once(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& op,
                      int average_over);

  // Another engine of the ranks that are left, without those that are lost or not wanted. All that
  // are left call it, with the same ranks; this engine is of no use to them any more. The flags of
  // NCCL's make no difference: what is under way here has failed, or ends.
  bool supportsShrinking() const override { return context_ != nullptr; }
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags = 0,
      const c10::intrusive_ptr<Options>& opts_override = nullptr) override;
  // What it was made with.
  void set_context(const EngineContext& context) {
    context_ = std::make_unique<const EngineContext>(context);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // `timeout` is the caller's own; kUnsetTimeout: none.
  TensorCall begin(c10d::OpType type, Tensors results, std::chrono::milliseconds timeout);
  WorkPtr gather_lists(TensorCall call, const std::vector<Tensors>& outputs, const Tensors& inputs);
  WorkPtr receive(const Tensors& tensors, int peer, int tag);
  // all_to_all.cpp
  WorkPtr all_to_all(TensorCall call, const Tensors& inputs, const Tensors& outputs,
                     std::optional<std::size_t> largest = std::nullopt);
  std::size_t compare_parts(const collective::Operation& operation,
                            std::chrono::milliseconds timeout);

  const std::string name_;
  const TensorChecks checks_;
  const std::shared_ptr<collective::Runner> runner_;
  const std::shared_ptr<shm::Group> memory_;
  const std::shared_ptr<FutureDriver> driver_ = std::make_shared<FutureDriver>();
  std::unique_ptr<const EngineContext> context_;  // null: shrink() is not offered
  int num_shrunk_ = 0;                            // calls of it
  std::atomic<uint64_t> sequence_{0};
  std::atomic<std::chrono::milliseconds> timeout_{std::chrono::milliseconds(0)};  // 0: the runner's
};

}  // namespace lockstep
