#include "engine/hierarchical/layout.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

std::vector<Member> members_on(const std::string& hosts) {
  std::vector<Member> members;
  for (const char host : hosts) {
    members.push_back({.rank = static_cast<int>(members.size()), .host_id = {host}});
  }
  return members;
}

TEST(HostLayout, NumbersHostsByTheirLowestRank) {
  const HostLayout layout(3, members_on("bacab"));
  const std::vector<std::vector<int>> expected = {{0, 4}, {1, 3}, {2}};
  EXPECT_EQ(layout.hosts.ranks, expected);
  EXPECT_EQ(layout.host, 1);
  EXPECT_EQ(layout.my_index, 1);
  EXPECT_TRUE(layout.is_here(1));
  EXPECT_FALSE(layout.is_here(0));
}

TEST(HostLayout, HasAsManyTeamsAsTheSmallestHostHasRanks) {
  EXPECT_EQ(HostLayout(0, members_on("aabb")).num_teams, 2);
  EXPECT_EQ(HostLayout(0, members_on("aaab")).num_teams, 1);
  EXPECT_TRUE(HostLayout(3, members_on("aaab")).is_in_team());
  EXPECT_FALSE(HostLayout(1, members_on("aaab")).is_in_team());
}

TEST(HostLayout, FindsAHelperOnHostsWithFewerRanks) {
  const HostLayout layout(2, members_on("aaabb"));
  EXPECT_EQ(layout.helper(1, 0), 3);
  EXPECT_EQ(layout.helper(1, 1), 4);
  EXPECT_EQ(layout.helper(1, 2), 3);
}

// In a part of a world, ranks are places; only errors name members by their ranks of the whole.
TEST(HostLayout, OfAPartCountsPlaces) {
  std::vector<Member> members = members_on("abab");
  members.erase(members.begin());
  std::swap(members.front(), members.back());  // ranks 3, 2, 1 on hosts b, a, b
  const HostLayout layout(2, members);
  const std::vector<std::vector<int>> expected = {{0, 2}, {1}};
  EXPECT_EQ(layout.hosts.ranks, expected);
  EXPECT_EQ(layout.my_index, 1);
  EXPECT_EQ(layout.global_rank(0), 3);
  EXPECT_EQ(layout.global_rank(2), 1);
  EXPECT_EQ(layout.global_rank(-1), -1);
}

}  // namespace
}  // namespace lockstep
