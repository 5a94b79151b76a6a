// The late device: a device for LibTorch (PrivateUse1) whose operations run later than the host
// calls them, as a GPU's do, on any machine. It shows what is wrong in code for GPUs: memory that
// the host touches (it faults), operations that are not ordered by events (wrong numbers), waits of
// the host (they are counted).
//
// PyTorch's own example of such a device, OpenReg, runs each operation at once, so it shows none of
// that.
//   - late_streams.h: a thread for each stream, events.
//   - late_memory.h: memory that the host cannot read.
//   - late_operators.cpp: operators. All of the CPU's are there; they run in the thread of the
//   current stream.
//   - late_tensors.cpp: copies, which wait where CUDA's do, and views.
//   - late_sparse.cpp: sparse tensors; their operators wait.
//   - late_engine.h: collectives that run in streams, as NCCL's.
// A process uses it or forks, not first one and then the other: ranks of run_ranks() use it, tests
// do not.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "support/late_streams.h"

namespace lockstep::test::late {

at::Device device();

// The same memory as a tensor of the CPU, for tasks of streams.
at::Tensor shadow_of(const at::Tensor& tensor);

}  // namespace lockstep::test::late
