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

std::int64_t line_of(const SlotShape& shape) {
  return kLineBytes / static_cast<std::int64_t>(c10::elementSize(shape.type));
}

void add(OpenBucket& bucket, std::size_t slot, const SlotShape& shape, std::int64_t first,
         std::int64_t count) {
  const std::int64_t line = line_of(shape);
  bucket.plan.slots.push_back(slot);
  bucket.plan.offsets.push_back(bucket.plan.num_elements);
  bucket.plan.firsts.push_back(first);
  bucket.plan.counts.push_back(count);
  bucket.plan.num_elements += (count + line - 1) / line * line;
}

// Of parts that tensors are cut into: whole lines.
std::int64_t elements_of_part(const SlotShape& shape, std::size_t part_bytes) {
  const auto lines = static_cast<std::int64_t>(part_bytes) / kLineBytes;
  return part_bytes == 0 ? shape.num_elements : std::max<std::int64_t>(lines, 1) * line_of(shape);
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
    const std::int64_t part = elements_of_part(shape, limits.part_bytes);
    std::int64_t first = 0;
    do {
      const std::int64_t count = std::min(part, shape.num_elements - first);
      add(*bucket, order[position], shape, first, count);
      first += count;
      bucket->last = position;
      if (bytes_of(*bucket) < bucket->limit) continue;
      closed.push_back(*bucket);
      const std::size_t left = bucket->bytes_left - std::min(bucket->bytes_left, bytes_of(*bucket));
      const std::size_t least = std::min(limits.first_bucket_bytes, limits.bucket_bytes);
      *bucket = {shape.type, shape.device, std::clamp(left / 2, least, limits.bucket_bytes), left};
    } while (first < shape.num_elements);
  }
  for (OpenBucket& rest : open) {
    if (!rest.plan.slots.empty()) closed.push_back(std::move(rest));
  }
  std::ranges::stable_sort(closed, {}, &OpenBucket::last);
  std::vector<BucketPlan> plans;
  for (OpenBucket& bucket : closed) plans.push_back(std::move(bucket.plan));
  return plans;
}

}  // namespace lockstep
