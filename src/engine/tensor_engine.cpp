#include "engine/tensor_engine.h"

#include <lockstep/error.h>

#include <algorithm>
#include <functional>

#include "base/text.h"

namespace lockstep {

using collective::DataType;
using collective::Kind;
using collective::Operation;
using collective::Parts;
using WorkPtr = TensorEngine::WorkPtr;

namespace {

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors flat;
  for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

}  // namespace

TensorCall TensorEngine::begin(c10d::OpType type, Tensors results) {
  return {runner_, driver_, sequence_, type, std::move(results)};
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
  TensorCall call = begin(c10d::OpType::ALLREDUCE, tensors);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor dense = call.read_and_write(tensor);
    Operation operation = operation_of(Kind::kAllReduce, dense, options.reduceOp);
    operation.input.base = operation.output.base = data_of(dense);
    call.start(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr TensorEngine::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  checks_.reduction("reduce", options.reduceOp, tensors);
  TensorCall call = begin(c10d::OpType::REDUCE, tensors);
  for (const at::Tensor& tensor : tensors) {
    const bool is_root = rank_ == options.rootRank;
    const at::Tensor dense = is_root ? call.read_and_write(tensor) : call.read(tensor);
    Operation operation = operation_of(Kind::kReduce, dense, options.reduceOp);
    operation.root = static_cast<int>(options.rootRank);
    operation.input.base = data_of(dense);
    if (is_root) operation.output.base = data_of(dense);
    call.start(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  TensorCall call = begin(c10d::OpType::BROADCAST, tensors);
  for (const at::Tensor& tensor : tensors) {
    const bool is_root = rank_ == options.rootRank;
    const at::Tensor dense = is_root ? call.read(tensor) : call.read_and_write(tensor);
    Operation operation = operation_of(Kind::kBroadcast, dense);
    operation.root = static_cast<int>(options.rootRank);
    (is_root ? operation.input : operation.output).base = data_of(dense);
    call.start(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::barrier(const c10d::BarrierOptions&) {
  TensorCall call = begin(c10d::OpType::BARRIER, {});
  call.start(Operation{});
  return call.work();
}

WorkPtr TensorEngine::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions&) {
  checks_.lists("all_gather", outputs, inputs);
  TensorCall call = begin(c10d::OpType::ALLGATHER, flatten(outputs));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Operation operation = operation_of(Kind::kAllGather, inputs[i]);
    operation.input.base = data_of(call.read(inputs[i]));
    operation.output = call.write(outputs[i]);
    call.start(std::move(operation));
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
                                                      const c10d::AllgatherOptions&) {
  TensorCall call = begin(c10d::OpType::_ALLGATHER_BASE, outputs);
  checks_.pairs("all_gather", outputs, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    checks_.same("all_gather", outputs[i], inputs[i], size_, 1);
    Operation operation = operation_of(Kind::kAllGather, inputs[i]);
    operation.input.base = data_of(call.read(inputs[i]));
    operation.output = {.base = data_of(call.read_and_write(outputs[i])),
                        .stride = inputs[i].nbytes()};
    call.start(std::move(operation));
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
  TensorCall call = begin(c10d::OpType::GATHER, flatten(outputs));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Operation operation = operation_of(Kind::kGather, inputs[i]);
    operation.root = static_cast<int>(options.rootRank);
    operation.input.base = data_of(call.read(inputs[i]));
    if (is_root) operation.output = call.write(outputs[i]);
    call.start(std::move(operation));
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
  TensorCall call = begin(c10d::OpType::SCATTER, outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Operation operation = operation_of(Kind::kScatter, outputs[i]);
    operation.root = static_cast<int>(options.rootRank);
    if (is_root) operation.input = call.read(inputs[i]);
    operation.output.base = data_of(call.read_and_write(outputs[i]));
    call.start(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  checks_.lists("reduce_scatter", inputs, outputs);
  checks_.reduction("reduce_scatter", options.reduceOp, outputs);
  TensorCall call = begin(c10d::OpType::REDUCE_SCATTER, outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Operation operation = operation_of(Kind::kReduceScatter, outputs[i], options.reduceOp);
    operation.input = call.read(inputs[i]);
    operation.output.base = data_of(call.read_and_write(outputs[i]));
    call.start(std::move(operation));
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
  TensorCall call = begin(c10d::OpType::_REDUCE_SCATTER_BASE, outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    checks_.same("reduce_scatter", outputs[i], inputs[i], 1, size_);
    Operation operation = operation_of(Kind::kReduceScatter, outputs[i], options.reduceOp);
    operation.input = {.base = data_of(call.read(inputs[i])), .stride = outputs[i].nbytes()};
    operation.output.base = data_of(call.read_and_write(outputs[i]));
    call.start(std::move(operation));
  }
  return call.work();
}

WorkPtr TensorEngine::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  checks_.count("all_to_all", outputs.size());
  checks_.count("all_to_all", inputs.size());
  TensorCall call = begin(c10d::OpType::ALLTOALL, outputs);
  start_all_to_all(call, inputs, outputs);
  return call.work();
}

WorkPtr TensorEngine::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits,
                                    const c10d::AllToAllOptions&) {
  TensorCall call = begin(c10d::OpType::ALLTOALL_BASE, {output});
  start_all_to_all(call, checks_.split(call.read(input), input_splits),
                   checks_.split(call.read_and_write(output), output_splits));
  return call.work();
}

WorkPtr TensorEngine::send(Tensors& tensors, int peer, int tag) {
  TensorCall call = begin(c10d::OpType::SEND, tensors);
  const at::Tensor dense = call.read(checks_.only_one("send", tensors));
  call.start(collective::Message{.is_send = true,
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
  TensorCall call = begin(c10d::OpType::RECV, tensors);
  const at::Tensor dense = call.read_and_write(checks_.only_one("recv", tensors));
  call.start(collective::Message{
      .memory = data_of(dense), .bytes = dense.nbytes(), .peer = peer, .tag = tag});
  return call.work();
}

// Parts may differ in size. A runner that counts in the largest part has to know it: ranks first
// tell each other how much they send to whom.
void TensorEngine::start_all_to_all(TensorCall& call, const Tensors& inputs,
                                    const Tensors& outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.scalar_type() == inputs.front().scalar_type()) continue;
    checks_.refuse("all_to_all", "Inputs and outputs differ in type.\nUse the same type.");
  }
  Operation operation = operation_of(Kind::kAllToAll, inputs.front());
  const std::size_t unit = operation.type == DataType::kBytes ? inputs.front().element_size() : 1;
  operation.count =
      runner_->needs_largest_part() ? tell_parts(inputs, outputs) * unit : std::size_t{0};
  operation.input = call.read(inputs);
  operation.output = call.write(outputs);
  for (const at::Tensor& input : inputs) {
    operation.input.counts.push_back(static_cast<std::size_t>(input.numel()) * unit);
  }
  for (const at::Tensor& output : outputs) {
    operation.output.counts.push_back(static_cast<std::size_t>(output.numel()) * unit);
  }
  call.start(std::move(operation));
}

// The largest part of all ranks, in elements.
std::size_t TensorEngine::tell_parts(const Tensors& inputs, const Tensors& outputs) {
  std::vector<int64_t> counts;
  for (const at::Tensor& input : inputs) counts.push_back(input.numel());
  std::vector<int64_t> all(counts.size() * counts.size());
  Operation tell;
  tell.kind = Kind::kAllGather;
  tell.type = DataType::kI64;
  tell.count = counts.size();
  tell.input.base = reinterpret_cast<std::byte*>(counts.data());
  tell.output = {.base = reinterpret_cast<std::byte*>(all.data()), .stride = counts.size() * 8};
  runner_->wait(*runner_->start(std::move(tell)));
  for (std::size_t peer = 0; peer < outputs.size(); ++peer) {
    const int64_t sent = all[peer * counts.size() + static_cast<std::size_t>(rank_)];
    if (sent == outputs[peer].numel()) continue;
    throw MismatchError({.rank = rank_, .peer = static_cast<int>(peer), .operation = "all_to_all"},
                        text::format("Rank {} sends {} elements, but rank {} has room for {}.\n"
                                     "Make the splits of both sides equal.",
                                     peer, sent, rank_, outputs[peer].numel()));
  }
  return static_cast<std::size_t>(*std::ranges::max_element(all));
}

}  // namespace lockstep
