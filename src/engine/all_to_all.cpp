// TensorEngine's all-to-all. Parts may differ in size, so ranks first compare what each gives with
// what the other has room for.

#include <lockstep/error.h>

#include <algorithm>

#include "base/text.h"
#include "engine/tensor_engine.h"

namespace lockstep {

using collective::DataType;
using collective::Kind;
using collective::Operation;

TensorEngine::WorkPtr TensorEngine::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& options) {
  checks_.count("all_to_all", outputs.size());
  checks_.count("all_to_all", inputs.size());
  return all_to_all(begin(c10d::OpType::ALLTOALL, outputs, options.timeout), inputs, outputs);
}

TensorEngine::WorkPtr TensorEngine::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  TensorCall call = begin(c10d::OpType::ALLTOALL_BASE, {output}, options.timeout);
  const Tensors inputs = checks_.split(call.read(input), input_splits);
  const Tensors outputs = checks_.split(call.read_and_write(output), output_splits);
  return all_to_all(std::move(call), inputs, outputs);
}

TensorEngine::WorkPtr TensorEngine::all_to_all_known(at::Tensor& output, at::Tensor& input,
                                                     std::vector<int64_t>& output_splits,
                                                     std::vector<int64_t>& input_splits,
                                                     std::int64_t largest) {
  TensorCall call = begin(c10d::OpType::ALLTOALL_BASE, {output}, c10d::kUnsetTimeout);
  const Tensors inputs = checks_.split(call.read(input), input_splits);
  const Tensors outputs = checks_.split(call.read_and_write(output), output_splits);
  return all_to_all(std::move(call), inputs, outputs, static_cast<std::size_t>(largest));
}

TensorEngine::WorkPtr TensorEngine::all_to_all(TensorCall call, const Tensors& inputs,
                                               const Tensors& outputs,
                                               std::optional<std::size_t> largest) {
  for (const Tensors* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.scalar_type() == inputs.front().scalar_type()) continue;
      checks_.refuse("all_to_all", "The tensors differ in type.\nUse the same type for all.");
    }
  }
  Operation operation = operation_of(Kind::kAllToAll, inputs.front());
  operation.input = call.read(inputs);
  operation.output = call.write(outputs);
  const std::size_t unit = operation.type == DataType::kBytes ? inputs.front().element_size() : 1;
  for (const at::Tensor& input : inputs) {
    operation.input.counts.push_back(static_cast<std::size_t>(input.numel()) * unit);
  }
  for (const at::Tensor& output : outputs) {
    operation.output.counts.push_back(static_cast<std::size_t>(output.numel()) * unit);
  }
  operation.count = !runner_->needs_largest_part() ? 0
                    : largest                      ? *largest * unit
                                                   : compare_parts(operation, call.timeout());
  call.add(std::move(operation));
  return call.work();
}

// The largest part of all ranks. Every rank learns all numbers, so that if two differ all ranks
// throw the same, and the engine stays usable.
std::size_t TensorEngine::compare_parts(const Operation& operation,
                                        std::chrono::milliseconds timeout) {
  const auto num_ranks = static_cast<std::size_t>(size_);
  std::vector<std::uint64_t> mine(operation.input.counts.begin(), operation.input.counts.end());
  mine.insert(mine.end(), operation.output.counts.begin(), operation.output.counts.end());
  std::vector<std::uint64_t> all(mine.size() * num_ranks);
  Operation tell;
  tell.kind = Kind::kAllGather;
  tell.type = DataType::kU64;
  tell.count = mine.size();
  tell.input.base = reinterpret_cast<std::byte*>(mine.data());
  tell.output = {.base = reinterpret_cast<std::byte*>(all.data()), .stride = mine.size() * 8};
  tell.timeout = timeout;
  runner_->wait(*runner_->start(std::move(tell)));
  std::uint64_t largest = 0;
  for (std::size_t from = 0; from < num_ranks; ++from) {
    for (std::size_t to = 0; to < num_ranks; ++to) {
      const std::uint64_t sent = all[from * mine.size() + to];
      const std::uint64_t room = all[to * mine.size() + num_ranks + from];
      largest = std::max(largest, sent);
      if (sent == room) continue;
      const int giver = runner_->global_rank(static_cast<int>(from));
      const int taker = runner_->global_rank(static_cast<int>(to));
      const int self = runner_->global_rank(rank_);
      throw MismatchError(
          {.rank = self, .peer = giver == self ? taker : giver, .operation = "all_to_all"},
          text::format("Rank {} sends {} {} to rank {}, which has room for {}.\n"
                       "Make the splits of both sides equal.",
                       giver, sent, operation.type == DataType::kBytes ? "bytes" : "elements",
                       taker, room));
    }
  }
  return largest;
}

}  // namespace lockstep
