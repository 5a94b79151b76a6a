// ReadyOrder: the order of slots in the buckets. At first the reverse of registration; after the
// first step, the order in which rank 0's gradients became ready.
#pragma once

#include <lockstep/world.h>

#include <cstddef>
#include <utility>
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

  // The first order stays.
  void keep() {
    ready_ = {};
    is_agreed_ = true;
  }

  // An order to be used from the next backward on, once; empty: none.
  const std::vector<std::size_t>& next() const { return next_; }
  void is_used() { used_ = std::exchange(next_, {}); }

  // The order that this rank is at, or about to use: with it, a resumed run has the same buckets.
  const std::vector<std::size_t>& latest() const { return next_.empty() ? used_ : next_; }
  void restore(std::vector<std::size_t> order) {
    next_ = std::move(order);
    ready_ = {};
    is_agreed_ = true;
  }

 private:
  std::vector<std::size_t> ready_;
  std::vector<std::size_t> next_;
  std::vector<std::size_t> used_;
  bool is_agreed_ = false;
};

}  // namespace lockstep
