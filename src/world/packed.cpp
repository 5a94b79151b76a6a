#include "world/packed.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep {

constexpr std::size_t kPackBytes = 16 << 20;

void move_packed(const std::vector<at::Tensor>& tensors,
                 const std::function<void(const at::Tensor&)>& move,
                 const std::function<bool(const at::Tensor&)>& keeps) {
  std::vector<at::Tensor> pack;
  std::size_t bytes = 0;
  const auto flush = [&] {
    if (pack.empty()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& one : pack) {
      flat.push_back(keeps(one) ? one.reshape(-1) : at::empty({one.numel()}, one.options()));
    }
    const at::Tensor packed = at::cat(flat);
    move(packed);
    std::int64_t at = 0;
    for (const at::Tensor& one : pack) {
      if (keeps(one)) one.data().copy_(packed.narrow(0, at, one.numel()).view(one.sizes()));
      at += one.numel();
    }
    pack.clear();
    bytes = 0;
  };
  std::vector<at::Tensor> left;
  for (const at::Tensor& one : tensors) {
    if (one.nbytes() <= kPackBytes || !one.is_non_overlapping_and_dense()) {
      if (one.numel() != 0) left.push_back(one.detach());
      continue;
    }
    // A large one where it is; strides are the same on all ranks, so the order of memory is, too.
    const at::Tensor memory = one.data().as_strided({one.numel()}, {1});
    const auto step = static_cast<std::int64_t>(kPackBytes / one.element_size());
    for (std::int64_t at = 0; at < one.numel(); at += step) {
      const at::Tensor piece = memory.narrow(0, at, std::min(step, one.numel() - at));
      move(keeps(one) ? piece : at::empty_like(piece));
    }
  }
  while (!left.empty()) {
    const at::Tensor first = left.front();
    std::vector<at::Tensor> others;
    for (const at::Tensor& one : left) {
      if (one.scalar_type() != first.scalar_type() || one.device() != first.device()) {
        others.push_back(one);
        continue;
      }
      if (bytes + one.nbytes() > kPackBytes) flush();
      pack.push_back(one);
      bytes += one.nbytes();
    }
    flush();
    left = std::move(others);
  }
}

void mark_written(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& one : tensors) {
    if (!one.is_inference()) one.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace lockstep
