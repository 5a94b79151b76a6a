// What low_rank.h does, with operators of a device, so that the host does not wait for it. The bits
// are the same on all ranks if their devices are of one kind, as those of all sums on devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

// `vectors` is [num_vectors, length]; as make_orthonormal().
void make_orthonormal_on_device(const at::Tensor& vectors);

// The product of left^T and right, as multiply(): added up in the order of the vectors.
at::Tensor multiply_on_device(const at::Tensor& left, const at::Tensor& right);

}  // namespace lockstep
