#include "ddp/bucket.h"

#include <ATen/ATen.h>

#include <tuple>

namespace lockstep {
namespace {

// Complex gradients travel as pairs of real numbers: not every engine knows complex ones.
std::int64_t reals_per_element(at::ScalarType type) { return at::isComplexType(type) ? 2 : 1; }

// Not a view in autograd's eyes: optimizers call detach_() on gradients, which views refuse.
at::Tensor place_in(const at::Tensor& flat, std::int64_t offset, const Slot& slot) {
  return at::empty({0}, flat.options())
      .set_(flat.storage(), flat.storage_offset() + offset, slot.sizes, slot.strides);
}

}  // namespace

void weigh(const at::Tensor& gradients, double weight) {
  if (weight == 0) {
    gradients.zero_();
  } else if (weight != 1) {
    gradients.mul_(weight);
  }
}

bool Buckets::LessKey::operator()(const Key& a, const Key& b) const {
  const auto order = [](const Key& key) {
    return std::tuple(static_cast<int>(key.first), static_cast<int>(key.second.type()),
                      static_cast<int>(key.second.index()));
  };
  return order(a) < order(b);
}

at::Tensor Buckets::allocate(std::int64_t num_elements, const Key& key) const {
  const auto options = at::TensorOptions(c10::toRealValueType(key.first)).device(key.second);
  const bool has_memory = key.second.is_cpu() && engine_->supportsTensorAlloc(key.second.index());
  at::Tensor memory = has_memory ? engine_->allocateTensor(num_elements, options)
                                 : at::empty({num_elements}, options);
  return memory.zero_();
}

void Buckets::lay_out(const std::vector<BucketPlan>& plans, std::vector<Slot>& slots,
                      std::int64_t num_control, bool is_control_apart) {
  // Gradients that are in a bucket now, and will be elsewhere.
  std::vector<std::pair<Slot*, at::Tensor>> moving;
  for (Slot& slot : slots) {
    const at::Tensor& grad = slot.parameter.grad();
    if (grad.defined() && slot.view.defined() && grad.is_alias_of(slot.view)) {
      moving.emplace_back(&slot, grad.clone());
    }
    slot.view = at::Tensor();
  }
  buckets_.clear();

  const auto key_of = [&](const BucketPlan& plan) {
    const SlotShape& shape = slots[plan.slots.front()].shape;
    return Key(shape.type, shape.device);
  };
  std::map<Key, std::int64_t, LessKey> needed;
  for (const BucketPlan& plan : plans) {
    needed[key_of(plan)] += plan.num_elements * reals_per_element(key_of(plan).first);
  }
  if (!plans.empty() && !is_control_apart) needed[key_of(plans.back())] += num_control;
  for (const auto& [key, num_elements] : needed) {
    at::Tensor& arena = arenas_[key];
    if (!arena.defined() || arena.numel() < num_elements) {
      arena = at::Tensor();  // its memory first: the new one may take its place
      arena = allocate(num_elements, key);
    } else {
      arena.zero_();  // padding is zero
    }
  }

  std::map<Key, std::int64_t, LessKey> used;
  for (const BucketPlan& plan : plans) {
    const Key key = key_of(plan);
    const std::int64_t begin = used[key];
    const std::int64_t length = plan.num_elements * reals_per_element(key.first);
    used[key] += length;
    Bucket bucket;
    bucket.plan = plan;
    bucket.wire = arenas_[key].narrow(0, begin, length);
    bucket.flat = at::isComplexType(key.first)
                      ? at::view_as_complex(bucket.wire.view({plan.num_elements, 2}))
                      : bucket.wire;
    for (std::size_t i = 0; i < plan.slots.size(); ++i) {
      Slot& slot = slots[plan.slots[i]];
      slot.bucket = buckets_.size();
      slot.view = place_in(bucket.flat, plan.offsets[i], slot);
    }
    buckets_.push_back(std::move(bucket));
  }
  if (buckets_.empty() || is_control_apart) {
    control_ = at::zeros({num_control}, at::kFloat);
  } else {
    const Key key = key_of(plans.back());
    Bucket& last = buckets_.back();
    control_ = arenas_[key].narrow(0, used[key], num_control);
    last.wire =
        arenas_[key].narrow(0, used[key] - last.wire.numel(), last.wire.numel() + num_control);
  }
  for (auto& [slot, gradient] : moving) {
    slot->view.copy_(gradient);
    slot->parameter.mutable_grad() = slot->view;
  }
}

}  // namespace lockstep
