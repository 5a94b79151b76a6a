// Several hosts with `lockstep run` on each: network namespaces, whose cables can be pulled.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <iostream>
#include <numeric>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "support/has.h"
#include "support/net_hosts.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::seconds;

#define NEED_NETWORK() \
  if (const std::string reason = NetHosts::why_not(); !reason.empty()) GTEST_SKIP() << reason

int total(const std::vector<int>& ranks) { return std::accumulate(ranks.begin(), ranks.end(), 0); }

TEST(Hosts, FindTheirNetworkByThemselves) {
  NEED_NETWORK();
  const NetHosts hosts(3);
  const auto results = run_ranks(
      6,
      [](int rank) {
        const World world = World::join({.timeout = seconds(30)});
        EXPECT_EQ(world.backend()->getBackendName(), "hierarchical:gloo");
        EXPECT_EQ(world.local_size(),
                  std::vector({3, 3, 3, 2, 2, 1})[static_cast<std::size_t>(rank)]);
        const at::Tensor sum = world.all_reduce(at::full({300000}, rank + 1));
        EXPECT_EQ(sum[299999].item<int>(), 21);
      },
      on_network(hosts, {3, 2, 1}));
  EXPECT_TRUE(all_passed(results));
  EXPECT_TRUE(has(results[0].output,
                  "6 ranks on 3 hosts, started by lockstep; engine: "
                  "hierarchical:gloo (several hosts, with Gloo between them)"))
      << results[0].output;
}

// A world that the program makes of some ranks, here without the first: the launcher's word on the
// network counts for it, too.
TEST(Hosts, FindTheirNetworkForAPartOfTheWorld) {
  NEED_NETWORK();
  const NetHosts hosts(3);
  EXPECT_TRUE(all_passed(run_ranks(
      3,
      [](int rank) {
        const World world = World::join({.timeout = seconds(30)});
        if (rank != 0) {
          const World part = World::join({.timeout = seconds(30),
                                          .join_timeout = seconds(30),
                                          .rank = rank - 1,
                                          .size = 2,
                                          .store = world.store()});
          EXPECT_EQ(part.backend()->getBackendName(), "hierarchical:gloo");
          EXPECT_EQ(part.all_reduce(at::full({1000}, rank))[999].item<int>(), 3);
        }
        world.barrier();
      },
      on_network(hosts, {1, 1, 1}))));
}

// A rank on the loopback cannot be reached from elsewhere.
TEST(Hosts, RefuseALoopback) {
  NEED_NETWORK();
  const NetHosts hosts(2);
  auto options = on_network(hosts, {1, 1});
  options.variables["GLOO_SOCKET_IFNAME"] = "lo";
  const auto results = run_ranks(
      2,
      [](int) {
        try {
          World::join({.join_timeout = seconds(20)});
          ADD_FAILURE();
        } catch (const UsageError& error) {
          std::cout << error.what() << std::endl;
          EXPECT_TRUE(has(error.message(), "GLOO_SOCKET_IFNAME")) << error.message();
        }
      },
      options);
  EXPECT_TRUE(all_passed(results));
}

// The same bits on one host and on two, and in every run.
TEST(Hosts, GiveTheBitsOfOneHost) {
  NEED_NETWORK();
  const NetHosts hosts(2);
  EXPECT_TRUE(all_passed(run_ranks(
      4,
      [](int rank) {
        const World world = World::join({.timeout = seconds(30)});
        const auto of_rank = [](int one) {
          at::manual_seed(static_cast<std::uint64_t>(one));
          return at::randn({1000001});
        };
        // The tree of one host, ((0 + 1) + (2 + 3)); a quarter of it is exact.
        const at::Tensor expected = ((of_rank(0) + of_rank(1)) + (of_rank(2) + of_rank(3))).div_(4);
        for (int run = 0; run < 5; ++run) {
          const at::Tensor mean = world.all_reduce(of_rank(rank), ReduceOp::AVG);
          ASSERT_EQ(std::memcmp(mean.const_data_ptr(), expected.const_data_ptr(), mean.nbytes()),
                    0);
        }
      },
      on_network(hosts, {2, 2}))));
}

// What ranks wait for is told through the launchers.
TEST(Hosts, AreToldOfWaitsInDifferentCalls) {
  NEED_NETWORK();
  const NetHosts hosts(2);
  EXPECT_TRUE(all_passed(run_ranks(
      4,
      [](int rank) {
        const World world = World::join({.timeout = seconds(60)});
        const World metrics = world.duplicate("the metrics");
        try {
          (rank == 2 ? metrics : world).sum(1);
          ADD_FAILURE();
        } catch (const MismatchError& error) {
          EXPECT_TRUE(has(error.message(),
                          "ranks 0, 1, 3 in all_reduce of f64[1], 8 bytes, of the "
                          "world; rank 2 in all_reduce of f64[1], 8 bytes, of the "
                          "metrics"))
              << error.message();
        }
        std::this_thread::sleep_for(seconds(3));  // until all have seen it
      },
      on_network(hosts, {2, 2}))));
}

// 64 ranks, all on this machine's few cores, are at work in seconds.
TEST(Hosts, StartManyRanksSoon) {
  NEED_NETWORK();
  const NetHosts hosts(4);
  auto options = on_network(hosts, {16, 16, 16, 16});
  options.deadline = seconds(110);
  const auto results = run_ranks(
      64,
      [](int) {
        const auto start = std::chrono::steady_clock::now();
        const World world = World::join({.join_timeout = seconds(90)});
        EXPECT_EQ(world.all_reduce(at::ones({1})).item<float>(), 64);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        if (world.rank() == 0) std::cout << "joined in " << taken.count() << " s" << std::endl;
      },
      options);
  EXPECT_TRUE(all_passed(results));
  const std::size_t line = results[0].output.find("joined in ");
  ASSERT_NE(line, std::string::npos);
  RecordProperty("seconds", results[0].output.substr(line + 10, 6));
  std::cout << results[0].output.substr(line, 20) << std::endl;
}

// What befalls a host at work. Every rank elsewhere hears of it, by name, in less than 15 s.
struct Trouble {
  std::string name;
  std::vector<int> ranks;
  int victim;
  void (*strike)(NetHosts& hosts, int host);
};

const std::vector<Trouble> kTroubles = {
    {"CutOff", {2, 2}, 1, [](NetHosts& hosts, int host) { hosts.cut(host); }},
    {"CutOffFirst", {1, 2, 1}, 0, [](NetHosts& hosts, int host) { hosts.cut(host); }},
    {"Killed", {1, 2, 1}, 1, [](NetHosts& hosts, int host) { hosts.kill(host); }},
    {"Slow", {2, 2}, 1, [](NetHosts& hosts, int host) { hosts.set_rate(host, "200kbit"); }},
};

class HostInTrouble : public testing::TestWithParam<Trouble> {};
INSTANTIATE_TEST_SUITE_P(Hosts, HostInTrouble, testing::ValuesIn(kTroubles),
                         [](const auto& test) { return test.param.name; });

// Ranks say what they have heard; the launchers end them afterwards.
void work_until_trouble(int rank) {
  std::signal(SIGTERM, SIG_IGN);  // the launchers hear of it, too, and may be first
  const World world = World::join({.timeout = seconds(8)});
  const at::Tensor large = world.backend()->allocateTensor(1000000, at::kFloat).zero_();
  try {
    for (int step = 0;; ++step) {
      if (step == 3) std::cout << "at work" << std::endl;
      world.all_reduce(large);
      world.broadcast(at::zeros({1000}), step % world.size());
    }
  } catch (const Error& error) {
    const bool is_right = dynamic_cast<const PeerLostError*>(&error) != nullptr ||
                          dynamic_cast<const TimeoutError*>(&error) != nullptr;
    std::string line = error.message();
    std::ranges::replace(line, '\n', ' ');
    std::cout << "rank " << rank << " heard: " << (is_right ? "" : "WRONG ") << line << std::endl;
  }
}

TEST_P(HostInTrouble, IsNamedByEveryRankElsewhere) {
  NEED_NETWORK();
  const Trouble& trouble = GetParam();
  const int num_hosts = static_cast<int>(trouble.ranks.size());
  const int times = is_rank() ? 1 : soak(1, 20);
  for (int time = 0; time < times; ++time) {
    NetHosts hosts(num_hosts, "1gbit");
    Ranks ranks(total(trouble.ranks), work_until_trouble, on_network(hosts, trouble.ranks));
    for (int host = 0; host < num_hosts; ++host) ranks.wait_for_output(host, "at work");
    const auto start = std::chrono::steady_clock::now();
    trouble.strike(hosts, trouble.victim);
    int first = 0;
    for (int host = 0; host < num_hosts; ++host) {
      const int last = first + trouble.ranks[static_cast<std::size_t>(host)];
      for (int rank = first; rank < last && host != trouble.victim; ++rank) {
        ranks.wait_for_output(host, text::format("rank {} heard: ", rank));
      }
      first = last;
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::cout << trouble.name << ": all have heard after " << taken.count() << " s" << std::endl;
    EXPECT_LT(taken.count(), 15);
    const auto results = ranks.wait();
    for (int host = 0; host < num_hosts; ++host) {
      if (host == trouble.victim) continue;
      std::istringstream lines(results[static_cast<std::size_t>(host)].output);
      for (std::string line; std::getline(lines, line);) {
        if (!has(line, "heard: ")) continue;
        EXPECT_TRUE(has(line, NetHosts::host_name(trouble.victim)) && !has(line, "WRONG"))
            << line << "\n"
            << show(results);
      }
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace lockstep::test
