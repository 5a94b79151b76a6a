#include "engine/leaf_mean.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "collective/reduce.h"
#include "engine/by_device.h"
#include "engine/tensor_engine.h"

namespace lockstep {
namespace {

bool sums_in_tree(c10d::Backend& engine) {
  if (engine.getSize() == 1) return true;
  if (const auto* both = dynamic_cast<const ByDevice*>(&engine)) {
    return sums_in_tree(*both->for_main_memory());
  }
  const auto* ours = dynamic_cast<const TensorEngine*>(&engine);
  return ours != nullptr && ours->sums_in_tree();
}

}  // namespace

LeafMean::LeafMean(c10::intrusive_ptr<c10d::Backend> engine, int num_leaves)
    : engine_(std::move(engine)),
      num_leaves_(num_leaves),
      rank_(engine_->getRank()),
      held_(collective::leaves_of(rank_, engine_->getSize(), num_leaves)) {
  for (int rank = 0; rank < engine_->getSize(); ++rank) {
    num_roots_.push_back(
        collective::roots_of(collective::leaves_of(rank, engine_->getSize(), num_leaves)).size());
  }
  const auto roots = collective::all_roots(engine_->getSize(), num_leaves);
  merges_ = collective::merges_of(roots);
  is_all_reduce_ = static_cast<int>(roots.size()) == engine_->getSize() && sums_in_tree(*engine_) &&
                   std::ranges::all_of(roots, [&](const collective::Subtree& one) {
                     return one.size == roots.front().size;
                   });
}

void LeafMean::run(const std::vector<at::Tensor>& roots, const at::Tensor& output) const {
  const std::int64_t num_ranks = engine_->getSize();
  const std::int64_t count = output.numel();
  if (count == 0) return;
  const std::int64_t slice = (count + num_ranks - 1) / num_ranks;
  // What goes to a rank: its slice of each root, filled up where the last one ends too soon.
  const auto mine = static_cast<std::int64_t>(roots.size());
  const at::Tensor given = at::zeros({num_ranks, mine, slice}, output.options());
  for (std::int64_t i = 0; i < mine; ++i) {
    for (std::int64_t rank = 0; rank < num_ranks && rank * slice < count; ++rank) {
      const std::int64_t length = std::min(slice, count - rank * slice);
      given[rank][i]
          .narrow(0, 0, length)
          .copy_(roots[static_cast<std::size_t>(i)].narrow(0, rank * slice, length));
    }
  }
  const auto all = static_cast<std::int64_t>(merges_.size());
  at::Tensor taken = given.view({mine * num_ranks * slice});
  if (num_ranks > 1) {
    taken = at::empty({all * slice}, output.options());
    at::Tensor input = given.view({-1});
    std::vector<std::int64_t> to(static_cast<std::size_t>(num_ranks), mine * slice);
    std::vector<std::int64_t> from;
    for (const std::size_t one : num_roots_) from.push_back(static_cast<std::int64_t>(one) * slice);
    engine_->alltoall_base(taken, input, from, to, {})->wait();
  }
  std::vector<const void*> inputs;
  for (std::int64_t i = 0; i < all; ++i)
    inputs.push_back(taken.narrow(0, i * slice, slice).const_data_ptr());
  at::Tensor mean = at::empty({slice}, output.options());
  void* const outputs[] = {mean.mutable_data_ptr()};
  collective::reduce({.type = operation_of(collective::Kind::kAllReduce, mean).type,
                      .reduction = collective::Reduction::kAverage,
                      .num_inputs = static_cast<int>(all),
                      .inputs = inputs.data(),
                      .num_outputs = 1,
                      .outputs = outputs,
                      .count = static_cast<std::size_t>(slice),
                      .average_over = num_leaves_,
                      .merges = merges_.data()},
                     collective::best_simd());
  at::Tensor means = mean;
  if (num_ranks > 1) {
    means = at::empty({num_ranks * slice}, output.options());
    engine_->_allgather_base(means, mean, {})->wait();
  }
  output.copy_(means.narrow(0, 0, count));
}

}  // namespace lockstep
