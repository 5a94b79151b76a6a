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
    return std::tuple(static_cast<int>(key.type), static_cast<int>(key.device.type()),
                      static_cast<int>(key.device.index()), key.group);
  };
  return order(a) < order(b);
}

Buckets::Key Buckets::key_of(const BucketPlan& plan, const std::vector<Slot>& slots) {
  const SlotShape& shape = slots[plan.slots.front()].shape;
  return {shape.type, shape.device, shape.group};
}

at::Tensor Buckets::allocate(std::int64_t num_elements, const Key& key) const {
  const auto options = at::TensorOptions(c10::toRealValueType(key.type)).device(key.device);
  const bool has_memory = engine_->supportsTensorAlloc(key.device.index());
  at::Tensor memory = has_memory ? engine_->allocateTensor(num_elements, options)
                                 : at::empty({num_elements}, options);
  return memory.zero_();
}

// Of kGradients alone, which has no complex numbers. Behind the last bucket there is room for the
// control numbers.
void Buckets::lay_out_places(const std::vector<Slot>& slots, std::int64_t num_control) {
  const auto length_of = [&](const Bucket& bucket) {
    return bucket.plan.num_elements + (&bucket == &buckets_.back() ? num_control : 0);
  };
  std::map<Key, std::int64_t, LessKey> longest;
  for (const Bucket& bucket : buckets_) {
    std::int64_t& length = longest[key_of(bucket.plan, slots)];
    length = std::max(length, length_of(bucket));
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
    const Key key = key_of(bucket.plan, slots);
    std::vector<std::size_t>& of_key = users[key];
    if (of_key.size() >= 2) bucket.before = of_key[of_key.size() - 2];
    const std::int64_t half = places_.at(key).numel() / 2;
    bucket.wire = places_.at(key).narrow(0, of_key.size() % 2 == 0 ? 0 : half, length_of(bucket));
    bucket.own = bucket.wire.narrow(0, 0, bucket.plan.num_elements);
    if (!reduces_once_) bucket.result = bucket.wire;
    of_key.push_back(i);
  }
  if (num_control == 0) return;
  const Bucket& last = buckets_.back();
  control_ = last.wire.narrow(0, last.plan.num_elements, num_control);
  if (!reduces_once_) control_mean_ = control_;
}

// The runs of a slot are one behind the other: where it is cut between two buckets, the slice of
// the first one ends with it, and that of the second begins with it.
void Buckets::view_slices(const std::vector<BucketPlan>& plans, std::vector<Slot>& slots) const {
  const auto runs = runs_of_slice(plans, slots.size(), slice_, num_slices_);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].buckets.empty()) continue;
    const at::Tensor& first = buckets_[slots[i].buckets.front()].flat;
    slots[i].view = first.narrow(0, 0, 0);
    if (runs[i].empty()) continue;
    std::int64_t count = 0;
    for (const SliceRun& run : runs[i]) count += run.count;
    const at::Tensor& flat = buckets_[runs[i].front().bucket].flat;
    slots[i].view =
        at::empty({0}, flat.options())
            .set_(flat.storage(), flat.storage_offset() + runs[i].front().offset, {count}, {1});
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

  const auto length_of = [&](const BucketPlan& plan) {
    return plan.num_elements / num_slices_ * reals_per_element(key_of(plan, slots).type);
  };
  std::map<Key, std::int64_t, LessKey> needed;
  for (const BucketPlan& plan : plans) needed[key_of(plan, slots)] += length_of(plan);
  if (!plans.empty() && !is_control_apart) needed[key_of(plans.back(), slots)] += num_control;
  for (const auto& [key, num_elements] : needed) {
    at::Tensor& arena = arenas_[key];
    if (!arena.defined() || arena.numel() < num_elements) {
      arena = at::Tensor();  // its memory first: the new one may take its place
      arena =
          host_ ? allocate_on_host(*host_, num_elements, key.type) : allocate(num_elements, key);
    } else if (!host_) {
      arena.zero_();  // padding is zero
    }
  }

  std::map<Key, std::int64_t, LessKey> used;
  for (const BucketPlan& plan : plans) {
    const Key key = key_of(plan, slots);
    const std::int64_t begin = used[key];
    const std::int64_t length = length_of(plan);
    used[key] += length;
    Bucket bucket;
    bucket.plan = plan;
    bucket.wire = arenas_[key].narrow(0, begin, length);
    bucket.flat = at::isComplexType(key.type)
                      ? at::view_as_complex(bucket.wire.view({plan.num_elements, 2}))
                      : bucket.wire;
    for (std::size_t i = 0; i < plan.slots.size(); ++i) {
      Slot& slot = slots[plan.slots[i]];
      slot.buckets.push_back(buckets_.size());
      // The parts of one that is cut are one behind the other.
      if (plan.firsts[i] == 0 && num_slices_ == 1) {
        slot.view = place_in(bucket.flat, plan.offsets[i], slot);
      }
    }
    bucket.own = bucket.flat;
    bucket.result = bucket.wire;
    buckets_.push_back(std::move(bucket));
  }
  if (buckets_.empty() || is_control_apart) {
    control_ = control_mean_ = at::zeros({num_control}, at::kFloat);
  } else {
    const Key key = key_of(plans.back(), slots);
    Bucket& last = buckets_.back();
    control_ = control_mean_ = arenas_[key].narrow(0, used[key], num_control);
    last.wire = last.result =
        arenas_[key].narrow(0, used[key] - last.wire.numel(), last.wire.numel() + num_control);
  }
  if (num_slices_ > 1) view_slices(plans, slots);
  if (!buckets_.empty() && (host_ || num_slices_ > 1)) {
    lay_out_places(slots, is_control_apart ? 0 : num_control);
  }
  for (auto& [slot, gradient] : moving) {
    slot->view.copy_(gradient);
    slot->parameter.mutable_grad() = slot->view;
  }
  for (Bucket& bucket : buckets_) bucket.writers.begin(bucket.flat.device());
}

}  // namespace lockstep
