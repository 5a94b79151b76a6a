// data: data sets, and a loader that prepares batches ahead.
//
// Threading: a data set's get() and get_batch() are called from several threads at once. A loader
// belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>
#include <lockstep/sampler.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct Sample {
  at::Tensor data;
  at::Tensor target;
};

struct Batch {
  at::Tensor data;    // the samples', stacked along a new first dimension
  at::Tensor target;  // likewise
  std::vector<std::size_t> indices = {};
};

class LOCKSTEP_API Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::size_t size() const = 0;
  // The same sample whenever it is asked for: what is random in it must follow from its index.
  virtual Sample get(std::size_t index) const = 0;
  // Throws: UsageError that names the sample which cannot be had, or has another shape or type than
  // the first of the batch.
  virtual Batch get_batch(const std::vector<std::size_t>& indices) const;
};

// Samples are the rows of two tensors. Throws: UsageError if they have different numbers of rows.
class LOCKSTEP_API TensorDataset : public Dataset {
 public:
  TensorDataset(at::Tensor data, at::Tensor targets);
  std::size_t size() const override { return static_cast<std::size_t>(data_.size(0)); }
  Sample get(std::size_t index) const override;
  Batch get_batch(const std::vector<std::size_t>& indices) const override;

  const at::Tensor& data() const { return data_; }
  const at::Tensor& targets() const { return targets_; }

 private:
  at::Tensor data_;
  at::Tensor targets_;
};

// Zalando's images of clothes, 28 x 28 in 10 classes, normalised: 60000 to train with, 10000 to
// test. `folder` has the four files as they are published; Debian's package dataset-fashion-mnist
// puts them into the default.
class LOCKSTEP_API FashionMnist : public TensorDataset {
 public:
  explicit FashionMnist(bool is_training,
                        const std::string& folder = "/usr/share/datasets/fashion-mnist");
};

// A text as a sequence of characters (bytes). A sample is `length` of them, its target the same one
// further; samples follow each other without overlap. The file is mapped, not read.
class LOCKSTEP_API TextFile : public Dataset {
 public:
  // Throws: SystemError if the file cannot be read, UsageError if it is shorter than one sample.
  TextFile(const std::string& path, std::size_t length);
  std::size_t size() const override { return (num_bytes_ - 1) / length_; }
  Sample get(std::size_t index) const override;

  // The characters that occur, in their order; tokens are places in it.
  const std::string& vocabulary() const { return vocabulary_; }
  std::string decode(const at::Tensor& tokens) const;

 private:
  at::Tensor bytes_;
  std::size_t num_bytes_;
  std::size_t length_;
  std::string vocabulary_;
  at::Tensor token_of_;  // by byte
};

// An array in the IDX format, compressed by gzip or not.
// Throws: SystemError if the file cannot be read, UsageError if it is not what it says.
LOCKSTEP_API at::Tensor read_idx(const std::string& path);

// A tensor whose memory is a file's, from `offset` on; what is not used is not read. Writing to it
// does not change the file. Throws: SystemError, UsageError if the file is too short.
LOCKSTEP_API at::Tensor map_tensor(const std::string& path, at::ScalarType type,
                                   const std::vector<std::int64_t>& sizes, std::size_t offset = 0);

struct LoaderOptions {
  std::size_t batch_size = 64;  // on this rank
  int threads = 1;              // that prepare batches; 0: each is prepared when it is asked for
  int ahead = 4;                // batches that may be ready before they are asked for
};

// The batches of one epoch after the other, in the sampler's order, whatever the number of threads:
//
//   lockstep::Loader loader(dataset, lockstep::DistributedSampler(dataset->size(), world));
//   for (int epoch = 0; epoch < 3; ++epoch) {
//     for (const lockstep::Batch& batch : loader) { ... }
//   }
//
// What get() throws arrives where the batch would have.
class LOCKSTEP_API Loader {
 public:
  // Throws: UsageError if the data set has another size than the sampler's, the batch size is 0, or
  // larger than what the rank has in an epoch.
  Loader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
         const LoaderOptions& options = {});
  Loader(std::shared_ptr<const Dataset> dataset, EvalSampler sampler,
         const LoaderOptions& options = {});
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  // Begins the next epoch (see DistributedSampler::reset).
  class iterator;
  struct sentinel {};
  iterator begin();
  sentinel end() { return {}; }

  // The next batch of the epoch; nothing at its end.
  std::optional<Batch> next();

  // For a checkpoint: after the batches that were handed out, not those that are prepared.
  SamplerState state() const;
  void load_state(const SamplerState& state);
  // Time that next() has waited for batches in this epoch.
  double waiting_ms() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class Loader::iterator {
 public:
  explicit iterator(Loader* loader) : loader_(loader), batch_(loader->next()) {}
  const Batch& operator*() const { return *batch_; }
  const Batch* operator->() const { return &*batch_; }
  iterator& operator++() {
    batch_ = loader_->next();
    return *this;
  }
  bool operator!=(const sentinel&) const { return batch_.has_value(); }

 private:
  Loader* loader_;
  std::optional<Batch> batch_;
};

}  // namespace lockstep
