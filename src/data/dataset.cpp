#include <ATen/ATen.h>
#include <lockstep/data.h>
#include <lockstep/error.h>

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
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> targets;
  for (const std::size_t index : indices) {
    Sample sample;
    try {
      sample = get(index);
    } catch (const std::exception& error) {
      const std::string text = error.what();
      refuse(text::format("Sample {} cannot be had: {}\nMend it, or leave it out.", index,
                          text.substr(0, text.find('\n'))));
    }
    data.push_back(std::move(sample.data));
    targets.push_back(std::move(sample.target));
    check_like_first(data.back(), data.front(), index, indices.front(), "data");
    check_like_first(targets.back(), targets.front(), index, indices.front(), "target");
  }
  return {at::stack(data), at::stack(targets), indices};
}

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
