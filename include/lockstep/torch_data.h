// torch_data: LibTorch's own data sets in lockstep's Loader.
//
//   auto data = lockstep::from_torch(torch::data::datasets::MNIST("mnist"));
//   lockstep::Loader loader(data, lockstep::DistributedSampler(data->size(), world));
//
// Examples of two tensors become a Batch, whether LibTorch's Stack was applied or not; any other
// type stays what it is, and is loaded by a BasicLoader<that type>.
// Threading: LibTorch's data sets are not made for several threads, so that each thread uses a
// copy, as LibTorch's loader does. Random transforms draw from LibTorch's generator, in the order
// in which threads come: what must be the same in each run belongs into an AugmentedDataset.
#pragma once

#include <lockstep/dataset.h>
#include <lockstep/error.h>
#include <lockstep/loader_source.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

template <typename Data>
class TorchDataset {
 public:
  using BatchType = typename Data::BatchType;
  static_assert(std::is_same_v<typename Data::BatchRequestType, c10::ArrayRef<std::size_t>> &&
                    !Data::is_stateful,
                "from_torch: give a data set that is reached by indices. One that is read in order "
                "is an IterableDataset.");
  static constexpr bool is_list = std::is_same_v<BatchType, std::vector<torch::data::Example<>>>;
  static constexpr bool is_plain = is_list || std::is_same_v<BatchType, torch::data::Example<>>;

  explicit TorchDataset(Data data) : size_(data.size().value_or(0)), data_(std::move(data)) {}

  std::size_t size() const { return size_; }

  std::conditional_t<is_plain, Batch, BatchType> load(const BatchInfo& info) const {
    BatchType batch = get_batch(info);
    if constexpr (is_list) {
      std::vector<Sample> samples;
      for (torch::data::Example<>& one : batch) {
        samples.push_back({std::move(one.data), std::move(one.target)});
      }
      return detail::stack_samples(std::move(samples), info);
    } else if constexpr (is_plain) {
      return {std::move(batch.data), std::move(batch.target), info.indices};
    } else {
      return batch;
    }
  }

 private:
  BatchType get_batch(const BatchInfo& info) const try {
    std::unique_ptr<Data> copy = take();
    BatchType batch = copy->get_batch(info.indices);
    give_back(std::move(copy));
    return batch;
  } catch (const std::exception& error) {
    detail::throw_bad_batch(info, error);
  }
  std::unique_ptr<Data> take() const {
    const std::lock_guard lock(mutex_);
    if (copies_.empty()) return std::make_unique<Data>(data_);
    std::unique_ptr<Data> copy = std::move(copies_.back());
    copies_.pop_back();
    return copy;
  }
  // One that threw is not given back: nobody knows what state it is in.
  void give_back(std::unique_ptr<Data> copy) const {
    const std::lock_guard lock(mutex_);
    copies_.push_back(std::move(copy));
  }

  const std::size_t size_;
  const Data data_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Data>> copies_;  // that no thread uses
};

template <typename Data>
std::shared_ptr<const TorchDataset<Data>> from_torch(Data data) {
  return std::make_shared<const TorchDataset<Data>>(std::move(data));
}

}  // namespace lockstep
