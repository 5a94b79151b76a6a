#include <ATen/ATen.h>
#include <lockstep/dataset.h>
#include <lockstep/error.h>
#include <lockstep/loader_source.h>

#include <algorithm>

#include "base/text.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw UsageError({.operation = "data"}, message);
}

void check_like_first(const at::Tensor& one, const at::Tensor& first, std::size_t index,
                      std::size_t first_index, const char* what) {
  if (one.defined() && one.sizes() == first.sizes() && one.scalar_type() == first.scalar_type()) {
    return;
  }
  const auto text = [](const at::Tensor& tensor) {
    return tensor.defined() ? text::format("{} {}", c10::toString(tensor.scalar_type()),
                                           c10::str(tensor.sizes()))
                            : std::string("nothing");
  };
  refuse(
      text::format("The {} of sample {} is {}, that of sample {} in the same batch {}.\nMake all "
                   "samples alike, or override get_batch().",
                   what, index, text(one), first_index, text(first)));
}

}  // namespace

Batch Dataset::get_batch(const std::vector<std::size_t>& indices) const {
  struct Plain {
    const Dataset& data;
    Sample get(std::size_t index) const { return data.get(index); }
  };
  const BatchInfo info{.indices = indices};
  return detail::stack_samples(detail::get_samples(Plain{*this}, info), info);
}

Batch AugmentedDataset::load(const BatchInfo& info) const {
  return detail::stack_samples(detail::get_samples(*this, info), info);
}

namespace detail {

Batch stack_samples(std::vector<Sample> samples, const BatchInfo& info) {
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> targets;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    data.push_back(std::move(samples[i].data));
    targets.push_back(std::move(samples[i].target));
    const std::size_t index = info.indices[i];
    check_like_first(data.back(), data.front(), index, info.indices.front(), "data");
    check_like_first(targets.back(), targets.front(), index, info.indices.front(), "target");
  }
  return {at::stack(data), at::stack(targets), info.indices};
}

}  // namespace detail

TensorDataset::TensorDataset(at::Tensor data, at::Tensor targets)
    : data_(std::move(data)), targets_(std::move(targets)) {
  if (data_.dim() == 0 || targets_.dim() == 0 || data_.size(0) != targets_.size(0)) {
    refuse(
        text::format("The data are {}, the targets {}.\nGive as many rows of one as of the other.",
                     c10::str(data_.sizes()), c10::str(targets_.sizes())));
  }
}

Sample TensorDataset::get(std::size_t index) const {
  const auto row = static_cast<std::int64_t>(index);
  return {data_[row], targets_[row]};
}

Batch TensorDataset::get_batch(const std::vector<std::size_t>& indices) const {
  for (const std::size_t index : indices) {
    if (index >= size()) {
      refuse(
          text::format("Sample {} was asked for, and there are {}.\nGive the sampler the data "
                       "set's size.",
                       index, size()));
    }
  }
  const std::vector<std::int64_t> rows(indices.begin(), indices.end());
  const at::Tensor which = at::tensor(rows, at::TensorOptions(at::kLong));
  return {data_.index_select(0, which), targets_.index_select(0, which), indices};
}

namespace {

at::Tensor images_of(const std::string& folder, const std::string& part) {
  // Mean and deviation of the training images' pixels.
  return read_idx(text::format("{}/{}-images-idx3-ubyte.gz", folder, part))
      .unsqueeze(1)
      .to(at::kFloat)
      .div_(255)
      .sub_(0.2860)
      .div_(0.3530);
}

}  // namespace

FashionMnist::FashionMnist(bool is_training, const std::string& folder)
    : TensorDataset(images_of(folder, is_training ? "train" : "t10k"),
                    read_idx(text::format("{}/{}-labels-idx1-ubyte.gz", folder,
                                          is_training ? "train" : "t10k"))
                        .to(at::kLong)) {}

}  // namespace lockstep
