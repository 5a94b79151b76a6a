#include "ddp/bucket.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>

#include "world/host_memory.h"

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
  const bool has_memory = engine_->supportsTensorAlloc(key.second.index());
  at::Tensor memory = has_memory ? engine_->allocateTensor(num_elements, options)
                                 : at::empty({num_elements}, options);
  return memory.zero_();
}

void Buckets::lay_out_places() {
  std::map<Key, std::int64_t, LessKey> longest;
  for (const Bucket& bucket : buckets_) {
    std::int64_t& length = longest[{bucket.flat.scalar_type(), bucket.flat.device()}];
    length = std::max(length, bucket.flat.numel());
  }
  for (const auto& [key, length] : longest) {
    at::Tensor& places = places_[key];
    if (places.defined() && places.numel() >= 2 * length) continue;
    places = at::Tensor();
    places = allocate(2 * length, key);
  }
  std::map<Key, std::vector<std::size_t>, LessKey> users;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    const Key key(bucket.flat.scalar_type(), bucket.flat.device());
    std::vector<std::size_t>& of_key = users[key];
    if (of_key.size() >= 2) bucket.before = of_key[of_key.size() - 2];
    const std::int64_t half = places_.at(key).numel() / 2;
    bucket.own = bucket.wire =
        places_.at(key).narrow(0, of_key.size() % 2 == 0 ? 0 : half, bucket.flat.numel());
    of_key.push_back(i);
  }
}

void Buckets::lay_out(const std::vector<BucketPlan>& plans, std::vector<Slot>& slots,
                      std::int64_t num_control, bool is_control_apart) {
  // What follows reads and writes the memory of these, in the current stream.
  for (Bucket& bucket : buckets_) bucket.writers.begin(bucket.flat.device());
  // Gradients that are in a bucket now, and will be elsewhere.
  std::vector<std::pair<Slot*, at::Tensor>> moving;
  for (Slot& slot : slots) {
    const at::Tensor& grad = slot.parameter.grad();
    if (grad.defined() && slot.view.defined() && grad.is_alias_of(slot.view)) {
      moving.emplace_back(&slot, grad.clone());
    }
    slot.view = at::Tensor();
    slot.buckets.clear();
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
      arena =
          host_ ? allocate_on_host(*host_, num_elements, key.first) : allocate(num_elements, key);
    } else if (!host_) {
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
      slot.buckets.push_back(buckets_.size());
      // The parts of one that is cut are one behind the other.
      if (plan.firsts[i] == 0) slot.view = place_in(bucket.flat, plan.offsets[i], slot);
    }
    bucket.own = bucket.flat;
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
  if (host_) lay_out_places();
  for (auto& [slot, gradient] : moving) {
    slot->view.copy_(gradient);
    slot->parameter.mutable_grad() = slot->view;
  }
  for (Bucket& bucket : buckets_) bucket.writers.begin(bucket.flat.device());
}

}  // namespace lockstep
