// LeafMean: the mean over logical ranks, the same bits on any engine and whoever plays them.
//
// Each rank has summed what is complete of the tree over its own (collective/leaves.h), and gives
// these roots. Where an engine does not add them up in that tree by itself, ranks exchange slices:
// each gets its slice of every root, sums them in the order of the tree, and gives the result to
// all. That moves as many bytes as an all-reduce, times the number of roots in its first half.
// Threading: as the engine's.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "collective/leaves.h"

namespace lockstep {

// Writes a sum of subtrees in one pass: of `last` and the one before it, of that and the one
// before, and so on. `output` may be `last`. Requires: f32 or f64 in one run of memory, equally
// many.
void add_from_right(std::span<const at::Tensor> parts, const at::Tensor& last,
                    const at::Tensor& output);

class LeafMean {
 public:
  // Requires: as many leaves as the engine has ranks, at least.
  LeafMean(c10::intrusive_ptr<c10d::Backend> engine, int num_leaves);

  int num_leaves() const { return num_leaves_; }
  const collective::Leaves& held() const { return held_; }  // by this rank
  int holder_of(int leaf) const {
    return collective::holder_of(leaf, engine_->getSize(), num_leaves_);
  }
  std::size_t num_roots() const { return num_roots_[static_cast<std::size_t>(rank_)]; }
  std::size_t most_roots() const { return std::ranges::max(num_roots_); }  // of any rank
  // An all-reduce of the engine is the sum over leaves: all ranks have one root of the same size,
  // and the engine adds up ranks in the order of the tree.
  bool is_all_reduce() const { return is_all_reduce_; }
  // The mean by one, of this rank's root. Requires: is_all_reduce(), more than one rank.
  c10::intrusive_ptr<c10d::Work> start_all_reduce(const at::Tensor& root) const;

  // A mean on its way. Its two halves are collectives: all ranks call these in the same order.
  class Exchange {
   public:
    // Requires: `mean` lives as long.
    Exchange(const LeafMean& mean, const std::vector<at::Tensor>& roots, at::Tensor output);
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    bool is_first_half_done() const { return !first_half_ || first_half_->isCompleted(); }
    void start_second_half();  // waits for the first
    void finish();             // waits for the second, of which it may be the start

   private:
    using WorkPtr = c10::intrusive_ptr<c10d::Work>;

    const LeafMean& mean_;
    const at::Tensor output_;
    const std::int64_t slice_;
    at::Tensor given_;  // what goes to each rank: its slice of each root
    at::Tensor taken_;  // what comes: this rank's slice of all roots
    at::Tensor means_;  // of all slices
    WorkPtr first_half_;
    WorkPtr second_half_;
    bool is_summed_ = false;
  };

  // `output` becomes the mean. `roots` are this rank's, from left to right; `output` may be one of
  // them. They are read in here. Requires: contiguous f32 or f64 in main memory, the same type and
  // number of elements on all ranks. Throws what the engine throws.
  std::unique_ptr<Exchange> start(const std::vector<at::Tensor>& roots,
                                  const at::Tensor& output) const {
    return std::make_unique<Exchange>(*this, roots, output);
  }
  // The same; waits.
  void run(const std::vector<at::Tensor>& roots, const at::Tensor& output) const {
    start(roots, output)->finish();
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> engine_;
  const int num_leaves_;
  const int rank_;
  const collective::Leaves held_;
  std::vector<std::size_t> num_roots_;  // by rank
  std::vector<std::uint8_t> merges_;    // by root, of all ranks
  bool is_all_reduce_ = false;
};

}  // namespace lockstep
