#include "ddp/reduce_type.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

at::ScalarType reduce_type_of(const at::Tensor& parameter, const DdpOptions& options) {
  const at::ScalarType type = parameter.scalar_type();
  const bool is_wider = options.reduce_type && at::isFloatingType(type) &&
                        c10::elementSize(type) < c10::elementSize(*options.reduce_type);
  return is_wider ? *options.reduce_type : type;
}

void check_reduce_type(const DdpOptions& options, int rank) {
  const auto& type = options.reduce_type;
  if (!type || *type == at::kFloat || *type == at::kDouble) return;
  throw UsageError(
      {.rank = rank, .operation = "DistributedDataParallel"},
      text::format("DdpOptions::reduce_type is {}.\nGive at::kFloat or at::kDouble; to "
                   "send fewer bits, use bf16_hook() or fp16_hook().",
                   c10::toString(*type)));
}

}  // namespace lockstep
