// From tensors to operations on raw memory: types, reductions, and what a call must have right
// before any other rank hears of it.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collective/operation.h"

namespace lockstep {

using Tensors = std::vector<at::Tensor>;

inline std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

// An operation whose parts are like `part`, without memory.
collective::Operation operation_of(collective::Kind kind, const at::Tensor& part,
                                   const std::optional<c10d::ReduceOp>& op = std::nullopt);

// All throw UsageError.
struct TensorChecks {
  int rank = 0;
  int size = 0;

  [[noreturn]] void refuse(const char* operation, const std::string& message) const;

  void reduction(const char* operation, const c10d::ReduceOp& op, const Tensors& tensors) const;
  void count(const char* operation, std::size_t count) const;
  void pairs(const char* operation, const Tensors& outputs, const Tensors& inputs) const;
  // `a` is of a_parts parts as `b` is of b_parts.
  void same(const char* operation, const at::Tensor& a, const at::Tensor& b, int64_t a_parts,
            int64_t b_parts) const;
  // Each list has a part per rank, like the one tensor it belongs to.
  void lists(const char* operation, const std::vector<Tensors>& lists,
             const Tensors& singles) const;
  const at::Tensor& only_one(const char* operation, const Tensors& tensors) const;

  // The parts of a tensor along its first dimension, by the given splits or in equal parts.
  Tensors split(const at::Tensor& tensor, const std::vector<int64_t>& splits) const;
};

}  // namespace lockstep
