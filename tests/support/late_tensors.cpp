// Tensors of the late device: how they are made, copied and seen in other shapes.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "support/late_device.h"
#include "support/late_memory.h"

namespace lockstep::test::late {

at::Tensor shadow_of(const at::Tensor& tensor) {
  const at::TensorOptions options = at::TensorOptions(tensor.scalar_type());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(shadow_of(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

namespace {

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

// As CUDA's: memory of the host that is not pinned is read at the call, and written only while the
// host waits. Copies wait unless they are told not to.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.is_cpu()) {
    if (non_blocking && is_pinned(target.const_data_ptr())) {
      enqueue(current_stream(), [from = shadow_of(source), target] { target.copy_(from); });
    } else {
      synchronize(current_stream());
      target.copy_(shadow_of(source));
    }
    return target;
  }
  const bool is_from_host = source.is_cpu();
  const bool is_read_late = is_from_host && non_blocking && is_pinned(source.const_data_ptr());
  const at::Tensor from = !is_from_host  ? shadow_of(source)
                          : is_read_late ? source
                                         : source.clone();
  enqueue(current_stream(), [from, to = shadow_of(target)] { to.copy_(from); });
  if (is_from_host && !non_blocking) synchronize(current_stream());
  return target;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const std::size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  const c10::Storage& storage = self.storage();
  if (bytes <= storage.nbytes()) return self;
  c10::DataPtr larger = device_memory().allocate(bytes);
  if (storage.nbytes() > 0)
    device_memory().copy_data(larger.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr(std::move(larger));
  storage.set_nbytes(bytes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize(current_stream());
  return at::_local_scalar_dense(shadow_of(self));
}

void record_tensor(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.id());
}

// A module's parameters may move here: Module::to() asks.
bool can_take_data(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == from.layout();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("resize_", resize);
  library.impl("record_stream", record_tensor);
  library.impl("_has_compatible_shallow_copy_type", can_take_data);
  // LibTorch's own, which look at sizes and strides alone.
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage",
               static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

}  // namespace lockstep::test::late
