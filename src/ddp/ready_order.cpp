#include "ddp/ready_order.h"

#include <ATen/ATen.h>

namespace lockstep {

ReadyOrder::ReadyOrder(const std::vector<Slot>& slots) {
  for (std::size_t i = slots.size(); i-- > 0;) {
    if (!slots[i].is_sparse) next_.push_back(i);
  }
}

void ReadyOrder::agree(const World& world, const std::vector<Slot>& slots) {
  if (std::exchange(is_agreed_, true)) return;
  std::vector<std::int64_t> order;
  std::vector<bool> is_in(slots.size(), false);
  const auto append = [&](std::size_t index) {
    if (!is_in[index] && !slots[index].is_sparse) {
      order.push_back(static_cast<std::int64_t>(index));
    }
    is_in[index] = true;
  };
  for (const std::size_t index : ready_) append(index);
  for (std::size_t i = slots.size(); i-- > 0;) append(i);
  ready_ = {};
  if (order.empty() || world.size() == 1) return;
  world.broadcast(at::from_blob(order.data(), {static_cast<std::int64_t>(order.size())},
                                at::TensorOptions(at::kLong)));
  next_.assign(order.begin(), order.end());
}

}  // namespace lockstep
