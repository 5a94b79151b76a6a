#include "engine/reduce_once.h"

#include "base/text.h"
#include "engine/by_device.h"
#include "engine/tensor_engine.h"

namespace lockstep {
namespace {

constexpr const char* kName = "reduce_once";

bool is_solo(const c10d::Backend& engine) { return engine.getBackendName() == "solo"; }

// A pending conjugation or negation is not in the memory.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

void check_pair(const TensorChecks& checks, const at::Tensor& input, const at::Tensor& output) {
  for (const at::Tensor* tensor : {&input, &output}) {
    if (is_plain(*tensor)) continue;
    checks.refuse(kName, text::format("reduce_once takes contiguous tensors on the CPU, which the "
                                      "{} is not.\nMake it contiguous.",
                                      tensor == &input ? "input" : "output"));
  }
  if (input.scalar_type() == output.scalar_type() && input.numel() == output.numel()) return;
  checks.refuse(kName, text::format("reduce_once was given an input of {} elements of {} and an "
                                    "output of {} elements of {}.\nGive the same number and type.",
                                    input.numel(), c10::toString(input.scalar_type()),
                                    output.numel(), c10::toString(output.scalar_type())));
}

}  // namespace

TensorEngine::WorkPtr TensorEngine::reduce_once(const at::Tensor& input, const at::Tensor& output,
                                                const c10d::ReduceOp& op, int average_over) {
  check_pair(checks_, input, output);
  checks_.reduction(kName, op, {input});
  TensorCall call = begin(c10d::OpType::ALLREDUCE, {output}, c10d::kUnsetTimeout);
  collective::Operation operation = operation_of(collective::Kind::kReduceOnce, input, op);
  operation.average_over = average_over;
  operation.input.base = data_of(call.read(input));
  operation.output.base = data_of(call.read(output));
  call.add(std::move(operation));
  return call.work();
}

bool can_reduce_once(c10d::Backend& engine) {
  c10d::Backend& used = for_main_memory(engine);
  const auto* ours = dynamic_cast<const TensorEngine*>(&used);
  return is_solo(used) || (ours != nullptr && ours->can_reduce_once());
}

bool is_needed_elsewhere(c10d::Backend& engine) {
  auto* const ours = dynamic_cast<TensorEngine*>(&for_main_memory(engine));
  return ours != nullptr && ours->is_needed_elsewhere();
}

c10::intrusive_ptr<c10d::Work> start_reduce_once(c10d::Backend& engine, const at::Tensor& input,
                                                 const at::Tensor& output, const c10d::ReduceOp& op,
                                                 int average_over) {
  c10d::Backend& used = for_main_memory(engine);
  if (auto* ours = dynamic_cast<TensorEngine*>(&used)) {
    return ours->reduce_once(input, output, op, average_over);
  }
  const TensorChecks checks{used.getRank(), used.getSize()};
  check_pair(checks, input, output);
  if (!is_solo(used)) {
    checks.refuse(kName, text::format("The engine '{}' has no reduce_once.\nUse all_reduce, or the "
                                      "engine 'shm' on one host.",
                                      used.getBackendName()));
  }
  // Of one rank that is the same, and solo has it.
  at::Tensor from = input;
  at::Tensor to = output;
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return used._reduce_scatter_base(to, from, options);
}

}  // namespace lockstep
