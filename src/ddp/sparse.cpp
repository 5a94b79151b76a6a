#include "ddp/sparse.h"

#include <ATen/ATen.h>

#include "ddp/bucket.h"

namespace lockstep {

// Indices and values of all ranks, one behind the other in the order of ranks, then added up.
at::Tensor mean_of_sparse(const World& world, at::Tensor mine, const at::Tensor& parameter,
                          double weight, double scale) {
  if (!mine.defined()) {
    mine = at::sparse_coo_tensor(parameter.sizes(), parameter.options().layout(at::kSparse));
  }
  // Embeddings have whole rows; a gradient that came dense is seen in that way, too.
  if (!mine.is_sparse() || mine.sparse_dim() != 1) mine = mine.to_dense().to_sparse(1);
  mine = mine.coalesce();
  const std::int64_t count = mine._nnz();
  const at::Tensor counts = world.all_gather(at::tensor(count, at::TensorOptions(at::kLong)));
  const auto most = counts.max().item<std::int64_t>();
  at::Tensor rows = at::zeros({most}, at::TensorOptions(at::kLong).device(mine.device()));
  std::vector<std::int64_t> sizes = mine.values().sizes().vec();
  sizes[0] = most;
  at::Tensor values = at::zeros(sizes, mine.values().options());
  rows.narrow(0, 0, count).copy_(mine.indices()[0]);
  values.narrow(0, 0, count).copy_(mine.values());
  weigh(values, weight);
  const at::Tensor all_rows = world.all_gather(rows);
  const at::Tensor all_values =
      values.is_complex() ? at::view_as_complex(world.all_gather(at::view_as_real(values)))
                          : world.all_gather(values);
  std::vector<at::Tensor> used_rows;
  std::vector<at::Tensor> used_values;
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto used = counts[rank].item<std::int64_t>();
    used_rows.push_back(all_rows[rank].narrow(0, 0, used));
    used_values.push_back(all_values[rank].narrow(0, 0, used));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(used_rows).unsqueeze(0),
                                               at::cat(used_values), parameter.sizes())
                             .coalesce();
  return sum.mul(scale / world.size());
}

}  // namespace lockstep
