#include "data/orders.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "data/permutation.h"

namespace lockstep {

std::vector<std::int64_t> order_as_python(std::int64_t num_samples, std::uint64_t seed) {
  const at::Tensor order =
      at::randperm(num_samples, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
  const auto* const first = order.const_data_ptr<std::int64_t>();
  return {first, first + num_samples};
}

std::vector<std::int64_t> order_by_length(const std::vector<std::int64_t>& lengths,
                                          std::size_t bucket_size, std::uint64_t seed,
                                          std::uint64_t epoch) {
  // Large enough to have samples of all lengths, small enough to differ between epochs.
  constexpr std::size_t kBucketsInPart = 64;
  const std::size_t size = lengths.size();
  const Permutation shuffled(size, seed, epoch);
  std::vector<std::int64_t> drawn(size);
  for (std::size_t i = 0; i < size; ++i) drawn[i] = static_cast<std::int64_t>(shuffled(i));
  const auto length_of = [&](std::int64_t index) {
    return lengths[static_cast<std::size_t>(index)];
  };
  std::vector<std::int64_t> order;
  order.reserve(size);
  const std::size_t part_size =
      bucket_size > size / kBucketsInPart ? size : bucket_size * kBucketsInPart;
  for (std::size_t part = 0; part < size; part += part_size) {
    const auto first = drawn.begin() + static_cast<std::ptrdiff_t>(part);
    const std::size_t count = std::min(part_size, size - part);
    // Stable: among equal lengths the shuffled order stays.
    std::ranges::stable_sort(first, first + static_cast<std::ptrdiff_t>(count), {}, length_of);
    // A bucket that is not full stays at its part's end: otherwise the batches behind it would
    // reach into two buckets.
    const std::size_t full = count / bucket_size;
    const auto append = [&](std::size_t begin, std::size_t end) {
      order.insert(order.end(), first + static_cast<std::ptrdiff_t>(begin),
                   first + static_cast<std::ptrdiff_t>(end));
    };
    if (full > 0) {
      const Permutation buckets(full, seed ^ spread_bits(part + 1), epoch);
      for (std::size_t i = 0; i < full; ++i) {
        const std::size_t begin = buckets(i) * bucket_size;
        append(begin, begin + bucket_size);
      }
    }
    append(full * bucket_size, count);
  }
  return order;
}

}  // namespace lockstep
