// From samples to batches: random numbers of samples, padding, and what goes wrong on the way.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <lockstep/dataset.h>
#include <lockstep/error.h>
#include <lockstep/loader_source.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/text.h"
#include "data/permutation.h"

namespace lockstep {

std::uint64_t Epoch::seed_of(std::size_t index) const {
  const std::uint64_t of_epoch =
      spread_bits(seed + 0x9E3779B97F4A7C15U) ^ spread_bits(~static_cast<std::uint64_t>(number));
  return spread_bits(spread_bits(of_epoch) + index);
}

// LibTorch's generator takes 32 bits of a seed: of a million samples in a few epochs many would
// have the same numbers. So all of its state is filled.
at::Generator Epoch::generator(std::size_t index) const {
  const std::uint64_t its_seed = seed_of(index);
  at::Generator generator = at::detail::createCPUGenerator(its_seed);
  at::mt19937 engine = at::check_generator<at::CPUGeneratorImpl>(generator)->engine();
  at::mt19937_data_pod data = engine.data();
  for (std::size_t i = 0; i < data.state_.size(); ++i) {
    data.state_[i] = static_cast<std::uint32_t>(spread_bits(its_seed + i + 1) >> 32);
  }
  engine.set_data(data);
  at::check_generator<at::CPUGeneratorImpl>(generator)->set_engine(engine);
  return generator;
}

Padded pad(const std::vector<at::Tensor>& sequences, double value) {
  const auto describe = [](const at::Tensor& tensor) {
    return tensor.defined() ? text::format("{} {}", c10::toString(tensor.scalar_type()),
                                           c10::str(tensor.sizes()))
                            : std::string("nothing");
  };
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const at::Tensor& one = sequences[i];
    const at::Tensor& first = sequences.front();
    const bool is_fit = one.defined() && one.dim() > 0 && first.dim() == one.dim() &&
                        one.sizes().slice(1) == first.sizes().slice(1) &&
                        one.scalar_type() == first.scalar_type() && one.device() == first.device();
    if (!is_fit) {
      throw UsageError({.operation = "pad"},
                       text::format("Sequence {} is {}, the first one is {}.\nGive sequences that "
                                    "differ in their first dimension only.",
                                    i, describe(one), describe(first)));
    }
    lengths.push_back(one.size(0));
  }
  if (sequences.empty()) {
    throw UsageError({.operation = "pad"}, "There are no sequences.\nGive at least one.");
  }
  auto sizes = sequences.front().sizes().vec();
  sizes.front() = *std::ranges::max_element(lengths);
  sizes.insert(sizes.begin(), static_cast<std::int64_t>(sequences.size()));
  Padded padded;
  padded.data = at::full(sizes, value, sequences.front().options());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    padded.data[static_cast<std::int64_t>(i)].narrow(0, 0, lengths[i]).copy_(sequences[i]);
  }
  const auto on_device = at::TensorOptions(at::kLong).device(sequences.front().device());
  padded.lengths = at::tensor(lengths, at::TensorOptions(at::kLong)).to(on_device.device());
  padded.mask = at::arange(sizes[1], on_device).unsqueeze(0) < padded.lengths.unsqueeze(1);
  return padded;
}

namespace detail {
namespace {

std::string first_line(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const std::string text = ours != nullptr ? ours->message() : error.what();
  return text.substr(0, text.find('\n'));
}

// "samples 3, 7 in epoch 0", or "records 3, 7 of a.txt, 0 of b.txt in epoch 0"
std::string name_of(const BatchInfo& info, const ShardName& shard_name = {}) {
  constexpr std::size_t kShown = 8;
  const std::size_t count = info.indices.size();
  std::map<std::size_t, std::vector<std::size_t>> shown;  // by shard
  for (std::size_t i = 0; i < std::min(kShown, count); ++i) {
    const std::size_t index = info.indices[i];
    const std::size_t shard = shard_name ? index >> kPlaceBits : 0;
    shown[shard].push_back(index - (shard << kPlaceBits));
  }
  std::vector<std::string> names;
  for (const auto& [shard, places] : shown) {
    names.push_back(text::format("{}{}", text::join(places, ", "),
                                 shard_name ? " of " + shard_name(shard) : std::string()));
  }
  return text::format("{} {}{} in epoch {}", shard_name ? "records" : "samples",
                      text::join(names, ", "),
                      count > kShown ? text::format(" and {} more", count - kShown) : std::string(),
                      info.epoch.number);
}

}  // namespace

void throw_bad_sample(std::size_t index, const std::exception& error) {
  throw UsageError({.operation = "data"},
                   text::format("Sample {} cannot be had: {}\nFix it, or leave it out.", index,
                                first_line(error)));
}

void throw_bad_batch(const BatchInfo& info, const std::exception& error,
                     const ShardName& shard_name) {
  throw UsageError({.operation = "Loader"},
                   text::format("The batch of {} cannot be collated: {}\nFix these {}, or the "
                                "function that collates them.",
                                name_of(info, shard_name), first_line(error),
                                shard_name ? "records" : "samples"));
}

void throw_bad_load(const BatchInfo& info, const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr) throw;  // says itself what is wrong
  throw UsageError({.operation = "Loader"},
                   text::format("The batch of {} cannot be loaded: {}\nFix these samples, or the "
                                "data set that loads them.",
                                name_of(info), first_line(error)));
}

}  // namespace detail
}  // namespace lockstep
