// ModelWatch: whether the model is still the one that was wrapped. A program that changes it would
// lead ranks apart.
//
// Each answer is the text of an error, empty if nothing has changed.
#pragma once

#include <lockstep/ddp.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ddp/bucket.h"

namespace lockstep {

// What a model is made of, asked again when it matters: programs change their models.
struct ModelView {
  std::function<std::vector<NamedTensor>()> parameters;  // each tensor once
  std::function<std::vector<NamedTensor>()> buffers;
};

// Changes when a tensor is written, as far as its version or a sample of its bytes tells. Version
// counters alone do not: LibTorch's SGD writes to .data().
std::uint64_t fingerprint_of(const at::Tensor& tensor);

class ModelWatch {
 public:
  explicit ModelWatch(ModelView model) : model_(std::move(model)) {}

  std::vector<NamedTensor> parameters() const { return model_.parameters(); }
  std::vector<NamedTensor> buffers() const { return model_.buffers(); }

  // Parameters that require no gradient.
  void add_frozen(NamedTensor parameter) { frozen_.push_back(std::move(parameter)); }
  const std::vector<NamedTensor>& frozen() const { return frozen_; }

  // Remembers the parameters as they are after a local backward.
  static void take_fingerprints(std::vector<Slot>& slots);

  // Asked at the start of each backward. `has_pending`: gradients wait that are not averaged yet.
  std::string find_change(const std::vector<Slot>& slots, bool has_pending) const;

  // Asked now and then: a parameter that was replaced or added shows only in the model itself, and
  // walking that takes a while.
  std::string find_addition(const std::vector<Slot>& slots) const;

 private:
  const ModelView model_;
  std::vector<NamedTensor> frozen_;
};

}  // namespace lockstep
