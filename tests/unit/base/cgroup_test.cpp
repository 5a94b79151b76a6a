#include "base/cgroup.h"

#include <gtest/gtest.h>

#include <limits>

#include "support/fake_system.h"

namespace lockstep::test {
namespace {

TEST(Cgroup, TheTightestLimitOnTheWayUpCounts) {
  const FakeSystem v2;
  v2.write("/proc/self/cgroup", "0::/jobs/mine");
  EXPECT_EQ(memory_left_in_cgroup(v2.root()), std::numeric_limits<std::uint64_t>::max());
  v2.write("/sys/fs/cgroup/jobs/mine/memory.max", "max");
  v2.write("/sys/fs/cgroup/jobs/mine/memory.current", "500");
  v2.write("/sys/fs/cgroup/jobs/memory.max", "2000");
  v2.write("/sys/fs/cgroup/jobs/memory.current", "600");
  EXPECT_EQ(memory_left_in_cgroup(v2.root()), 1400);
  v2.write("/sys/fs/cgroup/jobs/mine/memory.max", "700");
  EXPECT_EQ(memory_left_in_cgroup(v2.root()), 200);
  // What a program has read stays in memory as long as nobody needs the room.
  v2.write("/sys/fs/cgroup/jobs/mine/memory.stat",
           "anon 100\nfile 390\ninactive_file 300\nactive_file 50\nslab_reclaimable 10\n");
  EXPECT_EQ(memory_left_in_cgroup(v2.root()), 560);

  const FakeSystem v1;
  v1.write("/proc/self/cgroup", "4:memory:/job\n0::/");
  v1.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000");
  v1.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "900");
  v1.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  v1.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000");
  EXPECT_EQ(memory_left_in_cgroup(v1.root()), 100);
}

TEST(Cgroup, EachLimitIsOneGroups) {
  const FakeSystem one;
  one.write("/proc/self/cgroup", "0::/jobs/mine");
  one.write("/sys/fs/cgroup/jobs/mine/cpu.max", "50000 100000");
  one.write("/sys/fs/cgroup/jobs/mine/memory.current", "0");  // without a limit
  one.write("/sys/fs/cgroup/jobs/cpu.max", "max 100000");
  one.write("/sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_TRUE(memory_limits(one.root()).empty());
  const auto limits = core_limits(one.root());
  ASSERT_EQ(limits.size(), 2);
  EXPECT_DOUBLE_EQ(limits[0].amount, 0.5);
  EXPECT_DOUBLE_EQ(limits[1].amount, 4);
  EXPECT_NE(limits[0].group, limits[1].group);
  one.write("/proc/self/cgroup", "0::/jobs/other");
  one.write("/sys/fs/cgroup/jobs/other/cpu.max", "50000 100000");
  const auto others = core_limits(one.root());
  EXPECT_NE(limits[0].group, others[0].group);
  EXPECT_EQ(limits[1].group, others[1].group);
}

TEST(Cgroup, OldOnesHaveTwoFilesForTheQuota) {
  FakeSystem system;
  system.write("/proc/self/cgroup", "5:cpu,cpuacct:/box\n3:cpuset:/box\n");
  system.write("/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n");
  system.write("/sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cores_in_cgroup(system.root()), std::numeric_limits<double>::infinity());
  system.write("/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "150000\n");
  EXPECT_DOUBLE_EQ(cores_in_cgroup(system.root()), 1.5);
}

}  // namespace
}  // namespace lockstep::test
