#include "ddp/agreement.h"

#include <ATen/ATen.h>
#include <lockstep/ddp.h>

#include <algorithm>

#include "base/hash.h"
#include "base/text.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

// The bytes in the order of memory: strides are the same on all ranks, so order is, too.
std::uint64_t hash_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  at::Tensor bytes = tensor.detach();
  if (tensor.layout() != at::kStrided) bytes = bytes.to_dense();
  if (!bytes.is_non_overlapping_and_dense()) bytes = bytes.contiguous();
  bytes = bytes.cpu();
  return hash_bytes(bytes.const_data_ptr(), bytes.nbytes());
}

bool is_same_everywhere(const World& world, std::uint64_t value) {
  const at::Tensor all =
      world.all_gather(at::tensor(static_cast<std::int64_t>(value), at::TensorOptions(at::kLong)));
  return all.eq(static_cast<std::int64_t>(value)).all().item<bool>();
}

}  // namespace

void check_same_lines(const World& world, const std::vector<std::string>& lines,
                      const std::string& what) {
  const std::string mine = text::format("{}", text::join(lines, "\n"));
  // All ranks answer alike: if one's hash differs from another's, nobody sees all equal.
  if (is_same_everywhere(world, hash_bytes(mine.data(), mine.size()))) return;
  std::vector<std::vector<std::string>> all;
  for (const std::string& text : exchange_texts(world, mine)) {
    auto& of_rank = all.emplace_back();
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      of_rank.push_back(text.substr(at, end - at));
      at = end + 1;
    }
  }
  int other = 0;
  while (all[static_cast<std::size_t>(other)] == all[0]) ++other;
  const auto& theirs = all[static_cast<std::size_t>(other)];
  const auto line = [](const std::vector<std::string>& of_rank, std::size_t index) {
    return index < of_rank.size() ? of_rank[index] : std::string("nothing more");
  };
  std::size_t first = 0;
  while (line(all[0], first) == line(theirs, first)) ++first;
  throw MismatchError({.rank = world.rank(),
                       .peer = world.rank() == other ? 0 : other,
                       .operation = "DistributedDataParallel"},
                      text::format("{} differ between ranks. The first difference is\n"
                                   "  rank 0: {}\n  rank {}: {}\n"
                                   "Build the same model with the same options on all ranks.",
                                   what, line(all[0], first), other, line(theirs, first)));
}

std::vector<std::int64_t> hashes_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::int64_t> hashes;
  for (const NamedTensor& one : tensors) {
    hashes.push_back(static_cast<std::int64_t>(hash_of(one.tensor)));
  }
  return hashes;
}

std::uint64_t hash_of_all(const std::vector<std::int64_t>& hashes) {
  return hash_bytes(hashes.data(), hashes.size() * sizeof(std::int64_t));
}

std::vector<Difference> find_differences(const World& world,
                                         const std::vector<std::int64_t>& hashes) {
  const at::Tensor all = world.all_gather(at::tensor(hashes, at::TensorOptions(at::kLong)));
  const at::Tensor differs = all.ne(all[0]);
  std::vector<Difference> found;
  for (std::int64_t i = 0; i < differs.size(1); ++i) {
    Difference one{.index = static_cast<std::size_t>(i)};
    for (int rank = 0; rank < world.size(); ++rank) {
      if (differs[rank][i].item<bool>()) one.ranks.push_back(rank);
    }
    if (!one.ranks.empty()) found.push_back(std::move(one));
  }
  return found;
}

void check_same_tensors(const World& world, const std::vector<NamedTensor>& tensors,
                        std::int64_t step) {
  const std::vector<std::int64_t> hashes = hashes_of(tensors);
  if (is_same_everywhere(world, hash_of_all(hashes))) return;
  const std::vector<Difference> found = find_differences(world, hashes);
  throw MismatchError(
      {.rank = world.rank(),
       .peer = static_cast<int>(found.front().ranks.front()),
       .step = step,
       .operation = "replica check"},
      text::format("The replicas have drifted apart: {} is not the same on rank 0 and on rank {}.\n"
                   "Make every change of parameters and buffers on all ranks alike: step with "
                   "averaged gradients only, load checkpoints everywhere, seed equally.",
                   tensors[found.front().index].name, text::join(found.front().ranks, ", ")));
}

}  // namespace lockstep
