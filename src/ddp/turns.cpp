#include "ddp/turns.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/hash.h"
#include "world/packed.h"

namespace lockstep {
namespace {

std::vector<at::Tensor> copies_of(const std::vector<NamedTensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const NamedTensor& one : tensors) copies.push_back(one.tensor.detach().clone());
  return copies;
}

// Unseen by autograd: it is not the program that writes.
void write(const std::vector<NamedTensor>& tensors, const std::vector<at::Tensor>& values) {
  for (std::size_t i = 0; i < tensors.size() && i < values.size(); ++i) {
    tensors[i].tensor.data().copy_(values[i]);
  }
}

}  // namespace

Turns::Turns(const World& world) : num_threads_(at::get_num_threads()) {
  if (!world.has_logical_ranks()) return;
  mean_ = std::make_shared<const LeafMean>(world.backend(), world.logical_size());
  std::vector<collective::Subtree> leaves;
  for (int leaf = mean_->held().first; leaf < mean_->held().end(); ++leaf) {
    leaves.push_back({.first = leaf, .size = 1});
  }
  merges_ = collective::merges_of(leaves);
}

int Turns::divisor() const {
  const bool is_alone = are_on() && mean_->held().count == mean_->num_leaves();
  return is_alone && mean_->is_all_reduce() ? mean_->num_leaves() : 1;
}

void Turns::begin(int micro, std::uint64_t seed, std::int64_t step,
                  const std::vector<NamedTensor>& buffers) {
  has_begun_ = true;
  const std::array<std::uint64_t, 4> place = {
      seed, static_cast<std::uint64_t>(step),
      static_cast<std::uint64_t>(mean_->held().first + turn_), static_cast<std::uint64_t>(micro)};
  at::manual_seed(hash_bytes(place.data(), sizeof place));
  if (micro > 0) return;
  if (is_step_begun_) {
    write(buffers, first_buffers_);
  } else {
    first_buffers_ = copies_of(buffers);
  }
  is_step_begun_ = true;
}

void Turns::restore_buffers(const std::vector<NamedTensor>& buffers, bool of_last_step) const {
  if (is_step_begun_ || of_last_step) write(buffers, first_buffers_);
}

// Memory of subtrees is kept from step to step: given back, it would have to be made resident again
// in each.
void Turns::Stack::push(const at::Tensor& next, int merges) {
  at::Tensor sum = next;  // the caller's, or a part's
  for (; merges > 0; --merges) {
    at::Tensor left = std::move(parts_.back());
    parts_.pop_back();
    if (left.defined() && sum.defined()) {
      left.add_(sum);
    } else if (left.defined() || sum.defined()) {
      // Zeros are not stored: what is added to them is the same number, but for a -0.
      if (!left.defined()) left = sum.is_same(next) ? copy_of(sum) : std::exchange(sum, {});
      left.add_(0);
    }
    if (sum.defined() && !sum.is_same(next)) spare_.push_back(std::move(sum));
    sum = std::move(left);
  }
  parts_.push_back(sum.defined() && sum.is_same(next) ? copy_of(sum) : std::move(sum));
}

void Turns::Stack::clear() {
  for (at::Tensor& part : parts_) {
    if (part.defined()) spare_.push_back(std::move(part));
  }
  parts_.clear();
}

at::Tensor Turns::Stack::copy_of(const at::Tensor& numbers) {
  if (spare_.empty()) return numbers.clone();
  at::Tensor copy = std::move(spare_.back());
  spare_.pop_back();
  return copy.copy_(numbers);
}

void Turns::add(std::size_t slot, const at::Tensor& gradient) {
  stacks_.resize(std::max(stacks_.size(), slot + 1));
  present_.resize(stacks_.size());
  if (gradient.defined()) present_[slot] = true;
  stacks_[slot].push(gradient, merges_[static_cast<std::size_t>(turn_)]);
}

void Turns::add_weight(double weight, bool has_data) {
  weights_.push_back(weight);
  has_data_.push_back(has_data);
  last_weights_.resize(static_cast<std::size_t>(num_turns()), 1);
  if (has_data) last_weights_[weights_.size() - 1] = weight;
}

std::vector<int> Turns::with_data() const {
  std::vector<int> all;
  for (std::size_t turn = 0; turn < has_data_.size(); ++turn) {
    if (has_data_[turn]) all.push_back(mean_->held().first + static_cast<int>(turn));
  }
  return all;
}

double Turns::last_weight() const {
  const auto turn = static_cast<std::size_t>(turn_);
  return turn < last_weights_.size() ? last_weights_[turn] : 1;
}

void Turns::note_buffers(const std::vector<NamedTensor>& buffers, bool are_averaged,
                         bool has_data) {
  if (has_data && kept_buffers_.empty()) kept_buffers_ = copies_of(buffers);
  if (!are_averaged) return;
  buffer_stacks_.resize(buffers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (!is_averaged(buffers[i].tensor)) continue;
    buffer_stacks_[i].push(numbers_of(buffers[i].tensor), merges_[static_cast<std::size_t>(turn_)]);
  }
}

// As real numbers in one run of memory, in f32 at least: sums are rounded once.
at::Tensor Turns::numbers_of(const at::Tensor& buffer) {
  const at::Tensor flat = buffer.detach().reshape(-1);
  const at::Tensor real = flat.is_complex() ? at::view_as_real(flat).reshape(-1) : flat;
  return real.to(at::toOpMathType(real.scalar_type()));
}

bool Turns::is_averaged(const at::Tensor& buffer) {
  return buffer.is_floating_point() || buffer.is_complex();
}

void Turns::fold(std::size_t slot, std::int64_t first, const at::Tensor& gradient,
                 const at::Tensor& place) const {
  const std::int64_t count = place.numel();
  if (count == 0) return;
  std::vector<at::Tensor> parts;
  bool are_all_there = !place.is_complex();
  if (num_turns() > 1) {
    const auto& all = stacks_[slot].parts();
    for (auto part = all.end() - merges_.back(); part != all.end(); ++part) {
      are_all_there &= part->defined();
      parts.push_back(part->defined() ? part->narrow(0, first, count) : *part);
    }
  }
  if (parts.empty() && gradient.is_same(place)) return;
  if (are_all_there) return add_from_right(parts, gradient, place);
  if (!gradient.is_same(place)) place.copy_(gradient);
  for (; !parts.empty(); parts.pop_back()) {
    parts.back().defined() ? place.add_(parts.back()) : place.add_(0);
  }
}

void Turns::copy_root(std::size_t slot, std::size_t index, std::int64_t first,
                      const at::Tensor& place) const {
  const at::Tensor& root = stacks_[slot].parts()[index];
  if (root.defined()) {
    place.copy_(root.narrow(0, first, place.numel()));
  } else {
    place.zero_();
  }
}

std::vector<double> Turns::weights() const {
  std::vector<double> all(static_cast<std::size_t>(mean_->num_leaves()));
  std::ranges::copy(weights_, all.begin() + mean_->held().first);
  return all;
}

bool Turns::is_weighted() const {
  return std::ranges::any_of(weights_, [](double weight) { return weight != 1; });
}

void Turns::finish_buffers(const World& world, const std::vector<NamedTensor>& buffers,
                           bool are_averaged, int first_with_data) {
  note_buffers(buffers, are_averaged, has_data_.back());
  const int root = mean_->holder_of(first_with_data);
  if (world.rank() == root) write(buffers, kept_buffers_);
  std::vector<at::Tensor> copied;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& buffer = buffers[i].tensor;
    if (!are_averaged || !is_averaged(buffer)) {
      copied.push_back(buffer);
      continue;
    }
    const auto& parts = buffer_stacks_[i].parts();
    const at::Tensor mean = at::empty_like(parts.front());
    mean_->run(parts, mean);
    const at::Tensor whole = buffer.is_complex() ? at::view_as_complex(mean.view({-1, 2})) : mean;
    buffer.data().copy_(whole.view(buffer.sizes()));
  }
  if (world.size() > 1) {
    move_packed(copied, [&](const at::Tensor& packed) { world.broadcast(packed, root); });
  }
}

void Turns::reset() {
  turn_ = 0;
  has_begun_ = false;
  problem_.clear();
  ends_early_ = false;
  is_step_begun_ = false;
  for (Stack& stack : stacks_) stack.clear();
  present_.assign(stacks_.size(), false);
  weights_.clear();
  has_data_.clear();
  kept_buffers_.clear();
  for (Stack& stack : buffer_stacks_) stack.clear();
}

}  // namespace lockstep
