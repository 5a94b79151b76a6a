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

// Puts the next subtree on a stack, and adds up what is complete. An undefined one is zeros: what
// is added to zeros is the same number, but for a -0.
void push(std::vector<at::Tensor>& stack, at::Tensor next, int merges) {
  for (; merges > 0; --merges) {
    at::Tensor left = std::move(stack.back());
    stack.pop_back();
    if (left.defined() && next.defined()) {
      next = left.add_(next);
    } else if (left.defined() || next.defined()) {
      next = (left.defined() ? left : next).add_(0);
    }
  }
  stack.push_back(std::move(next));
}

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
  const bool is_sum = are_on() && mean_->is_all_reduce() && num_turns() > 1;
  return is_sum ? mean_->num_leaves() : 1;
}

void Turns::begin(int micro, std::uint64_t seed, std::int64_t step,
                  const std::vector<NamedTensor>& buffers) {
  has_begun_ = true;
  const std::array<std::uint64_t, 4> place = {
      seed, static_cast<std::uint64_t>(step),
      static_cast<std::uint64_t>(mean_->held().first + turn_), static_cast<std::uint64_t>(micro)};
  at::manual_seed(hash_bytes(place.data(), sizeof place));
  if (micro > 0) return;
  if (first_buffers_.empty()) {
    first_buffers_ = copies_of(buffers);
  } else {
    write(buffers, first_buffers_);
  }
}

void Turns::restore_buffers(const std::vector<NamedTensor>& buffers) const {
  write(buffers, first_buffers_);
}

void Turns::add(std::size_t slot, at::Tensor gradient) {
  parts_.resize(std::max(parts_.size(), slot + 1));
  present_.resize(parts_.size());
  if (gradient.defined()) present_[slot] = true;
  push(parts_[slot], std::move(gradient), merges_[static_cast<std::size_t>(turn_)]);
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
  buffer_parts_.resize(buffers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (!is_averaged(buffers[i].tensor)) continue;
    push(buffer_parts_[i], numbers_of(buffers[i].tensor), merges_[static_cast<std::size_t>(turn_)]);
  }
}

// As real numbers in one run of memory, in f32 at least: sums are rounded once.
at::Tensor Turns::numbers_of(const at::Tensor& buffer) {
  const at::Tensor flat = buffer.detach().reshape(-1);
  const at::Tensor real = flat.is_complex() ? at::view_as_real(flat).reshape(-1) : flat;
  return real.to(at::toOpMathType(real.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
}

bool Turns::is_averaged(const at::Tensor& buffer) {
  return buffer.is_floating_point() || buffer.is_complex();
}

void Turns::fold(std::size_t slot, std::int64_t first, const at::Tensor& place) {
  if (num_turns() == 1) return;
  const auto& parts = parts_[slot];
  const int merges = merges_.back();
  for (int i = 1; i <= merges; ++i) {
    const at::Tensor& left = parts[parts.size() - static_cast<std::size_t>(i)];
    if (left.defined()) {
      place.add_(left.narrow(0, first, place.numel()));
    } else {
      place.add_(0);
    }
  }
}

void Turns::copy_root(std::size_t slot, std::size_t index, std::int64_t first,
                      const at::Tensor& place) const {
  const at::Tensor& root = parts_[slot][index];
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
    const at::Tensor mean = at::empty_like(buffer_parts_[i].front());
    mean_->run(buffer_parts_[i], mean);
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
  first_buffers_.clear();
  parts_.clear();
  present_.clear();
  weights_.clear();
  has_data_.clear();
  kept_buffers_.clear();
  buffer_parts_.clear();
}

}  // namespace lockstep
