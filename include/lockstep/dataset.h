// Data sets: samples that are reached by their index, and what is random in them.
//
// Threading: get() and get_batch() are called from several threads at once.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <lockstep/export.h>

#include <cstdint>
#include <string>
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

// The epoch that a sample is drawn in. What is random in a sample takes its numbers from here: they
// differ between samples and between epochs, and depend on nothing else. So augmentation is the
// same whatever the number of threads and ranks, and goes on exactly after a resume.
struct LOCKSTEP_API Epoch {
  std::int64_t number = 0;
  std::uint64_t seed = 0;  // the sampler's

  std::uint64_t seed_of(std::size_t index) const;
  // For LibTorch's random functions: at::rand({2}, epoch.generator(index)).
  at::Generator generator(std::size_t index) const;
};

// Which samples a batch is made of.
struct BatchInfo {
  std::vector<std::size_t> indices = {};  // of a record: its shard << 40 | its place in the shard
  Epoch epoch = {};
};

class LOCKSTEP_API Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::size_t size() const = 0;
  // The same sample whenever it is asked for; AugmentedDataset is for those that change.
  virtual Sample get(std::size_t index) const = 0;
  // Throws: UsageError that names the sample which cannot be had, or has another shape or type than
  // the first of the batch.
  virtual Batch get_batch(const std::vector<std::size_t>& indices) const;
  // What a Loader calls: get_batch(info.indices), unless samples depend on the epoch.
  virtual Batch load(const BatchInfo& info) const { return get_batch(info.indices); }
};

// A data set whose samples differ between epochs:
//
//   lockstep::Sample get(std::size_t index, const lockstep::Epoch& epoch) const override {
//     const at::Tensor image = images[index];
//     const bool is_flipped = at::rand({}, epoch.generator(index)).item<float>() < 0.5;
//     return {is_flipped ? image.flip(-1) : image, labels[index]};
//   }
class LOCKSTEP_API AugmentedDataset : public Dataset {
 public:
  virtual Sample get(std::size_t index, const Epoch& epoch) const = 0;
  Sample get(std::size_t index) const override { return get(index, Epoch()); }
  Batch load(const BatchInfo& info) const override;
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

// Sequences of different lengths in one tensor.
struct Padded {
  at::Tensor data;     // n x longest x ...
  at::Tensor lengths;  // n, int64
  at::Tensor mask;     // n x longest, true where there is data
};

// Stacks tensors that differ in their first dimension, filled up with `value`. Throws: UsageError
// if they differ in anything else, or there are none.
LOCKSTEP_API Padded pad(const std::vector<at::Tensor>& sequences, double value = 0);

}  // namespace lockstep
