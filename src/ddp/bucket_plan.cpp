#include "ddp/bucket_plan.h"

#include <algorithm>
#include <list>

namespace lockstep {
namespace {

constexpr std::int64_t kLineBytes = 64;

struct OpenBucket {
  at::ScalarType type;
  at::Device device;
  int group;
  std::size_t limit;
  std::size_t bytes_left;  // of its kind, that are not in a closed bucket
  BucketPlan plan = {};
  std::size_t last = 0;  // position in the order of its last slot
};

std::size_t bytes_of(const OpenBucket& bucket) {
  return static_cast<std::size_t>(bucket.plan.num_elements) * c10::elementSize(bucket.type);
}

// Elements of a slot begin, and slices are cut, at multiples of this. With slices, kernels treat
// the elements at the end of a slice as they would in the middle of a tensor: whole vectors.
std::int64_t line_of(const SlotShape& shape, const PlanLimits& limits) {
  constexpr std::int64_t kVectors = 64;
  const auto line = kLineBytes / static_cast<std::int64_t>(c10::elementSize(shape.type));
  return limits.num_slices > 1 ? std::max(line, kVectors) : line;
}

std::int64_t round_up(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

void add(OpenBucket& bucket, std::size_t slot, const SlotShape& shape, std::int64_t first,
         std::int64_t count, const PlanLimits& limits) {
  bucket.plan.slots.push_back(slot);
  bucket.plan.offsets.push_back(bucket.plan.num_elements);
  bucket.plan.firsts.push_back(first);
  bucket.plan.counts.push_back(count);
  bucket.plan.num_elements += round_up(count, line_of(shape, limits));
}

// How many of the elements that are left come into the bucket. A part that is cut off ends where a
// bucket may end, so that the parts of a tensor have no gaps between them.
std::int64_t count_of_part(const OpenBucket& bucket, const SlotShape& shape, std::int64_t left,
                           const PlanLimits& limits) {
  const std::int64_t unit = line_of(shape, limits) * limits.num_slices;
  const auto elements = static_cast<std::int64_t>(limits.part_bytes / c10::elementSize(shape.type));
  const std::int64_t part = std::max(elements / unit, std::int64_t{1}) * unit;
  if (limits.part_bytes == 0 || left <= part) return left;
  const std::int64_t end = (bucket.plan.num_elements + part) / unit * unit;
  return std::min(left, end - bucket.plan.num_elements);
}

void close(std::vector<OpenBucket>& closed, OpenBucket bucket, const SlotShape& shape,
           const PlanLimits& limits) {
  const std::int64_t unit = line_of(shape, limits) * limits.num_slices;
  bucket.plan.num_elements = round_up(bucket.plan.num_elements, unit);
  closed.push_back(std::move(bucket));
}

}  // namespace

std::vector<BucketPlan> plan_buckets(const std::vector<SlotShape>& shapes,
                                     const std::vector<std::size_t>& order,
                                     const PlanLimits& limits) {
  const auto is_alike = [](const SlotShape& shape, const auto& like) {
    return shape.type == like.type && shape.device == like.device && shape.group == like.group;
  };
  const auto bytes_of_all = [&](const SlotShape& like) {
    std::size_t bytes = 0;
    for (const std::size_t slot : order) {
      const SlotShape& shape = shapes[slot];
      if (!is_alike(shape, like)) continue;
      bytes += static_cast<std::size_t>(shape.num_elements) * c10::elementSize(shape.type);
    }
    return bytes;
  };
  std::list<OpenBucket> open;  // one per type, device and group
  std::vector<OpenBucket> closed;
  for (std::size_t position = 0; position < order.size(); ++position) {
    const SlotShape& shape = shapes[order[position]];
    auto bucket =
        std::ranges::find_if(open, [&](const OpenBucket& one) { return is_alike(shape, one); });
    if (bucket == open.end()) {
      bucket = open.insert(open.end(), {shape.type, shape.device, shape.group,
                                        limits.first_bucket_bytes, bytes_of_all(shape)});
    }
    std::int64_t first = 0;
    do {
      const std::int64_t count = count_of_part(*bucket, shape, shape.num_elements - first, limits);
      add(*bucket, order[position], shape, first, count, limits);
      first += count;
      bucket->last = position;
      if (bytes_of(*bucket) < bucket->limit) continue;
      close(closed, *bucket, shape, limits);
      const std::size_t left = bucket->bytes_left - std::min(bucket->bytes_left, bytes_of(*bucket));
      const std::size_t least = std::min(limits.first_bucket_bytes, limits.bucket_bytes);
      *bucket = {shape.type, shape.device, shape.group,
                 std::clamp(left / 2, least, limits.bucket_bytes), left};
    } while (first < shape.num_elements);
  }
  for (OpenBucket& rest : open) {
    if (rest.plan.slots.empty()) continue;
    close(closed, rest, shapes[rest.plan.slots.front()], limits);
  }
  std::ranges::stable_sort(closed, {}, &OpenBucket::last);
  std::vector<BucketPlan> plans;
  for (OpenBucket& bucket : closed) plans.push_back(std::move(bucket.plan));
  return plans;
}

std::vector<std::vector<SliceRun>> runs_of_slice(const std::vector<BucketPlan>& plans,
                                                 std::size_t num_slots, int slice, int num_slices) {
  std::vector<std::vector<SliceRun>> runs(num_slots);
  for (std::size_t bucket = 0; bucket < plans.size(); ++bucket) {
    const BucketPlan& plan = plans[bucket];
    const std::int64_t length = plan.num_elements / num_slices;
    const std::int64_t begin = length * slice;
    for (std::size_t i = 0; i < plan.slots.size(); ++i) {
      const std::int64_t first = std::max(begin, plan.offsets[i]);
      const std::int64_t end = std::min(begin + length, plan.offsets[i] + plan.counts[i]);
      if (first >= end) continue;
      runs[plan.slots[i]].push_back(
          {bucket, plan.firsts[i] + first - plan.offsets[i], end - first, first - begin});
    }
  }
  return runs;
}

}  // namespace lockstep
