// The protocol of the shared-memory engine, with ranks as threads (also under TSan).

#include "shm/group.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <random>

#include "shm/connect.h"
#include "support/fake_system.h"
#include "support/run_ranks.h"
#include "unit/shm/thread_ranks.h"

namespace lockstep::shm {
namespace {

using collective::best_simd;
using collective::Parts;
using collective::Request;
using std::chrono::milliseconds;

std::byte* bytes_of(void* memory) { return static_cast<std::byte*>(memory); }

Operation all_reduce(float* data, std::size_t count, Reduction reduction = Reduction::kSum) {
  Operation operation;
  operation.kind = Kind::kAllReduce;
  operation.type = DataType::kF32;
  operation.reduction = reduction;
  operation.count = count;
  operation.input.base = operation.output.base = bytes_of(data);
  return operation;
}

void run(Group& group, Operation operation) { group.wait(*group.start(std::move(operation))); }

// Small whole numbers: sums are exact.
float value(int rank, std::size_t i) { return static_cast<float>((i + 3 * rank) % 17); }
float sum(int size, std::size_t i) {
  float total = 0;
  for (int rank = 0; rank < size; ++rank) total += value(rank, i);
  return total;
}

const std::size_t kCounts[] = {0, 1, 3, 1000, 1024, 1025, 5000, 262144, 262145, 700001};

class GroupSizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GroupSizes, testing::Values(1, 2, 3, 4, 8));

TEST_P(GroupSizes, AllReduceOfOwnAndOfSharedMemoryInAnyMixture) {
  run_threads(GetParam(), [](Group& group) {
    for (const std::size_t count : kCounts) {
      for (int num_shared = 0; num_shared <= group.size(); num_shared += group.size()) {
        // All private, all shared; and only rank 0's shared.
        for (const bool is_mixed : {false, true}) {
          const bool is_shared = is_mixed ? group.rank() == 0 : num_shared > 0;
          std::vector<float> own(count + 1);
          std::byte* memory = is_shared ? group.allocate(count * 4 + 4) : nullptr;
          float* data = is_shared ? reinterpret_cast<float*>(memory) : own.data();
          for (std::size_t i = 0; i < count; ++i) data[i] = value(group.rank(), i);
          data[count] = -1;
          run(group, all_reduce(data, count));
          for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], sum(group.size(), i)) << i;
          ASSERT_EQ(data[count], -1) << "wrote behind the end";
          if (is_shared) group.release(memory);
        }
      }
    }
  });
}

TEST_P(GroupSizes, EveryOtherCollective) {
  run_threads(GetParam(), [](Group& group) {
    const int size = group.size();
    const auto num_ranks = static_cast<std::size_t>(size);
    for (const std::size_t count : {std::size_t{1}, std::size_t{999}, std::size_t{300000}}) {
      for (const bool is_shared : {false, true}) {
        std::vector<float> one(count);
        std::vector<float> all(count * num_ranks, -1);
        std::vector<float> result(count, -1);
        std::byte* memory = is_shared ? group.allocate(count * num_ranks * 4) : nullptr;
        float* in_one = is_shared ? reinterpret_cast<float*>(memory) : one.data();
        for (std::size_t i = 0; i < count; ++i) in_one[i] = value(group.rank(), i);

        Operation operation;
        operation.type = DataType::kF32;
        operation.count = count;
        operation.kind = Kind::kAllGather;
        operation.input.base = bytes_of(in_one);
        operation.output = {.base = bytes_of(all.data()), .stride = count * 4};
        run(group, operation);
        for (int peer = 0; peer < size; ++peer) {
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_EQ(all[static_cast<std::size_t>(peer) * count + i], value(peer, i));
          }
        }

        const int root = size - 1;
        operation.kind = Kind::kBroadcast;
        operation.root = root;
        operation.input = group.rank() == root ? Parts{.base = bytes_of(in_one)} : Parts{};
        operation.output = group.rank() == root ? Parts{} : Parts{.base = bytes_of(result.data())};
        run(group, operation);
        if (group.rank() != root) {
          for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(result[i], value(root, i));
        }

        operation.kind = Kind::kReduce;
        operation.reduction = Reduction::kSum;
        operation.input = {.base = bytes_of(in_one)};
        operation.output = group.rank() == root ? Parts{.base = bytes_of(result.data())} : Parts{};
        run(group, operation);
        if (group.rank() == root) {
          for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(result[i], sum(size, i));
        }

        // One part per rank; part p of rank r holds value(r, i) + p.
        std::vector<float> parts(count * num_ranks);
        float* in_parts = is_shared ? reinterpret_cast<float*>(memory) : parts.data();
        for (std::size_t p = 0; p < num_ranks; ++p) {
          for (std::size_t i = 0; i < count; ++i) {
            in_parts[p * count + i] = value(group.rank(), i) + static_cast<float>(p);
          }
        }
        operation.kind = Kind::kReduceScatter;
        operation.root = 0;
        operation.input = {.base = bytes_of(in_parts), .stride = count * 4};
        operation.output = {.base = bytes_of(result.data())};
        run(group, operation);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(result[i], sum(size, i) + static_cast<float>(size * group.rank()));
        }

        operation.kind = Kind::kAllToAll;
        operation.reduction = Reduction::kNone;
        operation.output = {.base = bytes_of(all.data()), .stride = count * 4};
        run(group, operation);
        for (int peer = 0; peer < size; ++peer) {
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_EQ(all[static_cast<std::size_t>(peer) * count + i],
                      value(peer, i) + static_cast<float>(group.rank()));
          }
        }

        operation.kind = Kind::kScatter;
        operation.root = root;
        if (group.rank() != root) operation.input = {};
        operation.output = {.base = bytes_of(result.data())};
        run(group, operation);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(result[i], value(root, i) + static_cast<float>(group.rank()));
        }
        if (is_shared) group.release(memory);
      }
    }
  });
}

TEST_P(GroupSizes, BarriersHoldEverybody) {
  std::atomic<int> arrived{0};
  run_threads(GetParam(), [&](Group& group) {
    for (int i = 0; i < 300; ++i) {
      ++arrived;
      run(group, Operation{});
      EXPECT_GE(arrived.load(), (i + 1) * group.size());
    }
  });
}

// Several hundred pieces at once, more than there are slots and staging places.
TEST_P(GroupSizes, ManyOperationsInFlight) {
  run_threads(GetParam(), [](Group& group) {
    std::vector<std::vector<float>> data;
    std::vector<std::shared_ptr<Request>> requests;
    for (std::size_t i = 0; i < 200; ++i) {
      data.emplace_back(i % 10 == 0 ? 300000 : 10 * i);
      for (std::size_t j = 0; j < data[i].size(); ++j) data[i][j] = value(group.rank(), i + j);
    }
    for (auto& one : data) requests.push_back(group.start(all_reduce(one.data(), one.size())));
    for (std::size_t i = requests.size(); i-- > 0;) group.wait(*requests[i]);
    for (std::size_t i = 0; i < data.size(); ++i) {
      for (std::size_t j = 0; j < data[i].size(); ++j)
        ASSERT_EQ(data[i][j], sum(group.size(), i + j));
    }
  });
}

TEST_P(GroupSizes, PollingAloneIsEnough) {
  run_threads(GetParam(), [](Group& group) {
    std::vector<float> data(500000);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = value(group.rank(), i);
    const auto request = group.start(all_reduce(data.data(), data.size()));
    while (!group.poll(*request)) std::this_thread::yield();
    for (std::size_t i = 0; i < data.size(); ++i) ASSERT_EQ(data[i], sum(group.size(), i));
  });
}

TEST_P(GroupSizes, TheBitsDependOnNothingButTheOrderOfRanks) {
  // Values that do not add exactly; chunks, pieces, memory and instruction sets vary.
  std::vector<std::vector<float>> inputs;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  constexpr std::size_t kCount = 400003;
  for (int rank = 0; rank < GetParam(); ++rank) {
    inputs.emplace_back();
    for (std::size_t i = 0; i < kCount; ++i) inputs.back().push_back(normal(random));
  }
  std::vector<float> expected(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    std::vector<float> level;
    for (const auto& input : inputs) level.push_back(input[i]);
    while (level.size() > 1) {
      std::vector<float> next;
      for (std::size_t j = 0; j + 1 < level.size(); j += 2) next.push_back(level[j] + level[j + 1]);
      if (level.size() % 2 != 0) next.push_back(level.back());
      level = next;
    }
    expected[i] = level[0];
  }
  for (const Simd simd : {Simd::kPlain, best_simd()}) {
    run_threads(GetParam(),
                [&](Group& group) {
                  const auto& input = inputs[static_cast<std::size_t>(group.rank())];
                  auto* shared = reinterpret_cast<float*>(group.allocate(kCount * 4));
                  std::vector<float> own(input);
                  for (const std::size_t cut : {kCount, std::size_t{1000}, std::size_t{300001}}) {
                    std::memcpy(shared, input.data(), kCount * 4);
                    own = input;
                    for (std::size_t at = 0; at < kCount; at += cut) {
                      const std::size_t length = std::min(cut, kCount - at);
                      run(group, all_reduce(shared + at, length));
                      run(group, all_reduce(own.data() + at, length));
                    }
                    ASSERT_EQ(std::memcmp(shared, expected.data(), kCount * 4), 0);
                    ASSERT_EQ(std::memcmp(own.data(), expected.data(), kCount * 4), 0);
                  }
                },
                {.simd = simd});
  }
}

TEST(Group, TwoGroupsAtOnce) {
  run_threads(2, [](Group& one) {
    static ThreadExchange exchange(2);
    const auto shared = std::make_shared<Group>(GroupOptions{.rank = one.rank(), .size = 2},
                                                exchange.for_rank(one.rank()));
    Group& two = *shared;
    std::vector<float> a(3000, 1);
    std::vector<float> b(3000, 2);
    const auto first = one.start(all_reduce(a.data(), a.size()));
    run(two, all_reduce(b.data(), b.size()));
    one.wait(*first);
    EXPECT_EQ(a[5], 2);
    EXPECT_EQ(b[5], 4);
    two.leave();
    exchange.for_rank(one.rank())("left");
  });
}

TEST(Group, DifferentCallsAreAnErrorOnAllRanks) {
  std::atomic<int> num_errors{0};
  run_threads(3, [&](Group& group) {
    std::vector<float> data(100);
    try {
      run(group, all_reduce(data.data(), group.rank() == 2 ? 99 : 100));
      ADD_FAILURE();
    } catch (const MismatchError& error) {
      ++num_errors;
      EXPECT_NE(
          error.message().find("all_reduce of f32[100], 400 bytes on rank 0, but all_reduce of "
                               "f32[99], 396 bytes on rank 2"),
          std::string::npos)
          << error.what();
    }
    EXPECT_THROW(group.start(Operation{}), MismatchError) << "a group that has failed stays failed";
  });
  EXPECT_EQ(num_errors, 3);
}

// Even if the operation was the last owner of the memory.
TEST(Group, MemoryIsNotHandedOutAgainWhileOthersReadIt) {
  std::atomic<bool> has_started{false};
  std::atomic<bool> may_read{false};
  run_threads(2, [&](Group& group) {
    constexpr std::size_t kCount = 100000;
    Operation operation;
    operation.kind = Kind::kBroadcast;
    operation.type = DataType::kF32;
    operation.count = kCount;
    if (group.rank() == 1) {
      std::vector<float> result(kCount);
      operation.output.base = bytes_of(result.data());
      const auto request = group.start(operation);
      has_started = true;
      while (!may_read) std::this_thread::yield();
      group.wait(*request);
      EXPECT_EQ(std::ranges::count(result, 5.0F), static_cast<std::ptrdiff_t>(kCount));
      return run(group, Operation{});
    }
    const auto allocate = [&](float value) {
      auto* data = reinterpret_cast<float*>(group.allocate(kCount * 4));
      std::fill_n(data, kCount, value);
      return std::shared_ptr<float>(data, [&group](float* its) { group.release(bytes_of(its)); });
    };
    {
      const auto memory = allocate(5);
      operation.input.base = bytes_of(memory.get());
      operation.owner = memory;
      group.start(operation);
    }
    const auto barrier = group.start(Operation{});
    operation = {};
    while (!has_started) std::this_thread::yield();
    EXPECT_FALSE(group.poll(*barrier));
    const auto other = allocate(9);
    may_read = true;
    group.wait(*barrier);
  });
}

TEST(Group, AWaitThatReachesItsLimitEndsNothing) {
  run_threads(2, [](Group& group) {
    static std::atomic<bool> may_come{false};
    if (group.rank() == 0) {
      const auto barrier = group.start(Operation{});
      EXPECT_FALSE(group.wait_until(*barrier, std::chrono::steady_clock::now() + milliseconds(20)));
      may_come = true;
      group.wait(*barrier);
    } else {
      while (!may_come) std::this_thread::yield();
      run(group, Operation{});
    }
  });
}

TEST(Group, ARankThatStaysAwayIsATimeoutThatNamesIt) {
  run_threads(3, [](Group& group) {
    if (group.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(1500));
      return;
    }
    try {
      Operation barrier;
      barrier.timeout = milliseconds(300);
      run(group, barrier);
      ADD_FAILURE();
    } catch (const TimeoutError& error) {
      EXPECT_NE(error.message().find("barrier waited 0.3 s for rank 1"), std::string::npos)
          << error.what();
    }
  });
}

// As in a world of which these ranks are only a part.
TEST(Group, AnErrorFromElsewhereReachesAllRanksWithGlobalRanks) {
  GroupOptions options;
  options.global_ranks = {5, 7, 8};
  run_threads(
      3,
      [](Group& group) {
        const auto expect_cause = [](const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
          EXPECT_EQ(error.peer(), 3);
          EXPECT_TRUE(error.message().starts_with("Because rank 7: lost rank 3")) << error.what();
        };
        if (group.rank() == 1) {
          group.give_up(std::make_exception_ptr(PeerLostError({.peer = 3}, "lost rank 3")));
          EXPECT_THROW(group.check_peers({"barrier", "barrier"}), PeerLostError);
          return;
        }
        try {
          if (group.rank() == 0) run(group, Operation{});
          while (group.rank() == 2) group.check_peers({"barrier", "barrier"});
          ADD_FAILURE();
        } catch (const Error& error) {
          EXPECT_EQ(error.rank(), group.rank() == 0 ? 5 : 8);
          expect_cause(error);
        }
      },
      options);
}

// Bytes of shared memory that this process has made.
std::size_t shared_bytes() {
  std::size_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    struct stat status {};
    if (target.find("memfd:lockstep") != std::string::npos &&
        ::stat(entry.path().c_str(), &status) == 0) {
      bytes += static_cast<std::size_t>(status.st_blocks) * 512;
    }
  }
  return bytes;
}

TEST(Group, RanksThatSendNoMessagesNeedNoMemoryForThem) {
  constexpr std::size_t kRanks = 32;
  const std::size_t before = shared_bytes();
  std::atomic<std::size_t> without{0};
  run_threads(kRanks, [&](Group& group) {
    run(group, Operation{});
    if (group.rank() == 0) without = shared_bytes() - before;
    run(group, Operation{});
    // Now one to the next, and one to itself.
    for (const int distance : {1, 0}) {
      std::vector<int> out(10000, group.rank());
      std::vector<int> in(10000, -1);
      const int from = (group.rank() - distance + group.size()) % group.size();
      const auto sent = group.start(Message{.is_send = true,
                                            .memory = bytes_of(out.data()),
                                            .bytes = out.size() * sizeof(int),
                                            .peer = (group.rank() + distance) % group.size()});
      group.wait(*group.start(
          Message{.memory = bytes_of(in.data()), .bytes = in.size() * sizeof(int), .peer = from}));
      group.wait(*sent);
      EXPECT_EQ(in, std::vector<int>(10000, from));
    }
    run(group, Operation{});
    if (group.rank() == 0) {
      EXPECT_LE(shared_bytes() - before - without, kRanks * 2 * 80000);
    }
    run(group, Operation{});
  });
  EXPECT_LE(without, kRanks * 2'500'000);
}

double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Two ranks that have a core each by their affinity, and one by their cgroup.
TEST(Group, WaitingDoesNotUseUpTheQuotaOfACgroup) {
  const test::FakeSystem system;
  system.write("/proc/self/cgroup", "0::/box");
  system.write("/sys/fs/cgroup/box/cpu.max", "100000 100000");
  GroupOptions options;
  options.spin = milliseconds(500);
  options.system_root = system.root();
  run_threads(
      2,
      [](Group& group) {
        run(group, Operation{});
        if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(600));
        const double before = thread_seconds();
        run(group, Operation{});
        EXPECT_LT(thread_seconds() - before, 0.2);
      },
      options);
}

// A group of ranks of which each has a system of its own.
void run_on(const std::vector<const test::FakeSystem*>& systems,
            const std::function<void(const GroupOptions&, const Exchange&)>& body) {
  ThreadExchange exchange(static_cast<int>(systems.size()));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < static_cast<int>(systems.size()); ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions options;
      options.rank = rank;
      options.size = static_cast<int>(systems.size());
      options.system_root = systems[static_cast<std::size_t>(rank)]->root();
      body(options, exchange.for_rank(rank));
      exchange.for_rank(rank)("left");  // as in run_threads
    });
  }
}

void limit_memory(const test::FakeSystem& system, std::size_t bytes) {
  system.write("/proc/self/cgroup", "0::/box");
  system.write("/sys/fs/cgroup/box/memory.max", std::to_string(bytes + 1000));
  system.write("/sys/fs/cgroup/box/memory.current", "1000");
}

TEST(Group, MemoryForAllRanksIsCheckedBeforeOneTakesIt) {
  const test::FakeSystem small;
  limit_memory(small, kSegmentBytes * 3 / 2);  // of two ranks, each alone would find room
  std::atomic<int> num_refused{0};
  run_on({&small, &small}, [&](const GroupOptions& options, const Exchange& exchange) {
    try {
      const Group group(options, exchange);
      ADD_FAILURE();
    } catch (const SystemError& error) {
      ++num_refused;
      EXPECT_EQ(error.rank(), options.rank);
      EXPECT_EQ(error.code(), ENOMEM);
      const std::string expected =
          std::to_string(kSegmentBytes * 2) +
          " bytes of shared memory are needed, but the memory cgroup has only " +
          std::to_string(kSegmentBytes * 3 / 2) + " left for the 2 ranks of this host";
      EXPECT_NE(error.message().find(expected), std::string::npos) << error.message();
    }
  });
  EXPECT_EQ(num_refused, 2);
  // In a cgroup of its own, each has room.
  const test::FakeSystem other;
  limit_memory(other, kSegmentBytes * 3 / 2);
  run_on({&small, &other}, [&](const GroupOptions& options, const Exchange& exchange) {
    Group group(options, exchange);
    run(group, Operation{});
    group.leave();
    exchange("done");
  });
}

TEST(Group, OneRankWithoutRoomIsAnErrorOnAll) {
  const test::FakeSystem large;
  const test::FakeSystem small;
  limit_memory(large, 100 * kSegmentBytes);
  limit_memory(small, kSegmentBytes * 3 / 2);
  std::atomic<int> num_refused{0};
  run_on({&large, &small}, [&](const GroupOptions& options, const Exchange& exchange) {
    Group group(options, exchange);
    try {
      if (group.rank() == 1) group.allocate(2 * kSegmentBytes);
      run(group, Operation{});
      ADD_FAILURE();
    } catch (const SystemError& error) {
      ++num_refused;
      EXPECT_EQ(error.rank(), group.rank());
      EXPECT_EQ(error.message().starts_with("Because rank 1: "), group.rank() == 0);
      EXPECT_NE(error.message().find(std::to_string(2 * kSegmentBytes) +
                                     " bytes of shared memory are needed"),
                std::string::npos)
          << error.message();
    }
    group.leave();
    exchange("done");
  });
  EXPECT_EQ(num_refused, 2);
}

// Nobody is left waiting in the exchange, whatever one rank throws.
TEST(Group, AnyExceptionWhileRanksConnectIsAnErrorOnAll) {
  const test::FakeSystem system;
  std::atomic<int> num_errors{0};
  run_on({&system, &system}, [&](const GroupOptions& options, const Exchange& exchange) {
    Peers peers;
    peers.rank = options.rank;
    peers.size = options.size;
    try {
      do_together(peers, exchange, [&]() -> std::string {
        if (options.rank == 1) throw std::bad_alloc();
        return {};
      });
      ADD_FAILURE();
    } catch (const SystemError& error) {
      ++num_errors;
      EXPECT_EQ(error.rank(), options.rank);
      EXPECT_EQ(error.message(),
                options.rank == 0 ? "Because rank 1: std::bad_alloc" : "std::bad_alloc");
    }
  });
  EXPECT_EQ(num_errors, 2);
}

TEST(Group, WhatOtherRanksAreAboutToTakeCounts) {
  const test::FakeSystem system;
  limit_memory(system, 10 << 20);
  const test::FakeSystem other;
  limit_memory(other, 10 << 20);
  run_on({&system, &system, &other}, [&](const GroupOptions& options, const Exchange& exchange) {
    const Peers peers = connect(options, exchange);
    Areas areas(peers);
    if (options.rank != 0) peers.self().claimed_bytes = 8 << 20;
    exchange("claimed");
    if (options.rank == 0) {
      areas.allocate(1 << 20);
      try {
        areas.allocate(4 << 20);
        ADD_FAILURE();
      } catch (const SystemError& error) {
        EXPECT_NE(error.message().find("and other ranks are about to take 8388608"),
                  std::string::npos)
            << error.message();
      }
      EXPECT_EQ(peers.self().claimed_bytes, 0);
    }
    exchange("done");
  });
}

TEST(Group, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  run_threads(2, [](Group& group) {
    std::vector<float> data(10);
    Operation operation = all_reduce(data.data(), 10, Reduction::kXor);
    EXPECT_THROW(group.start(operation), UsageError);
    operation.reduction = Reduction::kSum;
    operation.root = 2;
    EXPECT_THROW(group.start(operation), UsageError);
    run(group, Operation{});
  });
}

}  // namespace
}  // namespace lockstep::shm
