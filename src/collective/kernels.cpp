// The kernels behind reduce(), compiled once per instruction set (LOCKSTEP_KERNEL names which).
//
// Elements go through in blocks that stay in the first-level cache. A block of each input is
// widened (f16 and bf16 to f32) and put on a stack of partial sums that works like a binary
// counter: two neighbours of equal weight are added at once. What is left at the end is added from
// the right. That is the balanced tree of reduce.h, with log2(n) blocks of scratch memory. Nothing
// here may be a function of the standard library: it would be compiled for one instruction set and
// could be taken by the linker for all.

#include <cstddef>
#include <cstdint>

#include "collective/reduce.h"

#if defined(__F16C__)
#include <immintrin.h>  // only intrinsics, which are always inlined
#endif

// The same memory may be input and output, but only at the same index.
#if defined(__clang__)
#define LOCKSTEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOCKSTEP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace lockstep::collective {
namespace {

constexpr std::size_t kBlock = 512;  // elements: at most 4 KiB of f64, and 7 of them are 28 KiB

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};
struct Bool {
  std::uint8_t value;
};

inline float widen(BF16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

// To the nearest, ties to even; every NaN stays a NaN.
inline void narrow(float value, BF16& result) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  result.bits = static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40U : rounded);
}

// The exponent is moved by a multiplication, which is exact for numbers and for subnormal ones.
inline float widen(F16 value) {
  const std::uint32_t sign = (value.bits & 0x8000U) << 16;
  const std::uint32_t rest = (value.bits & 0x7fffU) << 13;
  const std::uint32_t scaled = bits_of(float_of(rest) * 0x1p112F);
  const bool is_special = (value.bits & 0x7c00U) == 0x7c00U;  // infinity or NaN
  return float_of(sign | (is_special ? rest | 0x7f800000U : scaled));
}

inline void narrow(float value, F16& result) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  // Normal: rebias the exponent by -112 and round 13 bits away, to the nearest, ties to even.
  const std::uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  // Subnormal: adding 0.5 leaves the result, rounded by the hardware, in the lowest bits.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
  const bool is_subnormal = magnitude < 0x38800000U;  // below 2^-14
  const bool is_overflow = magnitude >= 0x477ff000U;  // from 65520 on
  const bool is_nan = magnitude > 0x7f800000U;
  std::uint32_t half = is_subnormal ? subnormal : normal;
  half = is_overflow ? 0x7c00U : half;
  half = is_nan ? 0x7e00U | ((magnitude >> 13) & 0x3ffU) : half;
  result.bits = static_cast<std::uint16_t>(sign | half);
}

template <typename T>
inline T widen(T value) {
  return value;
}
inline std::uint8_t widen(Bool value) { return value.value != 0 ? 1 : 0; }
template <typename T>
inline void narrow(T value, T& result) {
  result = value;
}
inline void narrow(std::uint8_t value, Bool& result) { result.value = value != 0 ? 1 : 0; }

// Integers wrap around, also signed ones: they are added as unsigned.
template <typename T>
struct Unsigned {
  using Type = T;
};
template <>
struct Unsigned<std::int8_t> {
  using Type = std::uint8_t;
};
template <>
struct Unsigned<std::int16_t> {
  using Type = std::uint32_t;  // not uint16_t, which would be promoted to int and could overflow
};
template <>
struct Unsigned<std::uint16_t> {
  using Type = std::uint32_t;
};
template <>
struct Unsigned<std::int32_t> {
  using Type = std::uint32_t;
};
template <>
struct Unsigned<std::int64_t> {
  using Type = std::uint64_t;
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    using U = typename Unsigned<T>::Type;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
};
struct Product {
  template <typename T>
  static T apply(T a, T b) {
    using U = typename Unsigned<T>::Type;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
};
// A NaN wins, as in at::minimum and at::maximum.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
};
struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename T, typename W>
void widen_block(const T* input, W* output, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) output[i] = widen(input[i]);
}
template <typename T, typename W>
void narrow_block(const W* input, T* output, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) narrow(input[i], output[i]);
}

#if defined(__F16C__)
// The hardware's conversions; the functions above agree with them to the bit.
void widen_block(const F16* input, float* output, std::size_t length) {
  std::size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(input + i));
    _mm256_storeu_ps(output + i, _mm256_cvtph_ps(half));
  }
  for (; i < length; ++i) output[i] = widen(input[i]);
}
void narrow_block(const float* input, F16* output, std::size_t length) {
  std::size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(input + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(output + i), half);
  }
  for (; i < length; ++i) narrow(input[i], output[i]);
}
#endif

template <typename W, typename Op>
void merge_block(W* __restrict left, const W* __restrict right, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) left[i] = Op::apply(left[i], right[i]);
}

// Two inputs need no stack: one pass over both, straight into all outputs.
template <typename T, typename W, typename Op>
void reduce_two(const ReduceJob& job, std::size_t total, W divisor) {
  const T* a = static_cast<const T*>(job.inputs[0]);
  const T* b = static_cast<const T*>(job.inputs[1]);
  T* first = static_cast<T*>(job.outputs[0]);
  T* second = static_cast<T*>(job.outputs[job.num_outputs - 1]);
  if (divisor != static_cast<W>(1)) {
    LOCKSTEP_INDEPENDENT
    for (std::size_t i = 0; i < total; ++i) {
      T result;
      narrow(static_cast<W>(Op::apply(widen(a[i]), widen(b[i])) / divisor), result);
      first[i] = result;
      second[i] = result;
    }
    return;
  }
  LOCKSTEP_INDEPENDENT
  for (std::size_t i = 0; i < total; ++i) {
    T result;
    narrow(Op::apply(widen(a[i]), widen(b[i])), result);
    first[i] = result;
    second[i] = result;
  }
}

template <typename T>
constexpr bool kIsPlainLoop = true;  // worth fusing; f16 goes through the hardware by blocks
template <>
constexpr bool kIsPlainLoop<F16> = false;

// T is what stands in memory, W what it is reduced in.
template <typename T, typename W, typename Op>
void reduce_as(const ReduceJob& job, std::size_t per_element = 1) {
  const bool is_scaled = job.reduction == Reduction::kScaledSum;
  const int num_averaged = job.average_over != 0 ? job.average_over : job.num_inputs;
  const W divisor =
      job.reduction == Reduction::kAverage ? static_cast<W>(num_averaged) : static_cast<W>(1);
  const std::size_t total = job.count * per_element;
  if constexpr (kIsPlainLoop<T>) {
    if (job.num_inputs == 2 && job.num_outputs <= 2 && !is_scaled) {
      return reduce_two<T, W, Op>(job, total, divisor);
    }
  }
  alignas(64) W stack[kMaxDepth][kBlock];
  for (std::size_t start = 0; start < total; start += kBlock) {
    const std::size_t length = total - start < kBlock ? total - start : kBlock;
    int depth = 0;
    for (int rank = 0; rank < job.num_inputs; ++rank) {
      W* top = stack[depth++];
      widen_block(static_cast<const T*>(job.inputs[rank]) + start, top, length);
      if (is_scaled) {
        const W factor = static_cast<W>(job.factors[rank]);
        for (std::size_t i = 0; i < length; ++i) top[i] = static_cast<W>(top[i] * factor);
      }
      // The blocks on the stack stand for the binary digits of the number of leaves read: as many
      // are merged as digits turn to 0 with this one.
      int merges = job.merges != nullptr ? job.merges[rank] : __builtin_ctz(~rank);
      for (; merges > 0; --merges) {
        --depth;
        merge_block<W, Op>(stack[depth - 1], stack[depth], length);
      }
    }
    for (; depth > 1; --depth) merge_block<W, Op>(stack[depth - 2], stack[depth - 1], length);
    W* result = stack[0];
    if (divisor != static_cast<W>(1)) {
      for (std::size_t i = 0; i < length; ++i) result[i] = static_cast<W>(result[i] / divisor);
    }
    T* first = static_cast<T*>(job.outputs[0]) + start;
    narrow_block(result, first, length);
    for (int o = 1; o < job.num_outputs; ++o) {
      __builtin_memcpy(static_cast<T*>(job.outputs[o]) + start, first, length * sizeof(T));
    }
  }
}

template <typename T, typename W>
void reduce_float(const ReduceJob& job) {
  switch (job.reduction) {
    case Reduction::kProduct:
      return reduce_as<T, W, Product>(job);
    case Reduction::kMin:
      return reduce_as<T, W, Min>(job);
    case Reduction::kMax:
      return reduce_as<T, W, Max>(job);
    default:
      return reduce_as<T, W, Sum>(job);
  }
}

template <typename T>
void reduce_integer(const ReduceJob& job) {
  switch (job.reduction) {
    case Reduction::kProduct:
      return reduce_as<T, T, Product>(job);
    case Reduction::kMin:
      return reduce_as<T, T, Min>(job);
    case Reduction::kMax:
      return reduce_as<T, T, Max>(job);
    case Reduction::kAnd:
      return reduce_as<T, T, And>(job);
    case Reduction::kOr:
      return reduce_as<T, T, Or>(job);
    case Reduction::kXor:
      return reduce_as<T, T, Xor>(job);
    default:
      return reduce_as<T, T, Sum>(job);
  }
}

// Truth values: a sum is "any of them", a product "all of them".
void reduce_bool(const ReduceJob& job) {
  switch (job.reduction) {
    case Reduction::kProduct:
    case Reduction::kMin:
    case Reduction::kAnd:
      return reduce_as<Bool, std::uint8_t, And>(job);
    case Reduction::kXor:
      return reduce_as<Bool, std::uint8_t, Xor>(job);
    default:
      return reduce_as<Bool, std::uint8_t, Or>(job);
  }
}

}  // namespace

void LOCKSTEP_KERNEL(const ReduceJob& job) {
  switch (job.type) {
    case DataType::kF32:
      return reduce_float<float, float>(job);
    case DataType::kF64:
      return reduce_float<double, double>(job);
    case DataType::kF16:
      return reduce_float<F16, float>(job);
    case DataType::kBF16:
      return reduce_float<BF16, float>(job);
    case DataType::kI8:
      return reduce_integer<std::int8_t>(job);
    case DataType::kI16:
      return reduce_integer<std::int16_t>(job);
    case DataType::kI32:
      return reduce_integer<std::int32_t>(job);
    case DataType::kI64:
      return reduce_integer<std::int64_t>(job);
    case DataType::kU8:
      return reduce_integer<std::uint8_t>(job);
    case DataType::kU16:
      return reduce_integer<std::uint16_t>(job);
    case DataType::kU32:
      return reduce_integer<std::uint32_t>(job);
    case DataType::kU64:
      return reduce_integer<std::uint64_t>(job);
    case DataType::kBool:
      return reduce_bool(job);
    case DataType::kC64:
      return reduce_as<float, float, Sum>(job, 2);
    case DataType::kC128:
      return reduce_as<double, double, Sum>(job, 2);
    case DataType::kBytes:
      break;
  }
}

}  // namespace lockstep::collective
