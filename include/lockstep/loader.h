// Loader: batches of tensors, or of a program's own types, prepared ahead by threads.
//
// Batches come in the sampler's order and are the same whatever the number of threads.
// Threading: data sets and collate functions are called from several threads at once. A loader
// belongs to one thread.
#pragma once

#include <c10/core/Device.h>
#include <lockstep/dataset.h>
#include <lockstep/export.h>
#include <lockstep/loader_source.h>
#include <lockstep/records.h>
#include <lockstep/sampler.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

struct LoaderOptions {
  std::size_t batch_size = 64;  // on this rank
  int threads = 1;              // that prepare batches; 0: each is prepared when it is asked for
  int ahead = 4;                // batches that may be ready before they are asked for
  bool drop_last = false;       // leaves out a batch that is smaller than the others
  // Where batches go. If it is not the CPU, threads put them into pinned memory, and next() copies
  // them in the current stream without waiting. What cannot be pinned is waited for.
  std::optional<c10::Device> device = std::nullopt;
};

using IndexSampler = std::variant<DistributedSampler, EvalSampler>;

// What loaders of all types have in common; Checkpointer::add takes it.
class LOCKSTEP_API LoaderBase {
 public:
  ~LoaderBase();
  LoaderBase(LoaderBase&&) noexcept;
  LoaderBase& operator=(LoaderBase&&) noexcept;

  // For a checkpoint: after the batches that were handed out, not those that are prepared.
  // With an EvalSampler there is nothing to resume: the state says nothing but that.
  SamplerState state() const;
  // Throws: UsageError if it is of another kind of loader, or, in the middle of an epoch of
  // records, of other shards, or of another number of ranks with ShardBy::kShard.
  void load_state(const SamplerState& state);
  // As DistributedSampler::move_to(). Throws: UsageError of a loader without such a sampler.
  void move_to(const World& world, const SamplerState& state);
  // Time that next() has waited for batches in this epoch.
  double waiting_ms() const;

 protected:
  LoaderBase(detail::LoaderSource source, IndexSampler sampler, const LoaderOptions& options);
  LoaderBase(detail::LoaderSource source, const StreamSampler& sampler,
             const LoaderOptions& options);
  void begin_epoch();
  std::shared_ptr<void> next_batch();  // empty at the end of the epoch

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The batches of one epoch after the other, of type B:
//
//   struct Sentences { at::Tensor tokens, lengths, mask; std::vector<std::string> texts; };
//   lockstep::BasicLoader<Sentences> loader(
//       corpus, lockstep::DistributedSampler(corpus->size(), world),
//       [](std::vector<Sentence> samples) -> Sentences { ... });
//
// What a data set or a collate function throws arrives where the batch would have, as a UsageError
// that names the samples (a data set's load() may throw an Error of its own); the next batch is the
// one behind it. What reading a shard throws arrives in the same way; next() then tries to read it
// again. Copies to a device need to know the tensors of a B: it is a Batch, a tensor or a
// std::vector of tensors, or has `void each_tensor(const std::function<void(at::Tensor&)>& visit)`.
template <typename B>
class BasicLoader : public LoaderBase {
 public:
  // Throws: UsageError if the data set has another size than the sampler's, the batch size is 0, or
  // larger than what the rank has in an epoch, or there is no such device.
  BasicLoader(std::shared_ptr<const Dataset> dataset, IndexSampler sampler,
              const LoaderOptions& options = {}) requires(std::is_same_v<B, Batch>)
      : LoaderBase(detail::loading_source<B>(dataset), std::move(sampler), options) {}

  // A data set of any type: it has size(), and get(index) or get(index, epoch), which returns a
  // sample of any type. `collate` makes a B of a std::vector of samples, and may take a BatchInfo
  // as second argument.
  template <typename Data, detail::Collates<B, detail::SampleOf<Data>> Collate>
  BasicLoader(const std::shared_ptr<Data>& dataset, IndexSampler sampler, Collate collate,
              const LoaderOptions& options = {})
      : LoaderBase(detail::sample_source<B>(dataset, std::move(collate)), std::move(sampler),
                   options) {}

  // A data set of any type that makes batches itself: it has size() and load(info).
  template <detail::Loads<B> Data>
  BasicLoader(const std::shared_ptr<Data>& dataset, IndexSampler sampler,
              const LoaderOptions& options = {})
      : LoaderBase(detail::loading_source<B>(dataset), std::move(sampler), options) {}

  // Data that is read in order. Throws: UsageError if there are fewer shards than ranks, and each
  // is to be read by one.
  template <typename Data, detail::Collates<B, typename Data::RecordType> Collate>
  BasicLoader(const std::shared_ptr<Data>& records, StreamSampler sampler, Collate collate,
              const LoaderOptions& options = {})
      : LoaderBase(detail::record_source<B>(records, std::move(collate)), sampler, options) {}

  // Begins the next epoch (see DistributedSampler::reset).
  class iterator;
  struct sentinel {};
  iterator begin() {
    begin_epoch();
    return iterator(this);
  }
  sentinel end() { return {}; }

  // The next batch of the epoch; nothing at its end.
  std::optional<B> next() {
    const std::shared_ptr<void> batch = next_batch();
    if (!batch) return std::nullopt;
    return std::move(*static_cast<B*>(batch.get()));
  }
};

template <typename B>
class BasicLoader<B>::iterator {
 public:
  explicit iterator(BasicLoader* loader) : loader_(loader), batch_(loader->next()) {}
  const B& operator*() const { return *batch_; }
  const B* operator->() const { return &*batch_; }
  iterator& operator++() {
    batch_ = loader_->next();
    return *this;
  }
  bool operator!=(const sentinel&) const { return batch_.has_value(); }

 private:
  BasicLoader* loader_;
  std::optional<B> batch_;
};

// Batches of tensors:
//
//   lockstep::Loader loader(dataset, lockstep::DistributedSampler(dataset->size(), world));
//   for (int epoch = 0; epoch < 3; ++epoch) {
//     for (const lockstep::Batch& batch : loader) { ... }
//   }
using Loader = BasicLoader<Batch>;

}  // namespace lockstep
