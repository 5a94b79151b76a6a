// What a loader makes of the types of a data set, its samples and its batches.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/dataset.h>
#include <lockstep/export.h>
#include <lockstep/records.h>

#include <any>
#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::detail {

using TensorVisitor = std::function<void(at::Tensor&)>;
using ShardName = std::function<std::string(std::size_t shard)>;

// Of a record: its shard stands above so many bits of its index, its place in the shard below.
inline constexpr int kPlaceBits = 40;

// What a worker makes a batch of.
struct Draw {
  BatchInfo info;
  std::vector<std::any> records = {};  // of an IterableDataset only
};

// A data set and its collate function, without their types. A batch is a shared_ptr<B>.
struct LoaderSource {
  std::optional<std::size_t> size = std::nullopt;  // nothing: an IterableDataset, or no data set
  std::function<std::shared_ptr<void>(Draw draw)> make = {};
  std::function<void(void* batch, const TensorVisitor& visit)> each_tensor = {};
  // Of an IterableDataset:
  std::size_t num_shards = 0;
  ShardName shard_name = {};
  std::function<std::function<std::any()>(std::size_t shard)> open = {};
};

[[noreturn]] LOCKSTEP_API void throw_bad_sample(std::size_t index, const std::exception& error);
// `shard_name` if the samples are records.
[[noreturn]] LOCKSTEP_API void throw_bad_batch(const BatchInfo& info, const std::exception& error,
                                               const ShardName& shard_name = {});
// Inside a catch clause: an Error of lockstep goes on as it is.
[[noreturn]] LOCKSTEP_API void throw_bad_load(const BatchInfo& info, const std::exception& error);
LOCKSTEP_API Batch stack_samples(std::vector<Sample> samples, const BatchInfo& info);

template <typename Data>
concept HasEpochs = requires(const Data& data, std::size_t index, const Epoch& epoch) {
  data.get(index, epoch);
};

template <typename Data>
concept HasSamples = HasEpochs<Data> || requires(const Data& data, std::size_t index) {
  data.get(index);
};

// A sample by its index, of a data set that knows of epochs or does not.
template <HasSamples Data>
auto get_sample(const Data& data, std::size_t index, const Epoch& epoch) {
  if constexpr (HasEpochs<Data>) {
    return data.get(index, epoch);
  } else {
    if constexpr (std::is_base_of_v<Dataset, Data>) {
      const auto* const augmented = dynamic_cast<const AugmentedDataset*>(&data);
      if (augmented != nullptr) return augmented->get(index, epoch);
    }
    return data.get(index);
  }
}
template <typename Data>
using SampleOf = decltype(get_sample(std::declval<const Data&>(), 0, Epoch()));

template <typename Data>
std::vector<SampleOf<Data>> get_samples(const Data& data, const BatchInfo& info) {
  std::vector<SampleOf<Data>> samples;
  samples.reserve(info.indices.size());
  for (const std::size_t index : info.indices) {
    try {
      samples.push_back(get_sample(data, index, info.epoch));
    } catch (const std::exception& error) {
      throw_bad_sample(index, error);
    }
  }
  return samples;
}

// collate(samples, info), or collate(samples).
template <typename B, typename Collate, typename S>
inline constexpr bool takes_info =
    std::is_invocable_r_v<B, const Collate&, std::vector<S>, const BatchInfo&>;
template <typename B, typename Collate, typename S>
inline constexpr bool takes_samples = std::is_invocable_r_v<B, const Collate&, std::vector<S>>;
template <typename Collate, typename B, typename S>
concept Collates = takes_info<B, Collate, S> || takes_samples<B, Collate, S>;

// A data set of any type that makes batches itself.
template <typename Data, typename B>
concept Loads =
    !std::is_base_of_v<Dataset, Data> && requires(const Data& data, const BatchInfo& info) {
  { data.load(info) } -> std::convertible_to<B>;
};

template <typename B, typename Collate, typename S>
B collate_samples(const Collate& collate, std::vector<S> samples, const BatchInfo& info,
                  const ShardName& shard_name = {}) {
  try {
    if constexpr (takes_info<B, Collate, S>) {
      return collate(std::move(samples), info);
    } else {
      return collate(std::move(samples));
    }
  } catch (const std::exception& error) {
    throw_bad_batch(info, error, shard_name);
  }
}

template <typename B, typename Data>
B load_batch(const Data& data, const BatchInfo& info) {
  try {
    return data.load(info);
  } catch (const std::exception& error) {
    throw_bad_load(info, error);
  }
}

// The tensors of a batch: a member each_tensor(visit), or the batch is made of nothing else.
template <typename B>
std::function<void(void*, const TensorVisitor&)> tensors_of() {
  if constexpr (std::is_same_v<B, Batch>) {
    return [](void* batch, const TensorVisitor& visit) {
      visit(static_cast<Batch*>(batch)->data);
      visit(static_cast<Batch*>(batch)->target);
    };
  } else if constexpr (std::is_same_v<B, at::Tensor>) {
    return [](void* batch, const TensorVisitor& visit) { visit(*static_cast<at::Tensor*>(batch)); };
  } else if constexpr (std::is_same_v<B, std::vector<at::Tensor>>) {
    return [](void* batch, const TensorVisitor& visit) {
      for (at::Tensor& one : *static_cast<std::vector<at::Tensor>*>(batch)) visit(one);
    };
  } else if constexpr (requires(B & batch, const TensorVisitor& visit) {
                         batch.each_tensor(visit);
                       }) {
    return
        [](void* batch, const TensorVisitor& visit) { static_cast<B*>(batch)->each_tensor(visit); };
  } else {
    return {};
  }
}

template <typename B, typename Data>
LoaderSource loading_source(const std::shared_ptr<Data>& data) {
  if (!data) return {};
  return {.size = data->size(),
          .make =
              [data](Draw draw) {
                auto batch = std::make_shared<B>(load_batch<B>(*data, draw.info));
                if constexpr (std::is_same_v<B, Batch>) {
                  batch->indices = std::move(draw.info.indices);
                }
                return batch;
              },
          .each_tensor = tensors_of<B>()};
}

template <typename B, typename Data, typename Collate>
LoaderSource sample_source(const std::shared_ptr<Data>& data, Collate collate) {
  if (!data) return {};
  return {.size = data->size(),
          .make =
              [data, collate = std::move(collate)](Draw draw) {
                auto batch = std::make_shared<B>(
                    collate_samples<B>(collate, get_samples(*data, draw.info), draw.info));
                if constexpr (std::is_same_v<B, Batch>) {
                  batch->indices = std::move(draw.info.indices);
                }
                return batch;
              },
          .each_tensor = tensors_of<B>()};
}

template <typename B, typename Data, typename Collate>
LoaderSource record_source(const std::shared_ptr<Data>& data, Collate collate) {
  using Record = typename Data::RecordType;
  if (!data) return {};
  const ShardName shard_name = [data](std::size_t shard) { return data->shard_name(shard); };
  return {.make =
              [collate = std::move(collate), shard_name](Draw draw) {
                std::vector<Record> records;
                records.reserve(draw.records.size());
                for (std::any& one : draw.records) {
                  records.push_back(std::move(*std::any_cast<Record>(&one)));
                }
                return std::make_shared<B>(
                    collate_samples<B>(collate, std::move(records), draw.info, shard_name));
              },
          .each_tensor = tensors_of<B>(),
          .num_shards = data->num_shards(),
          .shard_name = shard_name,
          .open = [data](std::size_t shard) -> std::function<std::any()> {
            return [read = data->open(shard)]() mutable {
              auto record = read();
              return record ? std::any(std::move(*record)) : std::any();
            };
          }};
}

}  // namespace lockstep::detail
