#include "ddp/agreement.h"

#include <ATen/ATen.h>
#include <lockstep/ddp.h>

#include <algorithm>

#include "base/hash.h"
#include "base/text.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

// So much is brought from a device at once, and the host waits for it: this bounds the memory that
// it takes there.
constexpr std::size_t kPieceBytes = 64 << 20;

// The bytes in the order of memory: strides are the same on all ranks, so order is, too.
at::Tensor bytes_of(const at::Tensor& tensor) {
  at::Tensor dense = tensor.detach().resolve_conj().resolve_neg();
  if (dense.layout() != at::kStrided) dense = dense.to_dense();
  if (!dense.is_non_overlapping_and_dense()) dense = dense.contiguous();
  return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
}

std::int64_t hash_of(const at::Tensor& bytes) {
  return static_cast<std::int64_t>(hash_bytes(bytes.const_data_ptr(), bytes.nbytes()));
}

// Hashes of tensors on devices: many come over in one copy.
class FromDevices {
 public:
  explicit FromDevices(std::vector<std::int64_t>& hashes) : hashes_(hashes) {}

  void add(const at::Tensor& bytes, std::size_t index) {
    if (!pieces_.empty() &&
        (bytes.device() != pieces_.front().device() || num_bytes_ + bytes.nbytes() > kPieceBytes)) {
      flush();
    }
    pieces_.push_back(bytes);
    indices_.push_back(index);
    num_bytes_ += bytes.nbytes();
  }

  void flush() {
    if (pieces_.empty()) return;
    const at::Tensor all = (pieces_.size() == 1 ? pieces_.front() : at::cat(pieces_)).cpu();
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      hashes_[indices_[i]] = hash_of(all.narrow(0, begin, pieces_[i].numel()));
      begin += pieces_[i].numel();
    }
    pieces_.clear();
    indices_.clear();
    num_bytes_ = 0;
  }

 private:
  std::vector<std::int64_t>& hashes_;
  std::vector<at::Tensor> pieces_;
  std::vector<std::size_t> indices_;
  std::size_t num_bytes_ = 0;
};

}  // namespace

std::vector<std::int64_t> hashes_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::int64_t> hashes(tensors.size(), 0);
  FromDevices from_devices(hashes);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i].tensor;
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const at::Tensor bytes = bytes_of(tensor);
    bytes.is_cpu() ? void(hashes[i] = hash_of(bytes)) : from_devices.add(bytes, i);
  }
  from_devices.flush();
  return hashes;
}

std::uint64_t hash_of_all(const std::vector<std::int64_t>& hashes) {
  return hash_bytes(hashes.data(), hashes.size() * sizeof(std::int64_t));
}

bool has_same_tensors(const World& world, const std::vector<NamedTensor>& tensors) {
  return is_same_everywhere(world, hash_of_all(hashes_of(tensors)));
}

std::vector<Difference> find_differences(const World& world,
                                         const std::vector<std::int64_t>& hashes) {
  const at::Tensor all = world.all_gather(at::tensor(hashes, at::TensorOptions(at::kLong)));
  const at::Tensor differs = all.ne(all[0]);
  std::vector<Difference> found;
  for (std::int64_t i = 0; i < differs.size(1); ++i) {
    Difference one{.index = static_cast<std::size_t>(i)};
    for (int rank = 0; rank < world.size(); ++rank) {
      if (differs[rank][i].item<bool>()) one.ranks.push_back(world.global_rank(rank));
    }
    if (!one.ranks.empty()) found.push_back(std::move(one));
  }
  return found;
}

void check_same_tensors(const World& world, const std::vector<NamedTensor>& tensors,
                        std::int64_t step) {
  const std::vector<std::int64_t> hashes = hashes_of(tensors);
  if (is_same_everywhere(world, hash_of_all(hashes))) return;
  const Difference found = find_differences(world, hashes).front();
  throw MismatchError(
      {.rank = world.global_rank(),
       .peer = static_cast<int>(found.ranks.front()),
       .step = step,
       .operation = "replica check"},
      text::format(
          "The replicas have drifted apart: {} is not the same on rank {} and on rank {}.\n"
          "Make every change of parameters and buffers on all ranks alike: step with "
          "averaged gradients only, load checkpoints everywhere, seed equally.",
          tensors[found.index].name, world.global_rank(0), text::join(found.ranks, ", ")));
}

}  // namespace lockstep
