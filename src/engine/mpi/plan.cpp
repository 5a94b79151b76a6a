#include "engine/mpi/plan.h"

#include <algorithm>

namespace lockstep {
namespace {

using collective::Kind;
using collective::Operation;
using collective::Parts;

// Large enough for the speed of any network, small enough to have the memory twice.
constexpr std::size_t kPieceBytes = 32 << 20;

}  // namespace

std::size_t MpiPlan::elements_per_piece(const Operation& operation, int size) {
  const bool has_parts = operation.kind == Kind::kReduceScatter || operation.kind == Kind::kScatter;
  const std::size_t parts = has_parts ? static_cast<std::size_t>(size) : 1;
  return std::max<std::size_t>(kPieceBytes / parts / collective::size_of(operation.type), 1);
}

MpiPlan::MpiPlan(const Operation& operation, int rank, int size, std::size_t first,
                 std::size_t count)
    : operation_(operation),
      rank_(rank),
      size_(size),
      first_(first),
      count_(count),
      element_bytes_(collective::size_of(operation.type)) {
  const bool may_be_sliced = operation.kind == Kind::kAllReduce ||
                             operation.kind == Kind::kReduce || operation.kind == Kind::kBroadcast;
  is_sliced_ = may_be_sliced && size > 1 && count * element_bytes_ > kSmallBytes;
}

bool MpiPlan::is_reduction() const {
  return operation_.kind == Kind::kAllReduce || operation_.kind == Kind::kReduce ||
         operation_.kind == Kind::kReduceScatter;
}

std::size_t MpiPlan::begin_of_slice(int rank) const {
  return count_ * static_cast<std::size_t>(rank) / static_cast<std::size_t>(size_);
}

// The piece's share of a part.
Span MpiPlan::span(const Parts& parts, int part) const {
  if (!parts.counts.empty()) {  // uneven parts come in one piece
    return {parts.part(part), parts.counts[static_cast<std::size_t>(part)] * element_bytes_};
  }
  return {parts.part(part) + first_ * element_bytes_, count_ * element_bytes_};
}

// The rank's slice of the only part. Without slices, all of it.
Span MpiPlan::slice(const Parts& parts, int rank) const {
  if (!is_sliced_) return span(parts, 0);
  const std::size_t begin = begin_of_slice(rank);
  const std::size_t end = begin_of_slice(rank + 1);
  return {parts.part(0) + (first_ + begin) * element_bytes_, (end - begin) * element_bytes_};
}

Span MpiPlan::scratch(int index) const {
  const std::size_t bytes =
      is_sliced_ ? (begin_of_slice(rank_ + 1) - begin_of_slice(rank_)) * element_bytes_
                 : count_ * element_bytes_;
  return {scratch_ + static_cast<std::size_t>(index) * bytes, bytes};
}

std::size_t MpiPlan::scratch_bytes() const {
  return is_reduction() ? scratch(0).bytes * static_cast<std::size_t>(size_ + 1) : 0;
}

Span MpiPlan::gives(int peer) const {
  const bool to_root = peer == operation_.root;
  switch (operation_.kind) {
    case Kind::kAllReduce:
      return slice(operation_.input, peer);
    case Kind::kReduce:
      return is_sliced_ || to_root ? slice(operation_.input, peer) : Span{};
    case Kind::kBroadcast:
      return is_root() ? slice(operation_.input, peer) : Span{};
    case Kind::kAllGather:
      return span(operation_.input, 0);
    case Kind::kGather:
      return to_root ? span(operation_.input, 0) : Span{};
    case Kind::kScatter:
      return is_root() ? span(operation_.input, peer) : Span{};
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      return span(operation_.input, peer);
    case Kind::kBarrier:
    case Kind::kReduceOnce:  // refused by start()
      break;
  }
  return {};
}

Span MpiPlan::takes(int peer) const {
  const bool from_root = peer == operation_.root;
  switch (operation_.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
    case Kind::kReduce:
      if (!reduces()) return {};
      return peer == rank_ ? gives(rank_) : scratch(peer);
    case Kind::kBroadcast:
      return from_root && !is_root() ? slice(operation_.output, rank_) : Span{};
    case Kind::kAllGather:
    case Kind::kAllToAll:
      return span(operation_.output, peer);
    case Kind::kGather:
      return is_root() ? span(operation_.output, peer) : Span{};
    case Kind::kScatter:
      return from_root ? span(operation_.output, 0) : Span{};
    case Kind::kBarrier:
    case Kind::kReduceOnce:  // refused by start()
      break;
  }
  return {};
}

bool MpiPlan::reduces() const {
  return is_reduction() && (operation_.kind != Kind::kReduce || is_sliced_ || is_root());
}

Span MpiPlan::reduced() const {
  if (operation_.output.is_empty()) return scratch(size_);  // for the root
  return operation_.kind == Kind::kReduceScatter ? span(operation_.output, 0)
                                                 : slice(operation_.output, rank_);
}

Span MpiPlan::gives_slice(int peer) const {
  const bool to_root = peer == operation_.root;
  switch (operation_.kind) {
    case Kind::kAllReduce:
      return reduced();
    case Kind::kReduce:
      return to_root ? reduced() : Span{};
    case Kind::kBroadcast:
      if (to_root) return {};
      return slice(is_root() ? operation_.input : operation_.output, rank_);
    default:
      return {};
  }
}

Span MpiPlan::takes_slice(int peer) const {
  const bool takes_all = operation_.kind == Kind::kAllReduce ||
                         (operation_.kind == Kind::kReduce && is_root()) ||
                         (operation_.kind == Kind::kBroadcast && !is_root());
  return takes_all ? slice(operation_.output, peer) : Span{};
}

}  // namespace lockstep
