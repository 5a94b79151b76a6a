// DdpOptions::reduce_type: gradients that are wider than their parameters.
#pragma once

#include <lockstep/ddp.h>

namespace lockstep {

// In which a parameter's gradient is added up and handed out.
at::ScalarType reduce_type_of(const at::Tensor& parameter, const DdpOptions& options);

// Throws: UsageError if gradients cannot be added up in it.
void check_reduce_type(const DdpOptions& options, int rank);

}  // namespace lockstep
