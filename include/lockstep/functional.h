// functional: collectives that gradients flow through, for losses that need the other ranks'
// outputs, as contrastive losses do.
//
// Each rank computes a loss of its own, and backward() gives each input the gradient of the sum of
// all ranks' losses: what one process that computes all of them would find.
// DistributedDataParallel averages gradients, so with it that is the gradient of the mean of the
// losses. Gradients of gradients work, too.
// Backward is collective: the loss of every rank depends on the result, however much of it is used
// (0 * result.sum() is enough), and all ranks call backward. Losses may differ between ranks.
//
//   auto all = lockstep::functional::all_gather(embedding, world).flatten(0, 1);
//   auto loss = torch::cross_entropy_loss(embedding.matmul(all.t()), targets);
//
// Threading: as World. All throw on all ranks: UsageError (a wrong tensor), MismatchError (ranks
// differ in sizes, types, or in whether a gradient is needed).
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>
#include <lockstep/world.h>

namespace lockstep::functional {

// The tensors of all ranks along a new first dimension.
LOCKSTEP_API at::Tensor all_gather(const at::Tensor& tensor, const World& world);

// The sum, or average, over all ranks: a new tensor, unlike World::all_reduce. Gradients need
// ReduceOp::SUM or AVG; others are refused.
LOCKSTEP_API at::Tensor all_reduce(const at::Tensor& tensor, const World& world,
                                   const ReduceOp& op = ReduceOp::SUM);

// `tensor` has one part per rank along its first dimension: the sum, or average, over ranks of this
// rank's part.
LOCKSTEP_API at::Tensor reduce_scatter(const at::Tensor& tensor, const World& world,
                                       const ReduceOp& op = ReduceOp::SUM);

// `tensor` has one part per rank along its first dimension: part r of the result is what rank r has
// for this rank.
LOCKSTEP_API at::Tensor all_to_all(const at::Tensor& tensor, const World& world);

}  // namespace lockstep::functional
