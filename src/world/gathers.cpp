// Collectives that move tensors between ranks without a reduction. Ranks compare their calls first
// (arguments.h), so that all of them throw the same before anything has been moved.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <algorithm>

#include "base/purpose.h"
#include "base/text.h"
#include "world/arguments.h"
#include "world/pending.h"

namespace lockstep {
namespace {

std::string with_root(const at::Tensor& tensor, int root) {
  return text::format("{}, root {}", describe_shape(tensor), root);
}

void check_scatter(const World& world, const at::Tensor& tensor, const at::Tensor& parts,
                   int root) {
  check_dense(world, "scatter", tensor, Use::kWritten);
  check_root(world, "scatter", root);
  if (world.rank() != root) return;
  check_dense(world, "scatter", parts, Use::kRead);
  check_parts(world, "scatter", parts);
  if (parts.sizes().slice(1) == tensor.sizes() && parts.scalar_type() == tensor.scalar_type() &&
      parts.device() == tensor.device()) {
    return;
  }
  throw UsageError({.rank = world.global_rank(), .operation = "scatter"},
                   text::format("scatter was given parts {} for a tensor {}.\nGive parts of the "
                                "tensor's sizes, type and device.",
                                describe_shape(parts), describe_shape(tensor)));
}

// Rows of a dense tensor, one per rank: views, flat.
std::vector<at::Tensor> flat_parts(const World& world, const at::Tensor& dense) {
  return dense.view({world.size(), dense.numel() / world.size()}).unbind(0);
}

}  // namespace

Pending World::gather_async(const at::Tensor& tensor, int root) const {
  check_dense(*this, "gather", tensor, Use::kRead);
  check_root(*this, "gather", root);
  std::vector<at::Tensor> input = {make_dense(tensor).view(-1)};
  at::Tensor output;
  std::vector<std::vector<at::Tensor>> outputs;
  if (rank() == root) {
    output = at::empty(stacked(*this, tensor), input[0].options());
    outputs.push_back(flat_parts(*this, output));
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  return start(
      "gather", tensor,
      [&] {
        return Works{{backend()->gather(outputs, input, options), tensor.device().type()}};
      },
      [output] { return output; });
}

at::Tensor World::gather(const at::Tensor& tensor, int root) const {
  const PurposeScope purpose(Purpose::kGather);
  agree_on_call(
      *this, "gather",
      [&] {
        check_dense(*this, "gather", tensor, Use::kRead);
        check_root(*this, "gather", root);
      },
      [&] { return with_root(tensor, root); });
  return gather_async(tensor, root).result();
}

Pending World::scatter_async(const at::Tensor& tensor, const at::Tensor& parts, int root) const {
  check_scatter(*this, tensor, parts, root);
  at::Tensor dense = make_dense(tensor);
  std::vector<at::Tensor> output = {dense.view(-1)};
  std::vector<std::vector<at::Tensor>> inputs;
  if (rank() == root) inputs.push_back(flat_parts(*this, make_dense(parts)));
  c10d::ScatterOptions options;
  options.rootRank = root;
  return start(
      "scatter", tensor,
      [&] {
        return Works{{backend()->scatter(output, inputs, options), tensor.device().type()}};
      },
      write_back(tensor, dense));
}

at::Tensor World::scatter(const at::Tensor& tensor, const at::Tensor& parts, int root) const {
  const PurposeScope purpose(Purpose::kScatter);
  agree_on_call(
      *this, "scatter", [&] { check_scatter(*this, tensor, parts, root); },
      [&] { return with_root(tensor, root); });
  return scatter_async(tensor, parts, root).result();
}

Pending World::all_to_all_async(const at::Tensor& tensor) const {
  check_dense(*this, "all_to_all", tensor, Use::kRead);
  check_parts(*this, "all_to_all", tensor);
  at::Tensor input = make_dense(tensor).view({size(), tensor.numel() / size()});
  const at::Tensor output = at::empty(tensor.sizes(), input.options());
  at::Tensor parts = output.view(input.sizes());
  std::vector<std::int64_t> equal_parts;
  return start(
      "all_to_all", tensor,
      [&] {
        return Works{{backend()->alltoall_base(parts, input, equal_parts, equal_parts),
                      tensor.device().type()}};
      },
      [output] { return output; });
}

at::Tensor World::all_to_all(const at::Tensor& tensor) const {
  const PurposeScope purpose(Purpose::kAllToAll);
  agree_on_call(
      *this, "all_to_all",
      [&] {
        check_dense(*this, "all_to_all", tensor, Use::kRead);
        check_parts(*this, "all_to_all", tensor);
      },
      [&] { return describe_shape(tensor); });
  return all_to_all_async(tensor).result();
}

// The longest decides: the others are sent with rows that nobody reads.
Pending World::all_gather_uneven_async(const at::Tensor& tensor) const {
  const PurposeScope purpose(Purpose::kAllGatherUneven);
  const auto check = [&] {
    check_dense(*this, "all_gather_uneven", tensor, Use::kRead);
    if (tensor.dim() > 0) return;
    throw UsageError({.rank = global_rank(), .operation = "all_gather_uneven"},
                     "all_gather_uneven was given a tensor without dimensions.\nGive one whose "
                     "first dimension says how much this rank has.");
  };
  const std::int64_t mine = tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : 0;
  const std::vector<std::int64_t> lengths = agree_on_call(
      *this, "all_gather_uneven", check,
      [&] { return "rows of " + describe_shape(tensor, tensor.sizes().slice(1)); }, mine);
  const std::int64_t longest = std::ranges::max(lengths);
  at::Tensor sent = make_dense(tensor);
  if (mine < longest) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    sizes[0] = longest;
    at::Tensor padded = at::zeros(sizes, sent.options());
    padded.narrow(0, 0, mine).copy_(sent);
    sent = padded;
  }
  Pending all = all_gather_async(sent);
  all.lengths_ = lengths;
  return all;
}

std::vector<at::Tensor> World::all_gather_uneven(const at::Tensor& tensor) const {
  return all_gather_uneven_async(tensor).results();
}

}  // namespace lockstep
