// Which device each rank gets, of what all ranks have told of themselves.

#include "world/device.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

struct Seen {
  std::string host;
  std::string ids;
  int count = 0;
  std::string type = "cuda";
};

std::vector<Member> world_of(const std::vector<Seen>& all) {
  std::vector<Member> members;
  for (const Seen& seen : all) {
    Member member;
    member.rank = static_cast<int>(members.size()) + 10;  // as in a part of a world
    member.host = member.host_id = seen.host;
    for (const Member& other : members) member.local_rank += other.host_id == seen.host ? 1 : 0;
    member.device_type = seen.count > 0 ? seen.type : "";
    member.num_devices = seen.count;
    member.visible_devices = seen.ids;
    members.push_back(member);
  }
  number_devices(members);
  return members;
}

// Of all ranks: "0 1 cpu", or the one message that all ranks throw.
std::string devices(const std::vector<Member>& members, const std::string& name = "auto",
                    bool takes_devices = true) {
  std::string all;
  std::string message;
  int num_thrown = 0;
  for (int rank = 0; rank < static_cast<int>(members.size()); ++rank) {
    try {
      const at::Device device = choose_device(members, rank, name, takes_devices);
      all += (all.empty() ? "" : " ") + (device.is_cpu() ? "cpu" : std::to_string(device.index()));
    } catch (const UsageError& error) {
      EXPECT_EQ(error.rank(), members[static_cast<std::size_t>(rank)].rank);
      if (num_thrown++ > 0) {
        EXPECT_EQ(message, error.message());
      }
      message = error.message();
    }
  }
  if (num_thrown == 0) return all;
  EXPECT_EQ(num_thrown, static_cast<int>(members.size()));
  return message;
}

void expect_has(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

TEST(ChooseDevice, RanksThatSeeTheSameDevicesHaveOneEach) {
  EXPECT_EQ(devices(world_of({{"a", "", 2}, {"a", "", 2}, {"b", "", 1}})), "0 1 0");
  EXPECT_EQ(devices(world_of({{"a", "0", 1}, {"a", "1", 1}})), "0 0");  // each its own
  EXPECT_EQ(devices(world_of({{"a", "0,1", 2}, {"a", "2,3", 2}, {"a", "0,1", 2}, {"a", "2,3", 2}})),
            "0 0 1 1");
  std::vector<Member> reversed = world_of({{"a", "", 2}, {"a", "", 2}});
  std::swap(reversed[0].local_rank, reversed[1].local_rank);
  number_devices(reversed);
  EXPECT_EQ(devices(reversed), "1 0");
}

TEST(ChooseDevice, MoreRanksThanDevicesAreAnErrorOfAllRanks) {
  expect_has(devices(world_of({{"a", "", 1}, {"a", "", 1}, {"b", "", 1}})),
             "Rank 11 has no device of its own: it sees 1 of type cuda");
  expect_has(devices(world_of({{"a", "", 2}, {"a", "", 2}, {"a", "", 2}}), "cuda"),
             "Rank 12 has no device of its own: it sees 2 of type cuda");
  EXPECT_EQ(devices(world_of({{"a", "", 1}, {"a", "", 1}}), "cpu"), "cpu cpu");
  EXPECT_EQ(devices(world_of({{"a", "", 1}, {"a", "", 1}}), "cuda:0"), "0 0");  // by number
}

TEST(ChooseDevice, AllRanksHaveTheSameKind) {
  const auto mixed = world_of({{"a", "", 1}, {"b", "", 0}});
  EXPECT_EQ(devices(mixed), "cpu cpu");
  expect_has(devices(mixed, "cuda"), "There is no device cuda on rank 11, which sees the CPU only");
  EXPECT_EQ(devices(world_of({{"a", "", 1}, {"b", "", 1, "xpu"}})), "cpu cpu");
  EXPECT_EQ(devices(world_of({{"a", "", 0}, {"b", "", 1}})), "cpu cpu");
  EXPECT_EQ(devices(world_of({{"a", "", 1}, {"b", "", 1}}), "auto", false), "cpu cpu");
  EXPECT_EQ(devices(world_of({{"a", "", 1}, {"b", "", 1}}), "cuda", false), "0 0");
  expect_has(devices(mixed, "gpu"), "'gpu' is not a device");
}

}  // namespace
}  // namespace lockstep
