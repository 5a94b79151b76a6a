// Sparse tensors on the late device: two dense tensors there. Operators wait, run on the CPU and
// bring their results back, as most of them would have to wait for the number of their elements
// anyhow.

#include <ATen/ATen.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include "support/late_device.h"

namespace lockstep::test::late {
namespace {

using torch::jit::Stack;

at::Tensor moved(const at::Tensor& tensor, at::Device target) {
  if (!tensor.defined() || tensor.device() == target) return tensor;
  if (!tensor.is_sparse()) return tensor.to(target);
  return at::_sparse_coo_tensor_with_dims_and_tensors(
      tensor.sparse_dim(), tensor.dense_dim(), tensor.sizes(), tensor._indices().to(target),
      tensor._values().to(target),
      at::TensorOptions(tensor.scalar_type()).layout(at::kSparse).device(target),
      tensor.is_coalesced());
}

c10::IValue moved(const c10::IValue& value, at::Device target) {
  if (value.isTensor()) return moved(value.toTensor(), target);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(moved(tensor, target));
    return list;
  }
  if (value.isDevice() && !value.toDevice().is_meta()) return target;
  return value;
}

bool writes_to(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void write_back(const at::Tensor& target, const at::Tensor& source) {
  if (target.is_sparse()) {
    at::sparse::get_sparse_impl(target)->raw_resize_(source.sparse_dim(), source.dense_dim(),
                                                     source.sizes());
    at::sparse::alias_into_sparse(target, source._indices().to(device()),
                                  source._values().to(device()));
    target._coalesced_(source.is_coalesced());
  } else {
    target.copy_(source);
  }
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments = torch::jit::last(*stack, count).vec();
  Stack on_host;
  for (const c10::IValue& argument : arguments) on_host.push_back(moved(argument, at::kCPU));
  const Stack given = on_host;
  op.callBoxed(&on_host);
  torch::jit::drop(*stack, count);
  const c10::IValue* written = nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    if (!writes_to(schema.arguments()[i])) continue;
    write_back(arguments[i].toTensor(), given[i].toTensor());
    written = &arguments[i];
  }
  for (std::size_t i = 0; i < on_host.size(); ++i) {
    stack->push_back(writes_to(schema.returns()[i]) ? *written : moved(on_host[i], device()));
  }
}

at::Tensor to_sparse(const at::Tensor& self, std::int64_t sparse_dim) {
  return moved(self.cpu().to_sparse(sparse_dim), device());
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat>) {
  return at::_sparse_coo_tensor_with_dims_and_tensors(
      self.sparse_dim(), self.dense_dim(), self.sizes(), self._indices().clone(),
      self._values().clone(), self.options(), self.is_coalesced());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("_to_sparse.sparse_dim", to_sparse); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("clone", clone);
  // LibTorch's own, which look at the two tensors alone.
  library.impl("empty.memory_format", at::native::empty_sparse);
  library.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors",
               at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
}

}  // namespace lockstep::test::late
