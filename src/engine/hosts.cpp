#include "engine/hosts.h"

#include <algorithm>
#include <map>

#include "base/process.h"
#include "base/text.h"

namespace lockstep {

Hosts::Hosts(const std::vector<Member>& members) {
  std::map<std::string, std::size_t> known;
  for (const Member& member : members) {
    const auto [found, is_new] = known.emplace(member.host_id, ranks.size());
    if (is_new) ranks.emplace_back();
    auto& here = ranks[found->second];
    host_of.push_back(static_cast<int>(found->second));
    index_of.push_back(static_cast<int>(here.size()));
    here.push_back(static_cast<int>(host_of.size()) - 1);
  }
}

bool seems_alive(const Member& member, const Member& here) {
  return !are_on_one_host(member, here) ||
         is_alive({.pid = member.pid, .start_time = member.start_time});
}

std::string describe(const Member& member) {
  return text::format("rank {} (host {}, pid {})", member.rank, member.host, member.pid);
}

std::string describe(const std::vector<Member>& members, int global_rank) {
  const auto found = std::ranges::find(members, global_rank, &Member::rank);
  return found == members.end() ? text::format("rank {}", global_rank) : describe(*found);
}

}  // namespace lockstep
