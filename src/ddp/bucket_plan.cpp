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
  std::list<OpenBucket> open;  // one per type and device
  std::vector<OpenBucket> closed;
  for (std::size_t position = 0; position < order.size(); ++position) {
    const SlotShape& shape = shapes[order[position]];
    auto bucket = std::ranges::find_if(open, [&](const OpenBucket& one) {
      return one.type == shape.type && one.device == shape.device;
    });
    if (bucket == open.end()) {
      bucket = open.insert(open.end(), {shape.type, shape.device, limits.first_bucket_bytes});
    }
    add(*bucket, order[position], shape);
    bucket->last = position;
    if (bytes_of(*bucket) < bucket->limit) continue;
    closed.push_back(*bucket);
    *bucket = {shape.type, shape.device, limits.bucket_bytes};
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
