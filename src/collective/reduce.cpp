#include "collective/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep::collective {

const char* name_of(DataType type) {
  static constexpr const char* kNames[] = {"f32",  "f64", "f16",  "bf16", "i8",  "i16",
                                           "i32",  "i64", "u8",   "u16",  "u32", "u64",
                                           "bool", "c64", "c128", "bytes"};
  const auto index = static_cast<std::size_t>(type);
  return index < sizeof kNames / sizeof *kNames ? kNames[index] : "unknown type";
}

const char* name_of(Reduction reduction) {
  static constexpr const char* kNames[] = {"none", "sum", "average", "product", "min",
                                           "max",  "and", "or",      "xor",     "scaled sum"};
  const auto index = static_cast<std::size_t>(reduction);
  return index < sizeof kNames / sizeof *kNames ? kNames[index] : "unknown reduction";
}

bool can_reduce(DataType type, Reduction reduction) {
  const bool is_complex = type == DataType::kC64 || type == DataType::kC128;
  const bool is_float = type <= DataType::kBF16;
  switch (reduction) {
    case Reduction::kSum:
      return type != DataType::kBytes;
    case Reduction::kAverage:
    case Reduction::kScaledSum:
      return is_float || is_complex;
    case Reduction::kProduct:
    case Reduction::kMin:
    case Reduction::kMax:
      return !is_complex && type != DataType::kBytes;
    case Reduction::kAnd:
    case Reduction::kOr:
    case Reduction::kXor:
      return !is_float && !is_complex && type != DataType::kBytes;
    default:
      return false;
  }
}

#if defined(__x86_64__)
// __builtin_cpu_supports does not know it before g++ 11 and clang 15.
static bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

namespace {

Simd find_best_simd() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_f16c()) {
    return Simd::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && has_f16c()) return Simd::kAvx2;
#endif
  return Simd::kPlain;
}

}  // namespace

// Asked once: in a virtual machine the question takes microseconds.
Simd best_simd() {
  static const Simd best = find_best_simd();
  return best;
}

void reduce(const ReduceJob& job, Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::kAvx512) return reduce_avx512(job);
  if (simd == Simd::kAvx2) return reduce_avx2(job);
#else
  (void)simd;  // the compiler uses NEON in the plain ones
#endif
  reduce_plain(job);
}

}  // namespace lockstep::collective
