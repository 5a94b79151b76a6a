// Which gradients travel together.

#include "ddp/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

namespace lockstep {
namespace {

using Order = std::vector<std::size_t>;

std::vector<Order> slots_of(const std::vector<BucketPlan>& plans) {
  std::vector<Order> all;
  for (const BucketPlan& plan : plans) all.push_back(plan.slots);
  return all;
}

TEST(BucketPlan, ClosesABucketOnceItHoldsTheLimit) {
  const std::vector<SlotShape> shapes = {{16}, {16}, {16}, {1000}, {16}, {16}};
  // 64 bytes each: the first bucket is full with one, the others with two; none is cut.
  EXPECT_EQ(slots_of(plan_buckets(shapes, {5, 4, 3, 2, 1, 0}, {128, 64})),
            (std::vector<Order>{{5}, {4, 3}, {2, 1}, {0}}));
  EXPECT_EQ(slots_of(plan_buckets(shapes, {0, 1, 2, 3, 4, 5}, {1 << 20, 1 << 20})),
            (std::vector<Order>{{0, 1, 2, 3, 4, 5}}));
  EXPECT_TRUE(plan_buckets(shapes, {}, {128, 64}).empty());
}

TEST(BucketPlan, EndsWithSmallBuckets) {
  const std::vector<SlotShape> shapes(100, {1 << 18});  // 1 MiB each
  Order order(shapes.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::size_t> sizes;
  for (const BucketPlan& plan : plan_buckets(shapes, order, {25 << 20, 1 << 20})) {
    sizes.push_back(plan.slots.size());
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1, 25, 25, 25, 12, 6, 3, 2, 1}));
}

TEST(BucketPlan, KeepsTypesAndDevicesApartInTheOrderOfCompletion) {
  const std::vector<SlotShape> shapes = {{16, at::kFloat},
                                         {16, at::kDouble},
                                         {16, at::kFloat},
                                         {16, at::kFloat, at::Device("cuda:1")}};
  // The f32 bucket is complete with slot 2, after the f64 one.
  EXPECT_EQ(slots_of(plan_buckets(shapes, {0, 1, 2, 3}, {1 << 20, 1 << 20})),
            (std::vector<Order>{{1}, {0, 2}, {3}}));
}

TEST(BucketPlan, EverySlotHasAPlaceOfItsOwnOnACacheLine) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<SlotShape> shapes(1 + random() % 40);
    for (SlotShape& shape : shapes) {
      shape.num_elements = random() % 3 == 0 ? 0 : random() % 500;
      shape.type = random() % 2 == 0 ? at::kFloat : at::kBFloat16;
    }
    Order order(shapes.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<int> times_seen(shapes.size(), 0);
    for (const BucketPlan& plan :
         plan_buckets(shapes, order, {1 + random() % 3000, random() % 500})) {
      std::int64_t end = 0;
      for (std::size_t i = 0; i < plan.slots.size(); ++i) {
        const SlotShape& shape = shapes[plan.slots[i]];
        EXPECT_EQ(shape.type, shapes[plan.slots[0]].type);
        EXPECT_EQ(plan.offsets[i] * static_cast<std::int64_t>(c10::elementSize(shape.type)) % 64,
                  0);
        EXPECT_GE(plan.offsets[i], end);
        end = plan.offsets[i] + shape.num_elements;
        ++times_seen[plan.slots[i]];
      }
      EXPECT_GE(plan.num_elements, end);
    }
    for (const int times : times_seen) EXPECT_EQ(times, 1);
  }
}

// Buckets of one type lie one behind the other, so that a tensor that was cut is still one run of
// memory.
TEST(BucketPlan, CutsLargeTensorsIntoPartsThatLieOneBehindTheOther) {
  const std::vector<SlotShape> shapes = {{100}, {16}, {40}};
  const auto plans = plan_buckets(shapes, {0, 1, 2}, {256, 64, 128});  // parts of 32 elements
  ASSERT_EQ(slots_of(plans), (std::vector<Order>{{0}, {0, 0}, {0, 1}, {2}, {2}}));
  EXPECT_EQ(plans[1].firsts, (std::vector<std::int64_t>{32, 64}));
  EXPECT_EQ(plans[2].firsts, (std::vector<std::int64_t>{96, 0}));
  EXPECT_EQ(plans[2].counts, (std::vector<std::int64_t>{4, 16}));

  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<SlotShape> all(1 + random() % 20);
    for (SlotShape& shape : all) {
      shape.num_elements = random() % 4 == 0 ? random() % 3 : random() % 2000;
      shape.type = random() % 2 == 0 ? at::kFloat : at::kBFloat16;
    }
    Order order(all.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const auto part_bytes = static_cast<std::int64_t>(1 + random() % 2000);
    std::vector<std::int64_t> seen(all.size(), -1);    // elements; -1: not even an empty part
    std::vector<std::int64_t> begins(all.size(), -1);  // in the memory of its type
    std::map<at::ScalarType, std::int64_t> used;
    for (const BucketPlan& plan : plan_buckets(
             all, order,
             {1 + random() % 3000, random() % 500, static_cast<std::size_t>(part_bytes)})) {
      const at::ScalarType type = all[plan.slots[0]].type;
      const auto size = static_cast<std::int64_t>(c10::elementSize(type));
      for (std::size_t i = 0; i < plan.slots.size(); ++i) {
        const std::size_t slot = plan.slots[i];
        const std::int64_t at = used[type] + plan.offsets[i];
        EXPECT_EQ(all[slot].type, type);
        EXPECT_EQ(plan.firsts[i], std::max<std::int64_t>(seen[slot], 0));
        if (plan.firsts[i] == 0) begins[slot] = at;
        EXPECT_EQ(at, begins[slot] + plan.firsts[i]);
        EXPECT_LE(plan.counts[i] * size, std::max<std::int64_t>(part_bytes, 64));
        EXPECT_LE(plan.offsets[i] + plan.counts[i], plan.num_elements);
        seen[slot] = plan.firsts[i] + plan.counts[i];
      }
      used[type] += plan.num_elements;
    }
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(seen[i], all[i].num_elements);
  }
}

// Every element of every slot is in one slice, and the runs of a slot are one behind the other in
// what a rank keeps.
TEST(BucketPlan, SlicesHaveEveryElementOnce) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    std::vector<SlotShape> shapes(1 + random() % 12);
    for (SlotShape& shape : shapes) {
      shape.num_elements = random() % 4 == 0 ? random() % 9 : random() % 5000;
      shape.group = static_cast<int>(random() % 2);
    }
    Order order(shapes.size());
    std::iota(order.begin(), order.end(), 0);
    const int num_slices = 1 + static_cast<int>(random() % 5);
    const auto plans = plan_buckets(shapes, order,
                                    {.bucket_bytes = 8192,
                                     .first_bucket_bytes = 2048,
                                     .part_bytes = random() % 2 == 0 ? 0U : 1024U,
                                     .num_slices = num_slices});
    for (const BucketPlan& plan : plans) {
      EXPECT_EQ(plan.num_elements % num_slices, 0);
      for (const std::size_t slot : plan.slots) {
        EXPECT_EQ(shapes[slot].group, shapes[plan.slots.front()].group);
      }
    }
    std::vector<std::int64_t> found(shapes.size());
    for (int slice = 0; slice < num_slices; ++slice) {
      const auto runs = runs_of_slice(plans, shapes.size(), slice, num_slices);
      for (std::size_t slot = 0; slot < shapes.size(); ++slot) {
        for (std::size_t i = 0; i < runs[slot].size(); ++i) {
          const SliceRun& run = runs[slot][i];
          found[slot] += run.count;
          const std::int64_t length = plans[run.bucket].num_elements / num_slices;
          EXPECT_LE(run.offset + run.count, length);
          EXPECT_TRUE(num_slices == 1 || run.first % 64 == 0) << "not a whole vector";
          if (i == 0) continue;
          const SliceRun& before = runs[slot][i - 1];
          EXPECT_GT(run.first, before.first);
          if (run.bucket == before.bucket) {
            EXPECT_EQ(run.offset, before.offset + before.count);
            continue;
          }
          EXPECT_EQ(before.offset + before.count, plans[before.bucket].num_elements / num_slices);
          EXPECT_EQ(run.offset, 0);
          for (std::size_t k = before.bucket + 1; k < run.bucket; ++k) {
            EXPECT_NE(shapes[plans[k].slots.front()].group, shapes[slot].group) << "one between";
          }
        }
      }
    }
    for (std::size_t slot = 0; slot < shapes.size(); ++slot) {
      EXPECT_EQ(found[slot], shapes[slot].num_elements) << slot;
    }
  }
}

}  // namespace
}  // namespace lockstep
