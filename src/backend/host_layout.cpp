#include "backend/host_layout.h"

#include <algorithm>
#include <map>

namespace lockstep {

HostLayout::HostLayout(int its_rank, const std::vector<Member>& members) : rank(its_rank) {
  std::map<std::string, std::size_t> known;
  for (const Member& member : members) {
    const auto [found, is_new] = known.emplace(member.host_id, hosts.size());
    if (is_new) hosts.emplace_back();
    auto& ranks = hosts[found->second];
    host_of.push_back(static_cast<int>(found->second));
    index_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(member.rank);
  }
  host = host_of[static_cast<std::size_t>(rank)];
  my_index = index(rank);
  num_teams = static_cast<int>(
      std::ranges::min(hosts, {}, [](const auto& ranks) { return ranks.size(); }).size());
}

}  // namespace lockstep
