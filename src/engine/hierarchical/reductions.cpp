// The reductions over hosts: a sum inside each host, then the sum over hosts.

#include <algorithm>
#include <cstring>

#include "engine/hierarchical/steps.h"

namespace lockstep {

using collective::Kind;

// The picture is in steps.h.
void HostSteps::all_reduce() {
  std::byte* data = operation_.output.base;
  if (operation_.input.base != data) {
    std::memcpy(data, operation_.input.base, operation_.count * element_);
  }
  const int num_slices = layout_.num_teams;
  const int num_hosts = layout_.num_hosts();
  const int mine = layout_.my_index;
  const std::size_t chunk_count = chunk_elements(num_slices);
  const Range largest = part(part({0, chunk_count}, 0, num_slices), 0, num_hosts);
  std::byte* memory = scratch(2 * layout_.num_hosts() * largest.count * element_);
  const auto arriving = [&](const Chunk& chunk, int host) {
    const int place = chunk.number % 2 * num_hosts + host;
    return memory + static_cast<std::size_t>(place) * largest.count * element_;
  };
  const auto share_of = [&](const Chunk& chunk, int host) {
    return part(part(chunk.range, mine, num_slices), host, num_hosts);
  };

  const auto enter = [&](Chunk& chunk) {
    sum_slices_here(chunk, data, at(data, part(chunk.range, mine, num_slices)));
    if (!layout_.is_in_team()) return;
    const Range my_share = share_of(chunk, layout_.host);
    for_other_hosts([&](int host, int teammate) {
      const Range share = share_of(chunk, host);
      receive(chunk, teammate, arriving(chunk, host), my_share.count);
      // Comes only after the share has arrived there: it is not overwritten before it is sent.
      receive_answer(chunk, teammate, at(data, share), share.count);
      send(chunk, teammate, at(data, share), share.count);
    });
  };
  const auto turn = [&](Chunk& chunk) {
    if (!layout_.is_in_team()) return;
    wait(chunk.in);
    const Range my_share = share_of(chunk, layout_.host);
    std::vector<const void*> inputs;
    for (int host = 0; host < num_hosts; ++host) {
      inputs.push_back(host == layout_.host ? at(data, my_share) : arriving(chunk, host));
    }
    sum_hosts(inputs, at(data, my_share), my_share.count);
    for_other_hosts([&](int, int teammate) {
      send_answer(chunk, teammate, at(data, my_share), my_share.count);
    });
  };
  const auto leave = [&](Chunk& chunk) {
    wait(chunk.answers);
    share_slices_here(chunk, data);
  };
  pipeline(chunk_count, enter, turn, leave);
}

// On return, the host's sum of this rank's slice of `data` is at `target`.
void HostSteps::sum_slices_here(Chunk& chunk, const std::byte* data, std::byte* target) {
  if (!must_reduce_here()) return;
  LocalRequest own;
  for (int k = 0; k < layout_.num_teams; ++k) {
    const Range slice = part(chunk.range, k, layout_.num_teams);
    if (slice.count == 0) continue;
    const bool is_mine = k == layout_.my_index;
    chunk.local.push_back(
        start_here(Kind::kReduce, k, slice.count, at(data, slice), is_mine ? target : nullptr));
    if (is_mine) own = chunk.local.back();
  }
  if (own) local_.wait(*own);
}

// All ranks of this host get slice k from the one with index k.
void HostSteps::share_slices_here(Chunk& chunk, std::byte* data) {
  if (layout_.num_here() == 1) return;
  for (int k = 0; k < layout_.num_teams; ++k) {
    const Range slice = part(chunk.range, k, layout_.num_teams);
    if (slice.count == 0) continue;
    const bool is_mine = k == layout_.my_index;
    chunk.local.push_back(start_here(Kind::kBroadcast, k, slice.count,
                                     is_mine ? at(data, slice) : nullptr,
                                     is_mine ? nullptr : at(data, slice)));
  }
}

// One step between the leaders: all tell all, and each adds up.
void HostSteps::all_reduce_small() {
  std::byte* data = operation_.output.base;
  const std::size_t count = operation_.count;
  const std::size_t bytes = count * element_;
  const bool is_leader = layout_.is_leader();
  Chunk chunk;
  std::vector<const void*> inputs(static_cast<std::size_t>(layout_.num_hosts()), data);
  if (is_leader && !is_tiny()) {
    std::byte* memory = scratch(layout_.num_hosts() * bytes);
    for_other_hosts([&](int host, int teammate) {
      std::byte* arriving = memory + static_cast<std::size_t>(host) * bytes;
      inputs[static_cast<std::size_t>(host)] = arriving;
      receive(chunk, teammate, arriving, count);
    });
  }
  if (must_reduce_here()) {
    local_.wait(
        *start_here(Kind::kReduce, 0, count, operation_.input.base, is_leader ? data : nullptr));
  } else if (operation_.input.base != data) {
    std::memcpy(data, operation_.input.base, bytes);
  }
  if (is_leader && is_tiny()) {
    exchange_tiny(data, bytes);
    for_other_hosts(
        [&](int host, int) { inputs[static_cast<std::size_t>(host)] = leaders_.payload_of(host); });
  } else if (is_leader) {
    for_other_hosts([&](int, int teammate) { send(chunk, teammate, data, count); });
    wait(chunk.in);
    wait(chunk.out);
  }
  if (is_leader) sum_hosts(inputs, data, count);
  if (layout_.num_here() == 1) return;
  local_.wait(*start_here(Kind::kBroadcast, 0, count, is_leader ? data : nullptr,
                          is_leader ? nullptr : data));
}

// Slices of the host's sums go to the root's host, which adds them up and gives them to the root.
// Only the root's tensor changes.
void HostSteps::reduce() {
  const int root_host = layout_.host_of(operation_.root);
  const int num_slices = layout_.num_teams;
  const int num_hosts = layout_.num_hosts();
  const int mine = layout_.my_index;
  const bool is_there = layout_.host == root_host;
  const bool is_root = layout_.rank == operation_.root;
  const std::size_t chunk_count = chunk_elements(num_slices);
  const std::size_t slice_bytes = part({0, chunk_count}, 0, num_slices).count * element_;
  std::byte* memory = scratch((layout_.num_hosts() + 1) * kInFlight * slice_bytes);
  // The last place is for this host's own sum, and then for that of all.
  const auto place = [&](const Chunk& chunk, int host) {
    const int index = chunk.number % kInFlight * (num_hosts + 1) + host;
    return memory + static_cast<std::size_t>(index) * slice_bytes;
  };
  const auto my_slice = [&](const Chunk& chunk) { return part(chunk.range, mine, num_slices); };
  const std::byte* input = operation_.input.base;

  const auto enter = [&](Chunk& chunk) {
    const Range slice = my_slice(chunk);
    std::byte* own = place(chunk, num_hosts);
    sum_slices_here(chunk, input, own);
    if (!layout_.is_in_team()) return;
    if (!must_reduce_here()) std::memcpy(own, at(input, slice), slice.count * element_);
    for_other_hosts([&](int host, int teammate) {
      if (is_there) receive(chunk, teammate, place(chunk, host), slice.count);
      if (host == root_host) send(chunk, teammate, own, slice.count);
    });
  };
  const auto turn = [&](Chunk& chunk) {
    if (!is_there || !layout_.is_in_team()) return;
    wait(chunk.in);
    std::vector<const void*> inputs;
    for (int host = 0; host < num_hosts; ++host) {
      inputs.push_back(place(chunk, host == layout_.host ? num_hosts : host));
    }
    sum_hosts(inputs, place(chunk, num_hosts), my_slice(chunk).count);
  };
  const auto leave = [&](Chunk& chunk) {
    if (!is_there) return;
    for (int k = 0; k < num_slices; ++k) {
      const Range slice = part(chunk.range, k, num_slices);
      if (slice.count == 0) continue;
      chunk.local.push_back(start_here(Kind::kBroadcast, k, slice.count,
                                       k == mine ? place(chunk, num_hosts) : nullptr,
                                       is_root ? at(operation_.output.base, slice) : nullptr));
    }
  };
  pipeline(chunk_count, enter, turn, leave);
}

// On each host, a helper adds up the host's contributions to the part of a rank, and sends the sum
// to that rank.
void HostSteps::reduce_scatter() {
  const int num_ranks = layout_.num_ranks();
  const int num_hosts = layout_.num_hosts();
  const std::size_t chunk_count = chunk_elements_of_parts();
  const std::size_t places =
      static_cast<std::size_t>(num_ranks) + static_cast<std::size_t>(num_hosts);
  std::byte* memory = scratch(places * kInFlight * chunk_count * element_);
  const auto place = [&](const Chunk& chunk, int index) {
    const std::size_t number = static_cast<std::size_t>(chunk.number % kInFlight) * places +
                               static_cast<std::size_t>(index);
    return memory + number * chunk_count * element_;
  };
  const auto arriving = [&](const Chunk& chunk, int host) {
    return place(chunk, num_ranks + host);
  };
  const auto given = [&](const Chunk& chunk, int to) {
    return at(operation_.input.part(to), chunk.range);
  };
  // Where this host's sum for a rank is, on the helper.
  const auto sum_for = [&](const Chunk& chunk, int to) {
    return must_reduce_here() ? place(chunk, to) : given(chunk, to);
  };

  const auto enter = [&](Chunk& chunk) {
    const std::size_t count = chunk.range.count;
    for_other_hosts(
        [&](int host, int helper) { receive(chunk, helper, arriving(chunk, host), count); });
    for (int to = 0; to < num_ranks && must_reduce_here(); ++to) {
      const int helper = layout_.helper(layout_.host, layout_.index(to));
      chunk.local.push_back(start_here(Kind::kReduce, layout_.index(helper), count,
                                       given(chunk, to),
                                       helper == layout_.rank ? place(chunk, to) : nullptr));
    }
    wait(chunk.local);
    for (int to = 0; to < num_ranks; ++to) {
      const bool is_mine = layout_.helper(layout_.host, layout_.index(to)) == layout_.rank;
      if (!layout_.is_here(to) && is_mine) send(chunk, to, sum_for(chunk, to), count);
    }
  };
  const auto turn = [](Chunk&) {};
  const auto leave = [&](Chunk& chunk) {
    wait(chunk.in);
    std::vector<const void*> inputs;
    for (int host = 0; host < num_hosts; ++host) {
      inputs.push_back(host == layout_.host ? sum_for(chunk, layout_.rank) : arriving(chunk, host));
    }
    sum_hosts(inputs, at(operation_.output.base, chunk.range), chunk.range.count);
  };
  pipeline(chunk_count, enter, turn, leave);
}

}  // namespace lockstep
