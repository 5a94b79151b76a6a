#include "launch/cores.h"

#include <gtest/gtest.h>

#include "support/fake_system.h"

namespace lockstep::test {
namespace {

// Two nodes of four cores with two threads each, numbered as most machines do: cpu c and c + 8 are
// one core.
FakeSystem two_sockets() {
  FakeSystem system;
  for (int cpu = 0; cpu < 16; ++cpu) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    system.write(folder + "/topology/thread_siblings_list",
                 std::to_string(cpu % 8) + "," + std::to_string(cpu % 8 + 8) + "\n");
  }
  system.write("/sys/devices/system/node/node0/cpulist", "0-3,8-11\n");
  system.write("/sys/devices/system/node/node1/cpulist", "4-7,12-15\n");
  return system;
}

std::vector<int> all_16() { return parse_cpu_list("0-15"); }

TEST(Cores, CpuListsReadAndWrite) {
  EXPECT_EQ(parse_cpu_list("0-3,8\n"), (std::vector<int>{0, 1, 2, 3, 8}));
  EXPECT_EQ(parse_cpu_list(""), std::vector<int>{});
  EXPECT_EQ(to_cpu_list({8, 2, 1, 0, 9, 4}), "0-2,4,8-9");
}

TEST(Cores, ReadsCoresNodesAndGpus) {
  FakeSystem system = two_sockets();
  Machine machine = read_machine(system.root(), all_16());
  EXPECT_EQ(machine.num_cores(), 8);
  EXPECT_EQ(machine.num_nodes(), 2);
  EXPECT_EQ(ranks_for(machine), 8);
  system.write("/dev/nvidia0", "");
  system.write("/dev/nvidia1", "");
  system.write("/dev/nvidiactl", "");
  EXPECT_EQ(ranks_for(read_machine(system.root(), all_16())), 2);
  // A container may run on two threads of one core.
  machine = read_machine(system.root(), {3, 11});
  EXPECT_EQ(machine.num_cores(), 1);
  EXPECT_EQ(machine.cpus.size(), 2U);
}

// As CUDA counts them: up to the first that is not there.
TEST(Cores, OnlyVisibleGpusCount) {
  FakeSystem system = two_sockets();
  for (const char* device : {"0", "1", "2", "3", "ctl", "-uvm"}) {
    system.write(std::string("/dev/nvidia") + device, "");
  }
  for (const auto& [visible, ranks] :
       std::vector<std::pair<std::string, int>>{{"0", 1},
                                                {"2,3", 2},
                                                {"3, 1 ,0", 3},
                                                {"0,1,-1,2", 2},
                                                {"1,4,2", 1},
                                                {"GPU-8932f937,GPU-1", 2},
                                                {"MIG-41b8", 1},
                                                {"0,1,2,3", 4}}) {
    EXPECT_EQ(ranks_for(read_machine(system.root(), all_16(), visible)), ranks) << visible;
  }
  // None: a rank for each core.
  for (const char* visible : {"", "-1", "NoDevFiles"}) {
    EXPECT_EQ(read_machine(system.root(), all_16(), visible).num_gpus, 0) << visible;
    EXPECT_EQ(ranks_for(read_machine(system.root(), all_16(), visible)), 8) << visible;
  }
  const FakeSystem none = two_sockets();
  EXPECT_EQ(ranks_for(read_machine(none.root(), all_16(), "0,GPU-8932f937")), 8);
}

TEST(Cores, RanksGetWholeCoresOfOneNode) {
  const FakeSystem system = two_sockets();
  const Machine machine = read_machine(system.root(), all_16());
  const auto shares = split_cores(machine, 4, Bind::kCore);
  ASSERT_EQ(shares.size(), 4U);
  EXPECT_EQ(to_cpu_list(shares[0].cpus), "0-1,8-9");
  EXPECT_EQ(to_cpu_list(shares[1].cpus), "2-3,10-11");
  EXPECT_EQ(to_cpu_list(shares[3].cpus), "6-7,14-15");
  for (const Share& share : shares) EXPECT_EQ(share.threads, 2);
}

TEST(Cores, EveryCoreIsUsedOnceWhateverTheNumberOfRanks) {
  const FakeSystem system = two_sockets();
  const Machine machine = read_machine(system.root(), all_16());
  for (int ranks = 1; ranks <= 8; ++ranks) {
    std::vector<int> used;
    int threads = 0;
    for (const Share& share : split_cores(machine, ranks, Bind::kCore)) {
      used.insert(used.end(), share.cpus.begin(), share.cpus.end());
      threads += share.threads;
    }
    EXPECT_EQ(used.size(), 16U) << ranks;
    EXPECT_EQ(to_cpu_list(used), "0-15") << ranks;
    EXPECT_EQ(threads, 8) << ranks;
  }
}

TEST(Cores, NumaBindsToWholeNodes) {
  const FakeSystem system = two_sockets();
  const auto shares = split_cores(read_machine(system.root(), all_16()), 4, Bind::kNuma);
  EXPECT_EQ(to_cpu_list(shares[1].cpus), "0-3,8-11");
  EXPECT_EQ(to_cpu_list(shares[2].cpus), "4-7,12-15");
  EXPECT_EQ(shares[1].threads, 2);
}

TEST(Cores, MoreRanksThanCoresAreNotBound) {
  const FakeSystem system = two_sockets();
  for (const Share& share : split_cores(read_machine(system.root(), {0, 1}), 3, Bind::kCore)) {
    EXPECT_TRUE(share.cpus.empty());
    EXPECT_EQ(share.threads, 1);
  }
  for (const Share& share : split_cores(read_machine(system.root(), all_16()), 2, Bind::kNone)) {
    EXPECT_TRUE(share.cpus.empty());
    EXPECT_EQ(share.threads, 4);
  }
}

TEST(Cores, AQuotaLimitsRanksAndThreads) {
  FakeSystem system = two_sockets();
  system.write("/proc/self/cgroup", "0::/pod/box\n");
  system.write("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
  EXPECT_EQ(ranks_for(read_machine(system.root(), all_16())), 8);
  system.write("/sys/fs/cgroup/pod/cpu.max", "250000 100000\n");  // the one above counts, too
  const Machine machine = read_machine(system.root(), all_16());
  EXPECT_DOUBLE_EQ(machine.quota, 2.5);
  EXPECT_EQ(ranks_for(machine), 2);
  EXPECT_EQ(split_cores(machine, 1, Bind::kCore)[0].threads, 2);
  EXPECT_EQ(split_cores(machine, 4, Bind::kCore)[0].threads, 1);
  system.write("/sys/fs/cgroup/pod/cpu.max", "50000 100000\n");
  EXPECT_EQ(ranks_for(read_machine(system.root(), all_16())), 1);
}

}  // namespace
}  // namespace lockstep::test
