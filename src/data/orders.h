// Orders of samples that are made as a whole, for one epoch: they need memory for all indices.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// That of Python's DistributedSampler; `seed` has the epoch added.
std::vector<std::int64_t> order_as_python(std::int64_t num_samples, std::uint64_t seed);

// Buckets of samples of similar length (SamplerOptions::lengths).
std::vector<std::int64_t> order_by_length(const std::vector<std::int64_t>& lengths,
                                          std::size_t bucket_size, std::uint64_t seed,
                                          std::uint64_t epoch);

}  // namespace lockstep
