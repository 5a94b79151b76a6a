// Tensors that the ranks of a host have once (ddp/shards.h): one rank hashes, reads and writes each
// of them for all.
#pragma once

#include <lockstep/world.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/parts.h"

namespace lockstep {

// Whose memory these tensors are in, in their order.
std::vector<std::shared_ptr<Shards>> holders_of(const std::vector<NamedTensor>& tensors);

// Throws: UsageError if a rank that shares some of this is not in `world`: it would not take part.
void check_sharers(const World& world, const std::vector<NamedTensor>& tensors,
                   const std::vector<SharedState>& states = {},
                   const std::vector<SlicedState>& sliced = {});

// As hashes_of(), but 0 for what other ranks of the host hash, and for what all of `world` share.
std::vector<std::int64_t> hashes_of_mine(const World& world, std::vector<NamedTensor> tensors);
// Puts in what other ranks of the host have hashed. Collective. Requires: the tensors are alike on
// all ranks.
void take_hashes_of_host(const World& world, const std::vector<NamedTensor>& tensors,
                         std::vector<std::int64_t>& hashes);

// Whether this rank writes to a tensor that is loaded. `reader`: who reads all and sends it to the
// others, as a global rank; -1: each rank reads.
bool is_written_here(const at::Tensor& tensor, int reader);

// Whether this process has the parameter for itself.
bool is_plain(const at::Tensor& parameter);

// Zeros for a state of this parameter. Where ranks share the parameter, it is added to
// `wish.shared`, and has memory after make_memory(): with the values of the last step, if any.
// Where they have slices, to `wish.sliced`.
at::Tensor make_state(const at::Tensor& parameter, const std::string& name, at::ScalarType type,
                      Wish& wish);
// Collective on the hosts.
void make_memory(const std::vector<SharedState>& states);

// Puts tensors without memory, of the sizes of the whole, in the place of slices.
void set_slices_aside(Snapshot& snapshot);
// The whole tensor, in main memory, on rank `writer` of `world`, -1: on all; elsewhere undefined.
// Collective.
at::Tensor gather_slice(const World& world, const at::Tensor& slice, int writer);
// What is loaded, after its parameter: `whole` is in main memory; undefined: zeros.
void take_slice(const SlicedState& state, const at::Tensor& whole);

}  // namespace lockstep
