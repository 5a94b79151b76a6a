// Named tensors of a module, without twins.
#pragma once

#include <lockstep/ddp.h>

#include <unordered_set>
#include <vector>

namespace lockstep {

// Tied parameters count once, under the first of their names.
template <typename Dict>
std::vector<NamedTensor> each_once(const Dict& named) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& one : named) {
    if (one.value().defined() && seen.insert(one.value().unsafeGetTensorImpl()).second) {
      tensors.push_back({one.key(), one.value()});
    }
  }
  return tensors;
}

inline std::vector<NamedTensor> each_once(const std::vector<NamedTensor>& named) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const NamedTensor& one : named) {
    if (one.tensor.defined() && seen.insert(one.tensor.unsafeGetTensorImpl()).second) {
      tensors.push_back(one);
    }
  }
  return tensors;
}

}  // namespace lockstep
