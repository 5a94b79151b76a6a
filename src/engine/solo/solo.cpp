// The engine of a world of one: every collective is a copy, done when the call returns.
//
// It takes every type. Calls that would be wrong on any number of ranks are refused.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <deque>
#include <map>

#include "base/text.h"
#include "engine/engines.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

class DoneWork : public c10d::Work {
 public:
  DoneWork(c10d::OpType type, Tensors outputs) : c10d::Work(0, type), outputs_(std::move(outputs)) {
    finish();
  }
  int sourceRank() const override { return 0; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  Tensors outputs_;
};

class Solo : public c10d::Backend {
 public:
  explicit Solo(int global_rank) : c10d::Backend(0, 1), global_rank_(global_rank) {}

  const std::string getBackendName() const override { return "solo"; }
  void setTimeout(std::chrono::milliseconds) override {}  // nothing ever waits
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    for (at::Tensor& tensor : tensors) apply(options.reduceOp, tensor);
    return done(c10d::OpType::ALLREDUCE, tensors);
  }
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_rank("reduce", options.rootRank);
    for (at::Tensor& tensor : tensors) apply(options.reduceOp, tensor);
    return done(c10d::OpType::REDUCE, tensors);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check_rank("broadcast", options.rootRank);
    return done(c10d::OpType::BROADCAST, tensors);
  }
  Work barrier(const c10d::BarrierOptions&) override { return done(c10d::OpType::BARRIER, {}); }

  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions&) override {
    return copy_lists("all_gather", c10d::OpType::ALLGATHER, outputs, inputs);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions&) override {
    return copy("all_gather", c10d::OpType::_ALLGATHER_BASE, output, input);
  }
  Work allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions&) override {
    if (outputs.size() != 1) {  // they are by rank here
      refuse("all_gather", text::format("{} lists were given for 1 rank", outputs.size()));
    }
    return copy_all("all_gather", c10d::OpType::ALLGATHER_COALESCED, outputs[0], inputs);
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions&) override {
    return copy_all("all_gather", c10d::OpType::COALESCED, outputs, inputs);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override {
    check_rank("gather", options.rootRank);
    return copy_lists("gather", c10d::OpType::GATHER, outputs, inputs);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override {
    check_rank("scatter", options.rootRank);
    return copy_from_lists("scatter", c10d::OpType::SCATTER, outputs, inputs);
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    Work work = copy_from_lists("reduce_scatter", c10d::OpType::REDUCE_SCATTER, outputs, inputs);
    for (at::Tensor& output : outputs) apply(options.reduceOp, output);
    return work;
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    Work work = copy("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, output, input);
    apply(options.reduceOp, output);
    return work;
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    Work work = copy_all("reduce_scatter", c10d::OpType::COALESCED, outputs, inputs);
    for (at::Tensor& output : outputs) apply(options.reduceOp, output);
    return work;
  }
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return copy_all("all_to_all", c10d::OpType::ALLTOALL, outputs, inputs);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                     std::vector<int64_t>&, const c10d::AllToAllOptions&) override {
    return copy("all_to_all", c10d::OpType::ALLTOALL_BASE, output, input);
  }

  // A rank may send to itself; what is received must have been sent before.
  Work send(Tensors& tensors, int peer, int tag) override {
    check_rank("send", peer);
    for (const at::Tensor& tensor : tensors) messages_[tag].push_back(tensor.clone());
    return done(c10d::OpType::SEND, tensors);
  }
  Work recv(Tensors& tensors, int peer, int tag) override {
    check_rank("recv", peer);
    return recvAnysource(tensors, tag);
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    auto& waiting = messages_[tag];
    if (waiting.size() < tensors.size()) {
      refuse("recv", text::format("in a world of one, nothing was sent with tag {}", tag));
    }
    for (at::Tensor& tensor : tensors) {
      copy("recv", c10d::OpType::RECV, tensor, waiting.front());
      waiting.pop_front();
    }
    return done(c10d::OpType::RECV, tensors);
  }

 private:
  [[noreturn]] void refuse(const char* operation, const std::string& reason) const {
    throw UsageError({.rank = global_rank_, .operation = operation},
                     reason + ".\nMake the call as it would be right on every rank.");
  }
  void check_rank(const char* operation, int64_t rank) const {
    if (rank != 0) refuse(operation, text::format("rank {} is not in a world of one", rank));
  }

  // The reduction over one rank leaves the tensor as it is, but for a factor given with it.
  static void apply(const c10d::ReduceOp& op, at::Tensor& tensor) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
    const auto* factor = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    at::NoGradGuard no_grad;
    if (factor->tensor_factor.defined()) {
      tensor.mul_(factor->tensor_factor);
    } else {
      tensor.mul_(factor->double_factor);
    }
  }

  Work done(c10d::OpType type, Tensors outputs) {
    ++sequence_;
    return c10::make_intrusive<DoneWork>(type, std::move(outputs));
  }

  Work copy(const char* operation, c10d::OpType type, at::Tensor& output, const at::Tensor& input) {
    if (output.numel() != input.numel() || output.scalar_type() != input.scalar_type()) {
      refuse(operation, text::format("the output ({} elements of {}) does not match the input "
                                     "({} elements of {})",
                                     output.numel(), c10::toString(output.scalar_type()),
                                     input.numel(), c10::toString(input.scalar_type())));
    }
    at::NoGradGuard no_grad;
    const bool is_in_place =
        output.data_ptr() == input.data_ptr() && output.sizes() == input.sizes() &&
        output.strides() == input.strides() && output.is_conj() == input.is_conj() &&
        output.is_neg() == input.is_neg();
    if (!is_in_place) output.copy_(input.reshape(output.sizes()));
    return done(type, {output});
  }

  Work copy_all(const char* operation, c10d::OpType type, Tensors& outputs, Tensors& inputs) {
    if (outputs.size() != inputs.size()) {
      refuse(operation,
             text::format("{} outputs were given for {} inputs", outputs.size(), inputs.size()));
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) copy(operation, type, outputs[i], inputs[i]);
    return done(type, outputs);
  }

  Work copy_lists(const char* operation, c10d::OpType type, std::vector<Tensors>& outputs,
                  Tensors& inputs) {
    Tensors flat = one_of_each(operation, outputs);
    return copy_all(operation, type, flat, inputs);
  }
  Work copy_from_lists(const char* operation, c10d::OpType type, Tensors& outputs,
                       std::vector<Tensors>& inputs) {
    Tensors flat = one_of_each(operation, inputs);
    return copy_all(operation, type, outputs, flat);
  }
  Tensors one_of_each(const char* operation, const std::vector<Tensors>& lists) const {
    Tensors flat;
    for (const Tensors& list : lists) {
      if (list.size() != 1) {
        refuse(operation, text::format("a list of {} tensors was given for 1 rank", list.size()));
      }
      flat.push_back(list.front());
    }
    return flat;
  }

  const int global_rank_;  // what errors call this rank
  uint64_t sequence_ = 0;
  std::map<int, std::deque<at::Tensor>> messages_;  // by tag
};

}  // namespace

Backend make_solo(const EngineContext& context) {
  return c10::make_intrusive<Solo>(context.members.at(0).rank);
}

}  // namespace lockstep
