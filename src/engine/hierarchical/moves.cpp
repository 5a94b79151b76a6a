// The operations over hosts that only move data. Each byte crosses the wire once per host that
// needs it.

#include <algorithm>
#include <cstring>

#include "engine/hierarchical/steps.h"

namespace lockstep {

using collective::Kind;
using collective::Operation;
using collective::Parts;

// The root's host sends one share of each slice to each other host, and these send it on to each
// other: so no host sends more than there is.
void HostSteps::broadcast() {
  const int root_host = layout_.host_of(operation_.root);
  const int num_slices = layout_.num_teams;
  const bool is_there = layout_.host == root_host;
  std::byte* data =
      layout_.rank == operation_.root ? operation_.input.base : operation_.output.base;
  const auto share_of = [&](const Chunk& chunk, int host) {
    const int place = host < root_host ? host : host - 1;
    return part(part(chunk.range, layout_.my_index, num_slices), place, layout_.num_hosts() - 1);
  };

  const auto enter = [&](Chunk& chunk) {
    if (is_there)
      broadcast_here(layout_.index(operation_.root), at(data, chunk.range), chunk.range.count);
    if (!layout_.is_in_team()) return;
    for_other_hosts([&](int host, int teammate) {
      if (is_there) {
        const Range share = share_of(chunk, host);
        send(chunk, teammate, at(data, share), share.count);
      } else if (host == root_host) {
        const Range share = share_of(chunk, layout_.host);
        receive(chunk, teammate, at(data, share), share.count);
      } else {
        const Range share = share_of(chunk, host);
        receive_answer(chunk, teammate, at(data, share), share.count);
      }
    });
  };
  const auto turn = [&](Chunk& chunk) {
    if (is_there || !layout_.is_in_team()) return;
    wait(chunk.in);
    const Range share = share_of(chunk, layout_.host);
    for_other_hosts([&](int host, int teammate) {
      if (host != root_host) send_answer(chunk, teammate, at(data, share), share.count);
    });
  };
  const auto leave = [&](Chunk& chunk) {
    wait(chunk.answers);
    if (!is_there) share_slices_here(chunk, data);
  };
  pipeline(chunk_elements(num_slices), enter, turn, leave);
}

void HostSteps::broadcast_here(int root_index, std::byte* data, std::size_t count) {
  if (layout_.num_here() == 1) return;
  const bool is_root = layout_.my_index == root_index;
  local_.wait(*start_here(Kind::kBroadcast, root_index, count, is_root ? data : nullptr,
                          is_root ? nullptr : data));
}

void HostSteps::broadcast_small() {
  const int root_host = layout_.host_of(operation_.root);
  const bool is_there = layout_.host == root_host;
  std::byte* data =
      layout_.rank == operation_.root ? operation_.input.base : operation_.output.base;
  const std::size_t count = operation_.count;
  const std::size_t bytes = count * element_;
  Chunk chunk;
  if (is_there) broadcast_here(layout_.index(operation_.root), data, count);
  if (layout_.is_leader() && is_tiny()) {
    exchange_tiny(data, is_there ? bytes : 0);
    if (!is_there) std::memcpy(data, leaders_.payload_of(root_host), bytes);
  } else if (layout_.is_leader()) {
    for_other_hosts([&](int host, int teammate) {
      if (is_there) send(chunk, teammate, data, count);
      if (host == root_host) receive(chunk, teammate, data, count);
    });
    wait(chunk.in);
    wait(chunk.out);
  }
  if (!is_there) broadcast_here(0, data, count);
}

// A rank sends its part to one helper on each other host, who shares it there.
void HostSteps::all_gather() {
  const int num_ranks = layout_.num_ranks();
  const Parts& output = operation_.output;
  const auto helper_of = [&](int peer) {
    return layout_.helper(layout_.host, layout_.index(peer));
  };

  const auto enter = [&](Chunk& chunk) {
    const std::size_t count = chunk.range.count;
    for (int peer = 0; peer < num_ranks; ++peer) {
      if (layout_.is_here(peer) || helper_of(peer) != layout_.rank) continue;
      receive(chunk, peer, at(output.part(peer), chunk.range), count);
    }
    for_other_hosts([&](int, int helper) {
      send(chunk, helper, at(operation_.input.base, chunk.range), count);
    });
    Operation here = step_here(Kind::kAllGather, 0, count);
    here.input.base = at(operation_.input.base, chunk.range);
    for (const int peer : layout_.here()) {
      here.output.list.push_back(at(output.part(peer), chunk.range));
    }
    chunk.local.push_back(local_.start(std::move(here)));
  };
  const auto turn = [](Chunk&) {};
  const auto leave = [&](Chunk& chunk) {
    wait(chunk.in);
    for (int peer = 0; peer < num_ranks && layout_.num_here() > 1; ++peer) {
      if (layout_.is_here(peer)) continue;
      const bool is_mine = helper_of(peer) == layout_.rank;
      std::byte* memory = at(output.part(peer), chunk.range);
      chunk.local.push_back(start_here(Kind::kBroadcast, layout_.index(helper_of(peer)),
                                       chunk.range.count, is_mine ? memory : nullptr,
                                       is_mine ? nullptr : memory));
    }
  };
  pipeline(chunk_elements_of_parts(), enter, turn, leave);
}

// The leaders collect the parts of their hosts, tell them to each other, and share all of them.
void HostSteps::all_gather_tiny() {
  const std::size_t bytes = operation_.count * element_;
  const auto num_ranks = static_cast<std::size_t>(layout_.num_ranks());
  std::byte* all = scratch((num_ranks + layout_.here().size()) * bytes);  // by rank
  std::byte* of_host = all + num_ranks * bytes;                           // by index
  Operation here = step_here(Kind::kGather, 0, operation_.count);
  here.input.base = operation_.input.base;
  if (layout_.is_leader()) here.output = {.base = of_host, .stride = bytes};
  local_.wait(*local_.start(std::move(here)));
  if (layout_.is_leader()) {
    exchange_tiny(of_host, layout_.here().size() * bytes);
    for (int peer = 0; peer < layout_.num_ranks(); ++peer) {
      const std::byte* parts =
          layout_.is_here(peer) ? of_host : leaders_.payload_of(layout_.host_of(peer));
      std::memcpy(all + static_cast<std::size_t>(peer) * bytes,
                  parts + static_cast<std::size_t>(layout_.index(peer)) * bytes, bytes);
    }
  }
  broadcast_here(0, all, num_ranks * operation_.count);
  for (int peer = 0; peer < layout_.num_ranks(); ++peer) {
    std::memcpy(operation_.output.part(peer), all + static_cast<std::size_t>(peer) * bytes, bytes);
  }
}

// The parts of the ranks of this host.
Parts HostSteps::parts_here(const Parts& all) const {
  Parts parts;
  for (const int peer : layout_.here()) {
    parts.list.push_back(all.part(peer));
    if (!all.counts.empty()) parts.counts.push_back(all.counts[static_cast<std::size_t>(peer)]);
  }
  return parts;
}

// In the next three, every rank has its own messages with those of other hosts.
void HostSteps::gather() {
  const int root = operation_.root;
  const bool is_root = layout_.rank == root;
  Chunk chunk;
  if (layout_.is_here(root)) {
    Operation here = step_here(Kind::kGather, layout_.index(root), operation_.count);
    here.input.base = operation_.input.base;
    if (is_root) here.output = parts_here(operation_.output);
    chunk.local.push_back(local_.start(std::move(here)));
  } else {
    send(chunk, root, operation_.input.base, operation_.count);
  }
  for (int peer = 0; peer < layout_.num_ranks() && is_root; ++peer) {
    if (layout_.is_here(peer)) continue;
    receive(chunk, peer, operation_.output.part(peer), operation_.count);
  }
  finish(chunk);
}

void HostSteps::scatter() {
  const int root = operation_.root;
  const bool is_root = layout_.rank == root;
  Chunk chunk;
  if (layout_.is_here(root)) {
    Operation here = step_here(Kind::kScatter, layout_.index(root), operation_.count);
    if (is_root) here.input = parts_here(operation_.input);
    here.output.base = operation_.output.base;
    chunk.local.push_back(local_.start(std::move(here)));
  } else {
    receive(chunk, root, operation_.output.base, operation_.count);
  }
  for (int peer = 0; peer < layout_.num_ranks() && is_root; ++peer) {
    if (layout_.is_here(peer)) continue;
    send(chunk, peer, operation_.input.part(peer), operation_.count);
  }
  finish(chunk);
}

void HostSteps::all_to_all() {
  const Parts& input = operation_.input;
  const Parts& output = operation_.output;
  const std::size_t count = operation_.count;
  Chunk chunk;
  for (int peer = 0; peer < layout_.num_ranks(); ++peer) {
    if (layout_.is_here(peer)) continue;
    receive(chunk, peer, output.part(peer), output.count_from(peer, 0, count));
    send(chunk, peer, input.part(peer), input.count_from(peer, 0, count));
  }
  Operation here = step_here(Kind::kAllToAll, 0, count);
  here.input = parts_here(input);
  here.output = parts_here(output);
  chunk.local.push_back(local_.start(std::move(here)));
  finish(chunk);
}

}  // namespace lockstep
