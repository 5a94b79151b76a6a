// HostSteps: one operation over all hosts, as steps inside this host (shared memory) and steps
// between hosts (messages), on raw memory.
//
// Words. An operation is cut into chunks, a chunk into one slice for each team (layout.h), a
// slice into one share for each host. A large all-reduce goes like this, chunk by chunk:
//   enter  inside each host, the rank with index j sums slice j of all ranks of the host; it sends
//          share h of that to its teammate on host h
//   turn   each rank sums the shares that have come, one from each host, and sends the result to
//          its teammates
//   leave  slice j is complete on the rank with index j of each host, and is copied by the others
// While chunk t enters, chunk t-1 turns and chunk t-2 leaves, so that memory and wire are both
// busy. Each byte crosses the wire once per host and direction, and all teams use it at the same
// time. What is small goes in one step between the leaders instead, and what is tiny in the message
// by which they compare what they are at (leaders.h).
//
// Invariant: what is summed, and in which order, depends on the layout alone: the tree over the
// ranks of each host, in the order of ranks, then the tree over hosts. f16 and bf16 are rounded
// once more, between the two.
// Threading: one thread; it waits.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "engine/hierarchical/layout.h"
#include "engine/hierarchical/leaders.h"
#include "engine/hierarchical/wire.h"
#include "shm/group.h"

namespace lockstep {

class HostSteps : public std::enable_shared_from_this<HostSteps> {
 public:
  HostSteps(const HostLayout& layout, shm::Group& local, Wire& wire)
      : layout_(layout), local_(local), wire_(wire), leaders_(layout, wire) {}

  // The number is that of the operation, the same on all ranks.
  // Throws what the group and the wire throw, and MismatchError.
  void run(collective::Operation operation, std::uint64_t number);

  // Lets go of messages under way.
  void drop() noexcept { leaders_.drop(); }

 private:
  using LocalRequest = std::shared_ptr<collective::Request>;

  struct Range {
    std::size_t first = 0;  // element
    std::size_t count = 0;
  };
  // What is under way of a chunk.
  struct Chunk {
    int number = 0;
    Range range = {};
    std::vector<LocalRequest> local = {};
    std::vector<Parcel> in = {};
    std::vector<Parcel> answers = {};
    std::vector<Parcel> out = {};
  };
  using Stage = std::function<void(Chunk&)>;
  static constexpr int kInFlight = 3;  // chunks

  // steps.cpp
  void run_steps();
  void compare_here();
  void compare(int peer, const OperationHeader& theirs) const;
  bool is_tiny() const;
  void hear_leaders();
  void exchange_tiny(const std::byte* payload, std::size_t bytes);
  void pipeline(std::size_t elements_per_chunk, const Stage& enter, const Stage& turn,
                const Stage& leave);
  void finish(Chunk& chunk);
  std::size_t chunk_elements(int num_slices) const;
  std::size_t chunk_elements_of_parts() const;
  Range part(Range whole, int index, int num_parts) const;
  template <typename Byte>
  Byte* at(Byte* base, Range range) const {
    return base + range.first * element_;
  }
  std::byte* scratch(std::size_t bytes);
  bool is_small() const;
  bool averages_here() const;
  collective::Reduction in_host() const;
  bool must_reduce_here() const;
  collective::Operation step_here(collective::Kind kind, int root_index, std::size_t count) const;
  LocalRequest start_here(collective::Kind kind, int root_index, std::size_t count,
                          const std::byte* input, std::byte* output);
  void send(Chunk& chunk, int peer, const std::byte* memory, std::size_t count);
  void receive(Chunk& chunk, int peer, std::byte* memory, std::size_t count);
  void send_answer(Chunk& chunk, int peer, const std::byte* memory, std::size_t count);
  void receive_answer(Chunk& chunk, int peer, std::byte* memory, std::size_t count);
  void wait(std::vector<Parcel>& parcels);
  void wait(Parcel& parcel);
  void wait(std::vector<LocalRequest>& requests);
  void sum_hosts(const std::vector<const void*>& inputs, std::byte* output, std::size_t count);
  void for_other_hosts(const std::function<void(int host, int teammate)>& f) const;

  // reductions.cpp
  void all_reduce();
  void all_reduce_small();
  void sum_slices_here(Chunk& chunk, const std::byte* data, std::byte* target);
  void share_slices_here(Chunk& chunk, std::byte* data);
  void reduce();
  void reduce_scatter();

  // moves.cpp
  void broadcast();
  void broadcast_small();
  void broadcast_here(int root_index, std::byte* data, std::size_t count);
  collective::Parts parts_here(const collective::Parts& all) const;
  void all_gather();
  void all_gather_tiny();
  void gather();
  void scatter();
  void all_to_all();

  // Constant after construction.
  const HostLayout& layout_;
  shm::Group& local_;
  Wire& wire_;
  const collective::Simd simd_ = collective::best_simd();

  Leaders leaders_;

  // Of the operation that runs.
  collective::Operation operation_;
  collective::Activity activity_;
  OperationHeader header_;
  int tag_ = 0;
  std::size_t element_ = 1;

  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace lockstep
