#include "engine/tensor_checks.h"

#include <lockstep/error.h>

#include <algorithm>

#include "base/text.h"
#include "collective/reduce.h"

namespace lockstep {

using collective::DataType;
using collective::Reduction;

namespace {

// kBytes for what cannot be reduced (8-bit floats and the like) but can be moved.
DataType type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DataType::kF32;
    case at::kDouble:
      return DataType::kF64;
    case at::kHalf:
      return DataType::kF16;
    case at::kBFloat16:
      return DataType::kBF16;
    case at::kChar:
      return DataType::kI8;
    case at::kShort:
      return DataType::kI16;
    case at::kInt:
      return DataType::kI32;
    case at::kLong:
      return DataType::kI64;
    case at::kByte:
      return DataType::kU8;
    case at::kUInt16:
      return DataType::kU16;
    case at::kUInt32:
      return DataType::kU32;
    case at::kUInt64:
      return DataType::kU64;
    case at::kBool:
      return DataType::kBool;
    case at::kComplexFloat:
      return DataType::kC64;
    case at::kComplexDouble:
      return DataType::kC128;
    default:
      return DataType::kBytes;
  }
}

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction::kSum;
    case c10d::ReduceOp::AVG:
      return Reduction::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case c10d::ReduceOp::MIN:
      return Reduction::kMin;
    case c10d::ReduceOp::MAX:
      return Reduction::kMax;
    case c10d::ReduceOp::BAND:
      return Reduction::kAnd;
    case c10d::ReduceOp::BOR:
      return Reduction::kOr;
    case c10d::ReduceOp::BXOR:
      return Reduction::kXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction::kScaledSum;
    default:
      return Reduction::kNone;
  }
}

double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1;
  const auto* given = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>()
                                        : given->double_factor;
}

}  // namespace

collective::Operation operation_of(collective::Kind kind, const at::Tensor& part,
                                   const std::optional<c10d::ReduceOp>& op) {
  collective::Operation operation;
  operation.kind = kind;
  operation.type = type_of(part.scalar_type());
  operation.count =
      operation.type == DataType::kBytes ? part.nbytes() : static_cast<std::size_t>(part.numel());
  if (op) {
    operation.reduction = reduction_of(*op);
    operation.factor = factor_of(*op);
  }
  return operation;
}

void TensorChecks::refuse(const char* operation, const std::string& message) const {
  throw UsageError({.rank = rank, .operation = operation}, message);
}

void TensorChecks::reduction(const char* operation, const c10d::ReduceOp& op,
                             const Tensors& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    if (!collective::can_reduce(type_of(tensor.scalar_type()), reduction_of(op))) {
      refuse(operation,
             text::format("{} was given {} elements and a reduction that they do not have ({}).\n"
                          "Use another type or reduction.",
                          operation, c10::toString(tensor.scalar_type()),
                          collective::name_of(reduction_of(op))));
    }
  }
}
void TensorChecks::count(const char* operation, std::size_t count) const {
  if (count == static_cast<std::size_t>(size)) return;
  refuse(operation, text::format("{} was given a list of {} tensors for {} ranks.\n"
                                 "Give one for each rank.",
                                 operation, count, size));
}
void TensorChecks::pairs(const char* operation, const Tensors& outputs,
                         const Tensors& inputs) const {
  if (outputs.size() == inputs.size()) return;
  refuse(operation, text::format("{} was given {} outputs for {} inputs.\nGive one each.",
                                 operation, outputs.size(), inputs.size()));
}
void TensorChecks::same(const char* operation, const at::Tensor& a, const at::Tensor& b,
                        int64_t a_parts, int64_t b_parts) const {
  if (a.scalar_type() == b.scalar_type() && a.numel() * b_parts == b.numel() * a_parts) return;
  refuse(operation,
         text::format("{}: {} elements of {} do not match {} elements of {} over {} ranks.\n"
                      "Use the same type, and one part per rank.",
                      operation, a.numel(), c10::toString(a.scalar_type()), b.numel(),
                      c10::toString(b.scalar_type()), size));
}
void TensorChecks::lists(const char* operation, const std::vector<Tensors>& lists,
                         const Tensors& singles) const {
  if (lists.size() != singles.size()) {
    refuse(operation, text::format("{} was given {} lists for {} tensors.\nGive one each.",
                                   operation, lists.size(), singles.size()));
  }
  for (std::size_t i = 0; i < lists.size(); ++i) {
    this->count(operation, lists[i].size());
    for (const at::Tensor& part : lists[i]) same(operation, part, singles[i], 1, 1);
  }
}
const at::Tensor& TensorChecks::only_one(const char* operation, const Tensors& tensors) const {
  if (tensors.size() == 1) return tensors.front();
  refuse(operation, text::format("{} was given {} tensors.\nGive one.", operation, tensors.size()));
}

Tensors TensorChecks::split(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
  if (splits.empty()) {
    if (tensor.dim() == 0 || tensor.size(0) % size != 0) {
      refuse("all_to_all", text::format("A first dimension of {} cannot be split over {} ranks.\n"
                                        "Give the sizes of the parts.",
                                        tensor.dim() == 0 ? 0 : tensor.size(0), size));
    }
    return tensor.split(std::max<int64_t>(tensor.size(0) / size, 1)).size() ==
                   static_cast<std::size_t>(size)
               ? Tensors(tensor.split(std::max<int64_t>(tensor.size(0) / size, 1)))
               : Tensors(static_cast<std::size_t>(size), tensor);  // all are empty
  }
  this->count("all_to_all", splits.size());
  return tensor.split_with_sizes(splits);
}

}  // namespace lockstep
