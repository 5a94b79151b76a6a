// The types and reductions of collectives, as plain numbers: they stand in shared memory and in
// messages and are compared between ranks, so their values are part of kShmVersion.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::collective {

constexpr std::size_t kLine = 64;  // bytes of a cache line

enum class DataType : std::uint8_t {
  kF32,
  kF64,
  kF16,
  kBF16,
  kI8,
  kI16,
  kI32,
  kI64,
  kU8,
  kU16,
  kU32,
  kU64,
  kBool,
  kC64,
  kC128,
  kBytes,  // moved, never reduced
};

enum class Reduction : std::uint8_t {
  kNone,
  kSum,
  kAverage,
  kProduct,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
  kScaledSum,  // each rank's contribution times its own factor
};

constexpr std::size_t size_of(DataType type) {
  switch (type) {
    case DataType::kF64:
    case DataType::kI64:
    case DataType::kU64:
    case DataType::kC64:
      return 8;
    case DataType::kF32:
    case DataType::kI32:
    case DataType::kU32:
      return 4;
    case DataType::kF16:
    case DataType::kBF16:
    case DataType::kI16:
    case DataType::kU16:
      return 2;
    case DataType::kC128:
      return 16;
    default:
      return 1;
  }
}

const char* name_of(DataType type);
const char* name_of(Reduction reduction);

}  // namespace lockstep::collective
