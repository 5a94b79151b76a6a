// Operators of the late device. One kernel serves nearly all: it allocates the results and queues a
// task, which calls the CPU's kernel on the shadows of the arguments.
//
// What shape results have: operators with an out= argument, which LibTorch calls for most others,
// need not be asked, and neither those that write to an argument. The others are asked on the meta
// device, or, where they have no kernel for it, by a call on zeros on the CPU. Where the shape
// depends on values, or a number is returned, the host waits.

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <set>

#include "support/late_device.h"

namespace lockstep::test::late {

namespace {

using torch::jit::Stack;
using Convert = std::function<at::Tensor(const at::Tensor&)>;

// A number that takes part in an operator, such as the 2 of `tensor * 2`, is a tensor of the CPU.
at::Tensor with_flags_of(at::Tensor tensor, const at::Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number())
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// The argument with its tensors, alone or in lists, converted.
c10::IValue converted(const c10::IValue& value, at::Device target, const Convert& convert) {
  const auto one = [&](const at::Tensor& tensor) {
    return tensor.defined() ? convert(tensor) : tensor;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(one(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) return target;
  return value;
}

// What a task works with. Tensors of the CPU are taken as they are now.
at::Tensor for_task(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return shadow_of(tensor);
  TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but one of ",
              tensor.sizes(), " is on the CPU and another on the late device.");
  return with_flags_of(tensor.clone(), tensor);
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return with_flags_of(at::empty_strided(tensor.sizes(), tensor.strides(),
                                         at::TensorOptions(tensor.scalar_type()).device(at::kMeta)),
                       tensor);
}

at::Tensor of_zeros(const at::Tensor& tensor) {
  at::Tensor zeros =
      at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  return with_flags_of(zeros.zero_(), tensor);
}

at::Tensor empty_like_on_device(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           at::TensorOptions(tensor.scalar_type()).device(device()));
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_of_tensors(const c10::Argument& result) {
  const c10::TypeKind kind = result.type()->kind();
  return kind == c10::TypeKind::TensorType ||
         (kind == c10::TypeKind::ListType &&
          result.type()->castRaw<c10::ListType>()->getElementType()->kind() ==
              c10::TypeKind::TensorType);
}

// Whether the results are known without the arguments' values.
bool has_known_shape(const c10::FunctionSchema& schema) {
  static const auto* const by_value = new std::set<std::string>{
      "aten::nonzero",    "aten::masked_select",      "aten::_unique",  "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};
  if (by_value->contains(schema.name())) return false;
  for (const c10::Argument& result : schema.returns()) {
    if (!is_of_tensors(result)) return false;
  }
  return true;
}

// The operator called on tensors without values.
struct Trial {
  Stack arguments;
  Stack results;
};
Trial try_out(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const bool has_meta = op.hasKernelForDispatchKey(c10::DispatchKey::Meta);
  const at::Device target = has_meta ? at::kMeta : at::kCPU;
  Trial trial;
  for (const c10::IValue& argument : arguments) {
    trial.arguments.push_back(converted(argument, target, has_meta ? on_meta : of_zeros));
  }
  trial.results = trial.arguments;
  op.callBoxed(&trial.results);
  return trial;
}

// Many operators are given an empty tensor for their result, which they resize.
void resize_outputs(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_to_resize = [&](std::size_t i) {
    return op.schema().arguments()[i].is_out() && arguments[i].isTensor() &&
           arguments[i].toTensor().numel() == 0;
  };
  std::optional<Trial> trial;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!is_to_resize(i)) continue;
    if (!trial) trial = try_out(op, arguments);
    arguments[i].toTensor().resize_(trial->arguments[i].toTensor().sizes());
  }
}

std::vector<c10::IValue> make_results(const c10::OperatorHandle& op,
                                      c10::ArrayRef<c10::IValue> arguments) {
  const c10::FunctionSchema& schema = op.schema();
  std::vector<c10::IValue> results;
  std::optional<Trial> trial;
  for (const c10::Argument& result : schema.returns()) {
    if (is_written(result)) {  // the argument itself
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        const c10::Argument& argument = schema.arguments()[i];
        if (is_written(argument) &&
            argument.alias_info()->beforeSets() == result.alias_info()->beforeSets()) {
          results.push_back(arguments[i]);
        }
      }
      continue;
    }
    TORCH_CHECK(result.alias_info() == nullptr, "The late device lacks the view operator ",
                op.operator_name());
    if (!trial) trial = try_out(op, arguments);
    results.push_back(converted(trial->results[results.size()], device(), empty_like_on_device));
  }
  return results;
}

void copy_results(const c10::IValue& target, const c10::IValue& source) {
  const auto copy = [](const at::Tensor& to, const at::Tensor& from) {
    if (!to.defined()) return;
    TORCH_CHECK(to.sizes() == from.sizes(), "the shape of a result depends on values");
    to.copy_(from);
  };
  if (target.isTensor()) return copy(target.toTensor(), source.toTensor());
  const auto to = target.toTensorVector();
  const auto from = source.toTensorVector();
  for (std::size_t i = 0; i < to.size(); ++i) copy(to[i], from[i]);
}

void run_late(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments = torch::jit::last(*stack, count).vec();
  if (!has_known_shape(schema)) return at::native::cpu_fallback(op, stack);
  resize_outputs(op, arguments);
  const std::vector<c10::IValue> results = make_results(op, arguments);
  Stack of_task;
  for (const c10::IValue& argument : arguments)
    of_task.push_back(converted(argument, at::kCPU, for_task));
  std::vector<c10::IValue> targets;  // none for an argument that is a result
  for (std::size_t i = 0; i < results.size(); ++i) {
    targets.push_back(is_written(schema.returns()[i]) ? c10::IValue()
                                                      : converted(results[i], at::kCPU, for_task));
  }
  enqueue(current_stream(), [op, of_task, targets]() mutable {
    op.callBoxed(&of_task);
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (!targets[i].isNone()) copy_results(targets[i], of_task[i]);
    }
  });
  torch::jit::drop(*stack, count);
  for (const c10::IValue& result : results) stack->push_back(result);
}

// LibTorch has an operator of its own for convolutions on devices that it does not know.
void run_convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_late(op, stack);
}
void run_convolution_backward(const c10::OperatorHandle& given, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // The CPU's is also told the sizes of the bias, behind gradient, input and weight.
  const auto begin = static_cast<std::ptrdiff_t>(stack->size() - given.schema().arguments().size());
  const std::vector<std::int64_t> bias = {(stack->begin() + begin)->toTensor().size(1)};
  stack->insert(stack->begin() + begin + 3, c10::IValue(bias));
  run_late(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_late>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
}

}  // namespace lockstep::test::late
