// DistributedDataParallel over engines and sizes: all of ddp_checks.cpp.

#include <gtest/gtest.h>

#include <numeric>

#include "base/text.h"
#include "multiprocess/checks.h"
#include "support/net_hosts.h"
#include "support/run_ranks.h"

namespace lockstep {
namespace {

using namespace test;  // NOLINT: a test

// Engine and number of ranks. One test for all checks: starting ranks takes longer than they do.
class Ddp : public testing::TestWithParam<std::pair<const char*, int>> {};
INSTANTIATE_TEST_SUITE_P(Engines, Ddp,
                         testing::Values(std::pair("solo", 1), std::pair("shm", 1),
                                         std::pair("shm", 2), std::pair("shm", 3),
                                         std::pair("shm", 4), std::pair("gloo", 1),
                                         std::pair("gloo", 2), std::pair("gloo", 3),
                                         std::pair("gloo", 4)),
                         [](const auto& one) {
                           return std::string(one.param.first) + std::to_string(one.param.second);
                         });

TEST_P(Ddp, KeepsTheContract) { run_checks(GetParam().second, {.engine = GetParam().first}); }

// Ranks on each host; hosts are network namespaces.
class DdpOnHosts : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Hosts, DdpOnHosts,
                         testing::Values(std::vector{1, 1}, std::vector{2, 2}, std::vector{1, 3},
                                         std::vector{2, 1, 1}, std::vector{1, 1, 1, 1}),
                         [](const auto& one) {
                           return text::format("{}", text::join(one.param, "_"));
                         });

TEST_P(DdpOnHosts, KeepsTheContract) {
  if (const std::string reason = test::NetHosts::why_not(); !reason.empty()) GTEST_SKIP() << reason;
  const std::vector<int>& ranks = GetParam();
  const test::NetHosts hosts(static_cast<int>(ranks.size()));
  test::RankOptions options = test::on_network(hosts, ranks);
  options.deadline = std::chrono::seconds(110);
  run_checks(std::accumulate(ranks.begin(), ranks.end(), 0), {}, options);
}

}  // namespace
}  // namespace lockstep
