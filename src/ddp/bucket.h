// Buckets: the memory in which gradients live and travel, and each parameter's place in it.
//
// All buckets of one type, device and group lie one behind the other in one arena, of the engine's
// memory where it has some, so that a new plan needs no new memory. With Shard::kGradients the
// arena is the host's, or, on devices, has this rank's slices of the means alone; what a rank gives
// is in one of two places that its buckets use in turn.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ddp.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/bucket_plan.h"
#include "ddp/streams.h"
#include "engine/leaf_mean.h"

namespace lockstep {

// Multiplies a rank's gradients by its weight. A weight of 0 gives zeros, also of inf and NaN.
void weigh(const at::Tensor& gradients, double weight);

// One parameter.
struct Slot {
  std::string name;
  at::Tensor parameter;
  bool is_sparse = false;

  // As it was when it was wrapped.
  SlotShape shape;                   // of the gradient
  at::ScalarType type = at::kFloat;  // of the parameter
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // if these leave no gaps, else row by row

  // The gradient's place in its bucket, in the parameter's sizes and strides; where buckets are
  // slices, what this rank has of it, in one dimension.
  at::Tensor view;
  std::vector<std::size_t> buckets;  // of its parts, in order; one, if it is not cut

  // Of the backward under way.
  bool has_fired = false;
  bool is_late = false;           // has fired again after its bucket was posted
  bool is_present = false;        // this rank gives a gradient
  bool is_folded = false;         // logical ranks: those of earlier turns are added to it
  at::Tensor own;                 // Shard::kGradients: it, while not all parts have been sent
  std::uint64_t fingerprint = 0;  // of the parameter at the last local backward
};

struct Bucket {
  BucketPlan plan;
  at::Tensor flat;    // the means; on devices with Shard::kGradients, this rank's slice of them
  at::Tensor own;     // this rank's gradients before: the same memory, but with Shard::kGradients
  at::Tensor wire;    // what is sent: `own` as real numbers, and for the last bucket the control
                      // numbers behind it
  at::Tensor result;  // where the engine leaves the means of that: the same memory, unless it
                      // writes them once for all ranks of a host
  std::optional<std::size_t> before;  // the bucket that used the place of `own` last

  // Of the backward under way.
  std::size_t num_pending = 0;  // slots that have not fired
  WriterStreams writers;        // since it was posted last
  bool is_posted = false;
  bool is_taken = false;  // Shard::kGradients: the means are where they belong
  c10::intrusive_ptr<c10d::Work> work;
  std::unique_ptr<LeafMean::Exchange> exchange;  // logical ranks: instead of `work`
  bool is_exchanged = false;
  std::int64_t bytes_given = 0;    // to the engine
  std::function<void()> complete;  // a hook's
};

class Buckets {
 public:
  explicit Buckets(c10::intrusive_ptr<c10d::Backend> engine) : engine_(std::move(engine)) {}

  // From now on the ranks of `host` have the means once; the engine writes them once if
  // `reduces_once`. Then lay_out() is collective where it needs more memory, which the first one
  // does.
  void share(const World& host, bool reduces_once) {
    host_ = host;
    reduces_once_ = reduces_once;
  }
  // From now on this rank has one slice of the means of each bucket.
  void slice(int rank, int size) {
    slice_ = rank;
    num_slices_ = size;
  }

  // Lays out the slots by `plans`, with room for `num_control` numbers behind the last bucket (or
  // in memory of their own, if they do not travel with it). Gradients that live in a bucket move
  // along.
  void lay_out(const std::vector<BucketPlan>& plans, std::vector<Slot>& slots,
               std::int64_t num_control, bool is_control_apart);

  std::vector<Bucket>& all() { return buckets_; }
  const std::vector<Bucket>& all() const { return buckets_; }
  const at::Tensor& control() const { return control_; }            // this rank's
  const at::Tensor& control_mean() const { return control_mean_; }  // of all, where it is reduced

 private:
  struct Key {
    at::ScalarType type;
    at::Device device;
    int group;
  };
  struct LessKey {
    bool operator()(const Key& a, const Key& b) const;
  };
  static Key key_of(const BucketPlan& plan, const std::vector<Slot>& slots);

  at::Tensor allocate(std::int64_t num_elements, const Key& key) const;

  void lay_out_places(const std::vector<Slot>& slots, std::int64_t num_control);
  void view_slices(const std::vector<BucketPlan>& plans, std::vector<Slot>& slots) const;

  c10::intrusive_ptr<c10d::Backend> engine_;
  std::optional<World> host_;
  bool reduces_once_ = false;
  int slice_ = 0;
  int num_slices_ = 1;
  std::vector<Bucket> buckets_;
  std::map<Key, at::Tensor, LessKey> arenas_;  // of real numbers
  std::map<Key, at::Tensor, LessKey> places_;  // two of them, for buckets in turn
  at::Tensor control_;
  at::Tensor control_mean_;
};

}  // namespace lockstep
