// reduce_once: an all-reduce whose result exists once for all ranks of a host.
//
// `output` is memory that all ranks map, on each at its own address (collective/operation.h says
// who writes there, and when). The bits are those of an all-reduce of the same inputs.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep {

// Whether all ranks of the engine are on one host and connected by shared memory, or it has one
// rank. Of an engine of two (by_device.h), what it uses in main memory decides.
bool can_reduce_once(c10d::Backend& engine);

// For a rank that waits although it could go on: whether another one is known to wait in another
// engine, perhaps for this rank.
bool is_needed_elsewhere(c10d::Backend& engine);

// When the work is done, on any rank, the output is complete and the input may be written again.
// Requires: contiguous tensors in main memory, of the same type and number of elements on all
// ranks, that do not overlap or are the same; can_reduce_once(engine).
// `average_over`: what AVG divides by, if not by the number of ranks (of more than one).
// Throws UsageError, before any other rank hears of it.
c10::intrusive_ptr<c10d::Work> start_reduce_once(c10d::Backend& engine, const at::Tensor& input,
                                                 const at::Tensor& output, const c10d::ReduceOp& op,
                                                 int average_over = 0);

}  // namespace lockstep
