// The arithmetic of low-rank factors whose results must have the same bits on all ranks.
//
// Plain loops of a fixed order, not a linear algebra library: its sums depend on the number of
// threads, the processor and the alignment, and ranks may differ in all three.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace lockstep {

using Random = std::mt19937_64;  // the standard fixes its numbers, on every machine

template <typename T>
void fill_random(T* values, std::int64_t count, Random& random) {
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<T>(static_cast<double>(random() >> 11) * 0x1p-52 - 1);  // [-1, 1)
  }
}

template <typename T>
double dot(const T* a, const T* b, std::int64_t count) {
  constexpr std::int64_t kLanes = 8;  // sums that do not wait for each other
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
    }
  }
  for (std::int64_t lane = 0; i < count; ++i, ++lane) {
    sums[lane] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Makes the vectors orthonormal (Gram-Schmidt, each vector twice, which is enough). One that adds
// nothing to those before it is replaced by a random one, always the same: were it zero, as for a
// parameter without a gradient in this step, it would stay zero in all steps to come.
// If the input is not finite, all becomes NaN.
// Requires: num_vectors <= length.
template <typename T>
void make_orthonormal(T* vectors, std::int64_t num_vectors, std::int64_t length) {
  constexpr double kNoise = 100 * static_cast<double>(std::numeric_limits<T>::epsilon());
  for (std::int64_t k = 0; k < num_vectors; ++k) {
    T* vector = vectors + k * length;
    const double norm_before = std::sqrt(dot(vector, vector, length));
    if (!std::isfinite(norm_before)) {
      std::fill_n(vectors, num_vectors * length, std::numeric_limits<T>::quiet_NaN());
      return;
    }
    const auto subtract_earlier = [&] {
      for (int pass = 0; pass < 2; ++pass) {
        for (std::int64_t earlier = 0; earlier < k; ++earlier) {
          const T* other = vectors + earlier * length;
          const double part = dot(vector, other, length);
          for (std::int64_t i = 0; i < length; ++i) {
            vector[i] = static_cast<T>(vector[i] - part * other[i]);
          }
        }
      }
      return std::sqrt(dot(vector, vector, length));
    };
    double norm = subtract_earlier();
    if (norm <= kNoise * norm_before) {
      Random random(static_cast<std::uint64_t>(k));
      fill_random(vector, length, random);
      norm = subtract_earlier();
    }
    for (std::int64_t i = 0; i < length; ++i) vector[i] = static_cast<T>(vector[i] / norm);
  }
}

// result[i, j] = sum over k of left[k, i] * right[k, j], in the order of k.
template <typename T>
void multiply(const T* left, const T* right, std::int64_t num_vectors, std::int64_t num_rows,
              std::int64_t num_columns, T* result) {
  for (std::int64_t i = 0; i < num_rows; ++i) {
    T* row = result + i * num_columns;
    for (std::int64_t j = 0; j < num_columns; ++j) row[j] = left[i] * right[j];
    for (std::int64_t k = 1; k < num_vectors; ++k) {
      const T factor = left[k * num_rows + i];
      const T* other = right + k * num_columns;
      for (std::int64_t j = 0; j < num_columns; ++j) row[j] += factor * other[j];
    }
  }
}

}  // namespace lockstep
