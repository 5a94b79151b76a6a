#include "engine/tensor_engine.h"

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

using collective::Kind;
using collective::Operation;
using WorkPtr = TensorEngine::WorkPtr;

namespace {

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors flat;
  for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

}  // namespace

// First the waits end, then the threads that complete futures: they wait.
TensorEngine::~TensorEngine() { runner_->leave(); }

void TensorEngine::setTimeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    checks_.refuse("setTimeout", text::format("A timeout of {} ms cannot be.\nMake it positive.",
                                              timeout.count()));
  }
  timeout_ = timeout;
}

TensorCall TensorEngine::begin(c10d::OpType type, Tensors results,
                               std::chrono::milliseconds timeout) {
  return {runner_,
          driver_,
          sequence_,
          type,
          std::move(results),
          timeout.count() > 0 ? timeout : timeout_.load()};
}

at::Tensor TensorEngine::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) {
    checks_.refuse("allocateTensor",
                   "Shared memory holds tensors on the CPU only.\nUse device cpu.");
  }
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  std::byte* memory = memory_->allocate(bytes);
  // The memory outlives the engine if the tensor does.
  return at::from_blob(
      memory, {size}, [owner = memory_, memory](void*) { owner->release(memory); }, options);
}

WorkPtr TensorEngine::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  checks_.reduction("all_reduce", options.reduceOp, tensors);
  TensorCall call = begin(c10d::OpType::ALLREDUCE, tensors, options.timeout);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor dense = call.read_and_write(tensor);
    Operation operation = operation_of(Kind::kAllReduce, dense, options.reduceOp);
    operation.input.base = operation.output.base = data_of(dense);
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::all_reduce_mean(const at::Tensor& tensor, int average_over) {
  checks_.reduction("all_reduce", c10d::ReduceOp::AVG, {tensor});
  TensorCall call = begin(c10d::OpType::ALLREDUCE, {tensor}, c10d::kUnsetTimeout);
  const at::Tensor dense = call.read_and_write(tensor);
  Operation operation = operation_of(Kind::kAllReduce, dense, c10d::ReduceOp::AVG);
  operation.average_over = average_over;
  operation.input.base = operation.output.base = data_of(dense);
  call.add(std::move(operation));
  return call.work();
}

WorkPtr TensorEngine::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr TensorEngine::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  checks_.reduction("reduce", options.reduceOp, tensors);
  TensorCall call = begin(c10d::OpType::REDUCE, tensors, options.timeout);
  for (const at::Tensor& tensor : tensors) {
    const bool is_root = rank_ == options.rootRank;
    const at::Tensor dense = is_root ? call.read_and_write(tensor) : call.read(tensor);
    Operation operation = operation_of(Kind::kReduce, dense, options.reduceOp);
    operation.root = static_cast<int>(options.rootRank);
    operation.input.base = data_of(dense);
    if (is_root) operation.output.base = data_of(dense);
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  TensorCall call = begin(c10d::OpType::BROADCAST, tensors, options.timeout);
  for (const at::Tensor& tensor : tensors) {
    const bool is_root = rank_ == options.rootRank;
    const at::Tensor dense = is_root ? call.read(tensor) : call.read_and_write(tensor);
    Operation operation = operation_of(Kind::kBroadcast, dense);
    operation.root = static_cast<int>(options.rootRank);
    (is_root ? operation.input : operation.output).base = data_of(dense);
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::barrier(const c10d::BarrierOptions& options) {
  TensorCall call = begin(c10d::OpType::BARRIER, {}, options.timeout);
  call.add(Operation{});
  return call.work();
}

WorkPtr TensorEngine::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) {
  return gather_lists(begin(c10d::OpType::ALLGATHER, flatten(outputs), options.timeout), outputs,
                      inputs);
}

// Here outputs are by rank, and then by input.
WorkPtr TensorEngine::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  checks_.count("all_gather", outputs.size());
  std::vector<Tensors> by_input(inputs.size());
  for (const Tensors& of_rank : outputs) {
    checks_.pairs("all_gather", of_rank, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
  }
  return gather_lists(begin(c10d::OpType::ALLGATHER_COALESCED, flatten(outputs), options.timeout),
                      by_input, inputs);
}

WorkPtr TensorEngine::gather_lists(TensorCall call, const std::vector<Tensors>& outputs,
                                   const Tensors& inputs) {
  checks_.lists("all_gather", outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Operation operation = operation_of(Kind::kAllGather, inputs[i]);
    operation.input.base = data_of(call.read(inputs[i]));
    operation.output = call.write(outputs[i]);
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr TensorEngine::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  TensorCall call = begin(c10d::OpType::_ALLGATHER_BASE, outputs, options.timeout);
  checks_.pairs("all_gather", outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    checks_.same("all_gather", outputs[i], inputs[i], size_, 1);
    Operation operation = operation_of(Kind::kAllGather, inputs[i]);
    operation.input.base = data_of(call.read(inputs[i]));
    operation.output = {.base = data_of(call.read_and_write(outputs[i])),
                        .stride = inputs[i].nbytes()};
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  if (is_root) {
    checks_.lists("gather", outputs, inputs);
  } else if (!outputs.empty()) {
    checks_.refuse("gather",
                   "gather was given outputs on a rank that is not the root.\nGive none.");
  }
  TensorCall call = begin(c10d::OpType::GATHER, flatten(outputs), options.timeout);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Operation operation = operation_of(Kind::kGather, inputs[i]);
    operation.root = static_cast<int>(options.rootRank);
    operation.input.base = data_of(call.read(inputs[i]));
    if (is_root) operation.output = call.write(outputs[i]);
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  if (is_root) {
    checks_.lists("scatter", inputs, outputs);
  } else if (!inputs.empty()) {
    checks_.refuse("scatter",
                   "scatter was given inputs on a rank that is not the root.\nGive none.");
  }
  TensorCall call = begin(c10d::OpType::SCATTER, outputs, options.timeout);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Operation operation = operation_of(Kind::kScatter, outputs[i]);
    operation.root = static_cast<int>(options.rootRank);
    if (is_root) operation.input = call.read(inputs[i]);
    operation.output.base = data_of(call.read_and_write(outputs[i]));
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  checks_.lists("reduce_scatter", inputs, outputs);
  checks_.reduction("reduce_scatter", options.reduceOp, outputs);
  TensorCall call = begin(c10d::OpType::REDUCE_SCATTER, outputs, options.timeout);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Operation operation = operation_of(Kind::kReduceScatter, outputs[i], options.reduceOp);
    operation.input = call.read(inputs[i]);
    operation.output.base = data_of(call.read_and_write(outputs[i]));
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr TensorEngine::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  checks_.reduction("reduce_scatter", options.reduceOp, outputs);
  checks_.pairs("reduce_scatter", outputs, inputs);
  TensorCall call = begin(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, options.timeout);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    checks_.same("reduce_scatter", outputs[i], inputs[i], 1, size_);
    Operation operation = operation_of(Kind::kReduceScatter, outputs[i], options.reduceOp);
    operation.input = {.base = data_of(call.read(inputs[i])), .stride = outputs[i].nbytes()};
    operation.output.base = data_of(call.read_and_write(outputs[i]));
    call.add(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::send(Tensors& tensors, int peer, int tag) {
  TensorCall call = begin(c10d::OpType::SEND, tensors, c10d::kUnsetTimeout);
  const at::Tensor dense = call.read(checks_.only_one("send", tensors));
  call.add(collective::Message{.is_send = true,
                               .memory = data_of(dense),
                               .bytes = dense.nbytes(),
                               .peer = peer,
                               .tag = tag});
  return call.work();
}

WorkPtr TensorEngine::recv(Tensors& tensors, int peer, int tag) {
  return receive(tensors, peer, tag);
}

WorkPtr TensorEngine::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, collective::kAnyRank, tag);
}

WorkPtr TensorEngine::receive(const Tensors& tensors, int peer, int tag) {
  TensorCall call = begin(c10d::OpType::RECV, tensors, c10d::kUnsetTimeout);
  const at::Tensor dense = call.read_and_write(checks_.only_one("recv", tensors));
  call.add(collective::Message{
      .memory = data_of(dense), .bytes = dense.nbytes(), .peer = peer, .tag = tag});
  return call.work();
}

}  // namespace lockstep
