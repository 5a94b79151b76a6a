// Buckets: the memory in which gradients live and travel, and each parameter's place in it.
//
// All buckets of one type and device lie one behind the other in one arena, of the engine's memory
// where it has some, so that a new plan needs no new memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ddp.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ddp/bucket_plan.h"

namespace lockstep {

// Multiplies a rank's gradients by its weight. A weight of 0 gives zeros, also of inf and NaN.
void weigh(const at::Tensor& gradients, double weight);

// One parameter.
struct Slot {
  std::string name;
  at::Tensor parameter;
  bool is_sparse = false;

  // As it was when it was wrapped.
  SlotShape shape;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // if these leave no gaps, else row by row

  at::Tensor view;  // the gradient's place in its bucket, in the parameter's sizes and strides
  std::size_t bucket = 0;

  // Of the backward under way.
  bool has_fired = false;
  bool is_late = false;           // has fired again after its bucket was posted
  bool is_present = false;        // this rank gives a gradient
  std::uint64_t fingerprint = 0;  // of the parameter at the last local backward
};

struct Bucket {
  BucketPlan plan;
  at::Tensor flat;  // the gradients
  at::Tensor wire;  // what is sent: the same memory as real numbers, and for the last bucket
                    // the control numbers behind it

  // Of the backward under way.
  std::size_t num_pending = 0;  // slots that have not fired
  bool is_posted = false;
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> complete;  // a hook's
};

class Buckets {
 public:
  explicit Buckets(c10::intrusive_ptr<c10d::Backend> engine) : engine_(std::move(engine)) {}

  // Lays out the slots by `plans`, with room for `num_control` numbers behind the last bucket (or
  // in memory of their own, if they do not travel with it). Gradients that live in a bucket move
  // along.
  void lay_out(const std::vector<BucketPlan>& plans, std::vector<Slot>& slots,
               std::int64_t num_control, bool is_control_apart);

  std::vector<Bucket>& all() { return buckets_; }
  const std::vector<Bucket>& all() const { return buckets_; }
  const at::Tensor& control() const { return control_; }

 private:
  using Key = std::pair<at::ScalarType, at::Device>;
  struct LessKey {
    bool operator()(const Key& a, const Key& b) const;
  };

  at::Tensor allocate(std::int64_t num_elements, const Key& key) const;

  c10::intrusive_ptr<c10d::Backend> engine_;
  std::vector<Bucket> buckets_;
  std::map<Key, at::Tensor, LessKey> arenas_;  // of real numbers
  at::Tensor control_;
};

}  // namespace lockstep
