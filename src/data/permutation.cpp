#include "data/permutation.h"

#include <algorithm>
#include <bit>

namespace lockstep {
std::uint64_t spread_bits(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

Permutation::Permutation(std::uint64_t size, std::uint64_t seed, std::uint64_t epoch)
    : size_(size) {
  const int bits = std::max(2, static_cast<int>(std::bit_width(size - 1)));
  right_bits_ = bits / 2;
  right_mask_ = (std::uint64_t{1} << right_bits_) - 1;
  left_mask_ = (std::uint64_t{1} << (bits - right_bits_)) - 1;
  std::uint64_t state = spread_bits(seed + 0x9E3779B97F4A7C15U) ^ spread_bits(~epoch);
  for (std::uint64_t& key : keys_) {
    state += 0x9E3779B97F4A7C15U;
    key = spread_bits(state);
  }
}

}  // namespace lockstep
