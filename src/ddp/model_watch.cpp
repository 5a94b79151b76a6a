#include "ddp/model_watch.h"

#include <algorithm>
#include <unordered_set>

#include "base/hash.h"
#include "base/text.h"

namespace lockstep {

std::uint64_t fingerprint_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return tensor._version();
  const std::size_t bytes =
      tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : tensor.element_size();
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const std::size_t part = std::min<std::size_t>(bytes, 64);
  std::uint64_t hash = tensor._version();
  for (const std::size_t at : {std::size_t{0}, (bytes - part) / 2, bytes - part}) {
    hash = hash_bytes(data + at, part, hash);
  }
  return hash;
}

void ModelWatch::take_fingerprints(std::vector<Slot>& slots) {
  for (Slot& slot : slots) slot.fingerprint = fingerprint_of(slot.parameter);
}

std::string ModelWatch::find_change(const std::vector<Slot>& slots, bool has_pending) const {
  for (const Slot& slot : slots) {
    const at::Tensor& parameter = slot.parameter;
    if (!parameter.requires_grad()) {
      return text::format(
          "The parameter {} requires no gradient any more: it was frozen after "
          "wrapping.\nCall rewrap(), on all ranks.",
          slot.name);
    }
    if (parameter.scalar_type() != slot.type || parameter.device() != slot.shape.device ||
        parameter.sizes() != at::IntArrayRef(slot.sizes)) {
      return text::format(
          "The parameter {} has other data than when it was wrapped: it was moved, "
          "cast or replaced.\nMove and cast the model first, then wrap it, or call rewrap() on all "
          "ranks.",
          slot.name);
    }
    if (has_pending && fingerprint_of(parameter) != slot.fingerprint) {
      return text::format(
          "The parameter {} was changed while its gradient was not averaged yet: "
          "an optimizer stepped after a backward under no_sync() or "
          "accumulate().\nStep only after a synchronised backward.",
          slot.name);
    }
  }
  for (const NamedTensor& one : frozen_) {
    if (one.tensor.requires_grad()) {
      return text::format(
          "The parameter {} requires a gradient now: it was unfrozen after "
          "wrapping.\nCall rewrap(), on all ranks.",
          one.name);
    }
  }
  return {};
}

std::string ModelWatch::find_addition(const std::vector<Slot>& slots) const {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const Slot& slot : slots) known.insert(slot.parameter.unsafeGetTensorImpl());
  for (const NamedTensor& one : frozen_) known.insert(one.tensor.unsafeGetTensorImpl());
  for (const NamedTensor& one : model_.parameters()) {
    if (known.contains(one.tensor.unsafeGetTensorImpl()) || !one.tensor.requires_grad()) continue;
    return text::format(
        "The parameter {} was added to the model, or replaced there, after "
        "wrapping.\nBuild the whole model first, then wrap it, or call rewrap() on all ranks.",
        one.name);
  }
  return {};
}

}  // namespace lockstep
