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
  const auto* ours = dynamic_cast<const TensorEngine*>(&for_main_memory(engine));
  return ours != nullptr && ours->sums_in_tree();
}

// In one pass, as `merges` says (collective/leaves.h).
void add_subtrees(const std::vector<const void*>& inputs, const std::vector<std::uint8_t>& merges,
                  collective::Reduction reduction, int average_over, const at::Tensor& output) {
  void* const outputs[] = {output.mutable_data_ptr()};
  collective::reduce({.type = operation_of(collective::Kind::kAllReduce, output).type,
                      .reduction = reduction,
                      .num_inputs = static_cast<int>(inputs.size()),
                      .inputs = inputs.data(),
                      .num_outputs = 1,
                      .outputs = outputs,
                      .count = static_cast<std::size_t>(output.numel()),
                      .average_over = average_over,
                      .merges = merges.data()},
                     collective::best_simd());
}

}  // namespace

void add_from_right(std::span<const at::Tensor> parts, const at::Tensor& last,
                    const at::Tensor& output) {
  std::vector<const void*> inputs;
  for (const at::Tensor& part : parts) inputs.push_back(part.const_data_ptr());
  inputs.push_back(last.const_data_ptr());
  std::vector<std::uint8_t> merges(inputs.size());
  merges.back() = static_cast<std::uint8_t>(parts.size());
  add_subtrees(inputs, merges, collective::Reduction::kSum, 0, output);
}

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

c10::intrusive_ptr<c10d::Work> LeafMean::start_all_reduce(const at::Tensor& root) const {
  auto& ours = dynamic_cast<TensorEngine&>(for_main_memory(*engine_));
  return ours.all_reduce_mean(root, num_leaves_);
}

LeafMean::Exchange::Exchange(const LeafMean& mean, const std::vector<at::Tensor>& roots,
                             at::Tensor output)
    : mean_(mean),
      output_(std::move(output)),
      slice_((output_.numel() + mean.engine_->getSize() - 1) / mean.engine_->getSize()) {
  const std::int64_t count = output_.numel();
  if (count == 0) return;
  const std::int64_t num_ranks = mean.engine_->getSize();
  // The last slice is filled up where it ends too soon.
  const auto mine = static_cast<std::int64_t>(roots.size());
  given_ = at::zeros({num_ranks, mine, slice_}, output_.options());
  for (std::int64_t i = 0; i < mine; ++i) {
    for (std::int64_t rank = 0; rank < num_ranks && rank * slice_ < count; ++rank) {
      const std::int64_t length = std::min(slice_, count - rank * slice_);
      given_[rank][i]
          .narrow(0, 0, length)
          .copy_(roots[static_cast<std::size_t>(i)].narrow(0, rank * slice_, length));
    }
  }
  given_ = given_.view({-1});
  if (num_ranks == 1) {
    taken_ = given_;
    return;
  }
  const auto all = static_cast<std::int64_t>(mean.merges_.size());
  taken_ = at::empty({all * slice_}, output_.options());
  std::vector<std::int64_t> to(static_cast<std::size_t>(num_ranks), mine * slice_);
  std::vector<std::int64_t> from;
  for (const std::size_t one : mean.num_roots_) {
    from.push_back(static_cast<std::int64_t>(one) * slice_);
  }
  auto* const ours = dynamic_cast<TensorEngine*>(&for_main_memory(*mean.engine_));
  first_half_ = ours != nullptr
                    ? ours->all_to_all_known(taken_, given_, from, to, std::ranges::max(from))
                    : mean.engine_->alltoall_base(taken_, given_, from, to, {});
}

// An engine may still be using the memory.
LeafMean::Exchange::~Exchange() {
  for (const WorkPtr& work : {first_half_, second_half_}) {
    try {
      if (work && !work->isCompleted()) work->wait();
    } catch (const std::exception&) {  // NOLINT: who waits for the result is told
    }
  }
}

void LeafMean::Exchange::start_second_half() {
  if (is_summed_ || output_.numel() == 0) return;
  if (first_half_) first_half_->wait();
  is_summed_ = true;
  given_ = at::Tensor();
  std::vector<const void*> inputs;
  for (std::size_t i = 0; i < mean_.merges_.size(); ++i) {
    inputs.push_back(
        taken_.narrow(0, static_cast<std::int64_t>(i) * slice_, slice_).const_data_ptr());
  }
  at::Tensor mean = at::empty({slice_}, output_.options());
  add_subtrees(inputs, mean_.merges_, collective::Reduction::kAverage, mean_.num_leaves_, mean);
  taken_ = mean;
  means_ = mean;
  if (mean_.engine_->getSize() == 1) return;
  means_ = at::empty({mean_.engine_->getSize() * slice_}, output_.options());
  second_half_ = mean_.engine_->_allgather_base(means_, taken_, {});
}

void LeafMean::Exchange::finish() {
  start_second_half();
  if (output_.numel() == 0) return;
  if (second_half_) second_half_->wait();
  output_.copy_(means_.narrow(0, 0, output_.numel()));
}

}  // namespace lockstep
