// BucketPlan: which gradients travel together. A pure function, so that all ranks that agree on its
// arguments have the same plan.
//
// Results never depend on the plan: the sum over ranks is taken element by element, in one order.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

struct SlotShape {
  std::int64_t num_elements = 0;
  at::ScalarType type = at::kFloat;
  at::Device device = at::kCPU;
  int group = 0;  // slots of several groups are in buckets of their own
};

struct BucketPlan {
  std::vector<std::size_t> slots;     // in the order of their gradients
  std::vector<std::int64_t> offsets;  // of each slot, in elements; each begins a cache line
  std::vector<std::int64_t> firsts;   // element of each slot that is there, 0 unless it was cut
  std::vector<std::int64_t> counts;   // how many of its elements are there
  std::int64_t num_elements = 0;      // with the padding between slots

  bool operator==(const BucketPlan&) const = default;
};

struct PlanLimits {
  std::size_t bucket_bytes = 0;
  std::size_t first_bucket_bytes = 0;
  // A larger tensor is cut into parts of about this size, one behind the other. 0: none is cut.
  std::size_t part_bytes = 0;
  // Every bucket can be cut into so many slices of equal length, in whole lines.
  int num_slices = 1;
};

// Fills buckets in the given order of slots, one open bucket per type, device and group; a bucket
// is closed once it holds the limit, so a tensor is not cut for that. The limit is also half of
// what is left, but not less than the first bucket's: so the last buckets, which travel when
// backward has ended and nothing hides them, are small. Buckets come in the order in which they
// will be complete.
std::vector<BucketPlan> plan_buckets(const std::vector<SlotShape>& shapes,
                                     const std::vector<std::size_t>& order,
                                     const PlanLimits& limits);

// A run of a slot's elements that is in one slice of a bucket.
struct SliceRun {
  std::size_t bucket = 0;
  std::int64_t first = 0;  // of the slot's elements
  std::int64_t count = 0;
  std::int64_t offset = 0;  // in the slice
};
// What the `slice`-th of `num_slices` of all buckets has of each of `num_slots`, in the order of
// elements.
std::vector<std::vector<SliceRun>> runs_of_slice(const std::vector<BucketPlan>& plans,
                                                 std::size_t num_slots, int slice, int num_slices);

}  // namespace lockstep
