// Reduction of the contributions of all ranks, element by element.
//
// Invariant: the sum of n contributions is always the same balanced binary tree over rank order,
// ((g0+g1)+(g2+g3))+(g4+...), whatever the length, the chunk or the instruction set; f16 and bf16
// are accumulated in f32 and rounded once. So the bits never depend on who reduces, or how.
// Threading: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/types.h"

namespace lockstep::collective {

constexpr int kMaxRanks = 64;  // of one engine
constexpr int kMaxDepth = 12;  // log2(kMaxLeaves) + 1, and one to be merged

struct ReduceJob {
  DataType type = DataType::kF32;
  Reduction reduction = Reduction::kSum;
  int num_inputs = 0;
  const void* const* inputs = nullptr;  // by rank; may be the same memory as outputs
  const double* factors = nullptr;      // by rank; for kScaledSum only
  int num_outputs = 0;
  void* const* outputs = nullptr;
  std::size_t count = 0;  // elements
  int average_over = 0;   // what kAverage divides by, if not by num_inputs
  // Where inputs are subtrees (leaves.h): how many sums follow each. nullptr: inputs are leaves.
  const std::uint8_t* merges = nullptr;
};

// Instruction sets for which the kernels were compiled.
enum class Simd { kPlain, kAvx2, kAvx512 };

// The best that this machine has.
Simd best_simd();

// Whether the combination has a meaning: no bitwise operations on floats, no average of integers,
// only sums of complex numbers.
bool can_reduce(DataType type, Reduction reduction);

// Requires: can_reduce(job.type, job.reduction), and that this machine has `simd`.
void reduce(const ReduceJob& job, Simd simd);

// One for each instruction set, made from kernels.cpp.
void reduce_plain(const ReduceJob& job);
void reduce_avx2(const ReduceJob& job);
void reduce_avx512(const ReduceJob& job);

}  // namespace lockstep::collective
