// Permutation: the numbers below n in an order that a key decides, one at a time, in constant
// memory.
//
// A Feistel network of 8 rounds permutes the numbers of as many bits as n needs; what falls beyond
// n is sent through again until it does not ("cycle walking", less than twice on average). It uses
// integers of stated widths only, so the order is the same everywhere.
#pragma once

#include <cstdint>

namespace lockstep {

// Spreads a number over 64 bits (the finisher of SplitMix64); every input has another output.
std::uint64_t spread_bits(std::uint64_t value);

class Permutation {
 public:
  // `size` is at least 1, and at most 2^62.
  Permutation(std::uint64_t size, std::uint64_t seed, std::uint64_t epoch);

  std::uint64_t operator()(std::uint64_t position) const {
    std::uint64_t value = position;
    do {
      value = shuffle(value);
    } while (value >= size_);
    return value;
  }

 private:
  static constexpr int kRounds = 8;  // an even number: both halves are changed equally often

  std::uint64_t shuffle(std::uint64_t value) const {
    std::uint64_t left = value >> right_bits_;
    std::uint64_t right = value & right_mask_;
    for (int round = 0; round < kRounds; round += 2) {
      left = (left ^ mix(right, keys_[round])) & left_mask_;
      right = (right ^ mix(left, keys_[round + 1])) & right_mask_;
    }
    return left << right_bits_ | right;
  }

  static std::uint64_t mix(std::uint64_t value, std::uint64_t key) {
    std::uint64_t mixed = (value ^ key) * 0x9E3779B97F4A7C15U;
    mixed ^= mixed >> 32;
    mixed *= 0xD6E8FEB86659FD93U;
    return mixed >> 32;
  }

  std::uint64_t size_;
  int right_bits_;
  std::uint64_t left_mask_;
  std::uint64_t right_mask_;
  std::uint64_t keys_[kRounds];
};

}  // namespace lockstep
