// MpiPlan: who gives which bytes to whom in one piece of an operation. A pure function.
//
// An operation is cut into pieces, and each piece is an exchange between all pairs of ranks, then,
// for some kinds, a reduction and a second exchange:
//   all_reduce      each rank gives every other its slice; reduces its own; gives it to all
//   reduce          likewise, and then gives it to the root
//   broadcast       the root gives every rank its slice, which then gives it to the others
//   reduce_scatter  each gives every other its part, and reduces its own
//   the others      one exchange of whole parts
// Small pieces of the first three go to all (or to the root) whole, and need no second exchange.
// Reductions are computed in one place each, from all ranks' bytes in the order of ranks, so that
// the sum is the tree of collective/reduce.h.
#pragma once

#include <cstddef>

#include "collective/operation.h"

namespace lockstep {

struct Span {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

class MpiPlan {
 public:
  // Spans up to this size travel with the header, and operations up to it in one exchange.
  static constexpr std::size_t kSmallBytes = 4096;

  // How many elements of each part go into one piece: what bounds scratch_bytes().
  static std::size_t elements_per_piece(const collective::Operation& operation, int size);

  MpiPlan(const collective::Operation& operation, int rank, int size, std::size_t first,
          std::size_t count);

  std::size_t scratch_bytes() const;  // at most; needed before any of the following
  void use_scratch(std::byte* memory) { scratch_ = memory; }

  // First exchange. Where ranks reduce, `takes` is scratch memory, and this rank's own is where it
  // is already.
  Span gives(int peer) const;
  Span takes(int peer) const;

  bool reduces() const;  // on this rank
  Span reduced() const;  // where the reduction of all takes(...) goes

  bool has_second_exchange() const { return is_sliced_; }
  Span gives_slice(int peer) const;
  Span takes_slice(int peer) const;

 private:
  bool is_reduction() const;
  bool is_root() const { return rank_ == operation_.root; }
  std::size_t begin_of_slice(int rank) const;  // elements from first_ on
  Span span(const collective::Parts& parts, int part) const;
  Span slice(const collective::Parts& parts, int rank) const;
  Span scratch(int index) const;

  const collective::Operation& operation_;
  const int rank_;
  const int size_;
  const std::size_t first_;  // elements of each part
  const std::size_t count_;
  const std::size_t element_bytes_;
  bool is_sliced_ = false;
  std::byte* scratch_ = nullptr;
};

}  // namespace lockstep
