// ReadyOrder: the order of slots in the buckets. At first the reverse of registration; after the
// first step, the order in which rank 0's gradients became ready.
#pragma once

#include <lockstep/world.h>

#include <cstddef>
#include <vector>

#include "ddp/bucket.h"

namespace lockstep {

class ReadyOrder {
 public:
  ReadyOrder() = default;
  explicit ReadyOrder(const std::vector<Slot>& slots);

  // A gradient has become ready for the first time in this step.
  void note(std::size_t slot) {
    if (!is_agreed_) ready_.push_back(slot);
  }
  // After the first step: agrees on rank 0's order. Collective.
  void agree(const World& world, const std::vector<Slot>& slots);

  // An order to be used from the next backward on, once; empty: none.
  const std::vector<std::size_t>& next() const { return next_; }
  void is_used() { next_.clear(); }

 private:
  std::vector<std::size_t> ready_;
  std::vector<std::size_t> next_;
  bool is_agreed_ = false;
};

}  // namespace lockstep
