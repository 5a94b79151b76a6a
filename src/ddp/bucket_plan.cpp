#include "ddp/bucket_plan.h"

#include <algorithm>
#include <list>

namespace lockstep {
namespace {

constexpr std::int64_t kLineBytes = 64;

struct OpenBucket {
  at::ScalarType type;
  at::Device device;
  std::size_t limit;
  std::size_t bytes_left;  // of its type and device, that are not in a closed bucket
  BucketPlan plan = {};
  std::size_t last = 0;  // position in the order of its last slot
};

std::size_t bytes_of(const OpenBucket& bucket) {
  return static_cast<std::size_t>(bucket.plan.num_elements) * c10::elementSize(bucket.type);
}

void add(OpenBucket& bucket, std::size_t slot, const SlotShape& shape) {
  const auto line = kLineBytes / static_cast<std::int64_t>(c10::elementSize(shape.type));
  bucket.plan.slots.push_back(slot);
  bucket.plan.offsets.push_back(bucket.plan.num_elements);
  bucket.plan.num_elements += (shape.num_elements + line - 1) / line * line;
}

}  // namespace

std::vector<BucketPlan> plan_buckets(const std::vector<SlotShape>& shapes,
                                     const std::vector<std::size_t>& order,
                                     const PlanLimits& limits) {
  const auto bytes_of_all = [&](const SlotShape& like) {
    std::size_t bytes = 0;
    for (const std::size_t slot : order) {
      const SlotShape& shape = shapes[slot];
      if (shape.type != like.type || shape.device != like.device) continue;
      bytes += static_cast<std::size_t>(shape.num_elements) * c10::elementSize(shape.type);
    }
    return bytes;
  };
  std::list<OpenBucket> open;  // one per type and device
  std::vector<OpenBucket> closed;
  for (std::size_t position = 0; position < order.size(); ++position) {
    const SlotShape& shape = shapes[order[position]];
    auto bucket = std::ranges::find_if(open, [&](const OpenBucket& one) {
      return one.type == shape.type && one.device == shape.device;
    });
    if (bucket == open.end()) {
      bucket = open.insert(
          open.end(), {shape.type, shape.device, limits.first_bucket_bytes, bytes_of_all(shape)});
    }
    add(*bucket, order[position], shape);
    bucket->last = position;
    if (bytes_of(*bucket) < bucket->limit) continue;
    closed.push_back(*bucket);
    const std::size_t left = bucket->bytes_left - std::min(bucket->bytes_left, bytes_of(*bucket));
    const std::size_t least = std::min(limits.first_bucket_bytes, limits.bucket_bytes);
    *bucket = {shape.type, shape.device, std::clamp(left / 2, least, limits.bucket_bytes), left};
  }
  for (OpenBucket& rest : open) {
    if (!rest.plan.slots.empty()) closed.push_back(std::move(rest));
  }
  std::ranges::sort(closed, {}, &OpenBucket::last);
  std::vector<BucketPlan> plans;
  for (OpenBucket& bucket : closed) plans.push_back(std::move(bucket.plan));
  return plans;
}

}  // namespace lockstep
