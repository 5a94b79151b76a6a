// Joining a world: by every kind of store, again, and with everything that can be wrong.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <filesystem>
#include <fstream>
#include <iostream>

#include "base/posix.h"
#include "base/text.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

using std::chrono::seconds;

constexpr auto kBound = seconds(20);  // generous: these machines are busy

int free_port() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin_port);
}

// Two ranks with the variables of a launcher that is not lockstep's.
RankOptions under(const std::string& rank_name, std::map<std::string, std::string> variables) {
  RankOptions options;
  options.has_place = false;
  options.variables = std::move(variables);
  options.rank_variables = [rank_name](int rank) {
    return std::map<std::string, std::string>{{rank_name, std::to_string(rank)}};
  };
  return options;
}
RankOptions under_torchrun() {
  return under("RANK", {{"WORLD_SIZE", "2"},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", std::to_string(free_port())}});
}
RankOptions under_pmi(const std::string& folder) {
  return under(
      "PMI_RANK",
      {{"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}, {"TMPDIR", folder}, {"XDG_RUNTIME_DIR", ""}});
}

void expect_sum_over(const World& world) {
  const auto sum = world.all_reduce(at::full({3}, world.rank() + 1.0));
  EXPECT_EQ(sum[0].item<double>(), world.size() * (world.size() + 1) / 2.0);
}

// What each rank's join threw.
template <typename Expected>
void expect_join_error(const JoinOptions& options, std::initializer_list<std::string> parts) {
  try {
    World::join(options);
    ADD_FAILURE() << "joined";
  } catch (const Expected& error) {
    std::cout << error.what() << std::endl;
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part;
    }
  }
}

TEST(Join, AloneEverythingWorks) {
  const World world = World::join();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.local_rank(), 0);
  EXPECT_EQ(world.local_size(), 1);
  EXPECT_EQ(world.host(), host_name());
  EXPECT_EQ(world.backend()->getBackendName(), "solo");
  world.barrier();
  expect_sum_over(world);
  world.store()->set("key", "value");
  EXPECT_EQ(world.store()->get_to_str("key"), "value");
  EXPECT_EQ(world.on_rank0([] { return 7; }), 7);
}

TEST(Join, UnderLockstepsVariables) {
  EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) {
    const World world = World::join();
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), 3);
    EXPECT_EQ(world.local_rank(), rank);
    EXPECT_EQ(world.local_size(), 3);
    EXPECT_EQ(world.members()[2].rank, 2);
    EXPECT_EQ(world.members()[static_cast<std::size_t>(rank)].pid, ::getpid());
    expect_sum_over(world);
  })));
}

// Where ranks that the test starts meet, as seen from the launcher, which is the test itself.
std::string meeting_file(const std::string& folder) {
  const ProcessId self = this_process();
  return text::format("{}/lockstep-{}-{}-{}", folder, ::geteuid(), self.pid, self.start_time);
}

TEST(Join, AFileWithASecondNameIsNotUsed) {
  const TempFolder folder;
  const std::string mine = folder.path() + "/mine";
  std::ofstream(mine) << "precious";
  std::filesystem::permissions(mine, std::filesystem::perms(0600));
  std::filesystem::create_hard_link(mine, meeting_file(folder.path()));  // by somebody else
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int) {
        expect_join_error<UsageError>({.join_timeout = seconds(10)},
                                      {"2 names", "XDG_RUNTIME_DIR"});
      },
      under_pmi(folder.path()))));
  EXPECT_EQ(read_small_file(mine), "precious");
}

// Somebody else has taken the name in /tmp; in the user's own folder nobody can.
TEST(Join, ThePrivateFolderIsPreferred) {
  const TempFolder shared;
  const std::string taken = meeting_file(shared.path());
  std::filesystem::create_directory(taken);
  const std::string folder = shared.path() + "/private";
  std::filesystem::create_directory(folder);
  std::filesystem::permissions(folder, std::filesystem::perms(0700));
  auto options = under_pmi(shared.path());
  options.variables["XDG_RUNTIME_DIR"] = folder;
  EXPECT_TRUE(all_passed(run_ranks(
      2, [](int) { expect_sum_over(World::join({.join_timeout = seconds(30)})); }, options)));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  // One that others may look into is no better than /tmp.
  std::filesystem::permissions(folder, std::filesystem::perms(0755));
  std::filesystem::remove(taken);
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [&](int) {
        const auto before = std::filesystem::last_write_time(folder);
        expect_sum_over(World::join({.join_timeout = seconds(30)}));
        EXPECT_EQ(std::filesystem::last_write_time(folder), before);
      },
      options)));
}

TEST(Join, UnderTorchrunsVariables) {
  EXPECT_TRUE(all_passed(run_ranks(
      2, [](int) { expect_sum_over(World::join({.join_timeout = seconds(30)})); },
      under_torchrun())));
}

TEST(Join, AgainOverTcp) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int) {
        const JoinOptions options{.join_timeout = seconds(30)};
        for (int i = 0; i < 5; ++i) expect_sum_over(World::join(options));
        const World one = World::join(options);
        const World two = World::join(options);  // two at once
        expect_sum_over(two);
        expect_sum_over(one);
      },
      under_torchrun())));
}

TEST(Join, UnderMpisVariablesOnOneHostLeavesNoFile) {
  const TempFolder folder;
  const auto results = run_ranks(
      2, [](int) { expect_sum_over(World::join({.join_timeout = seconds(30)})); },
      under_pmi(folder.path()));
  EXPECT_TRUE(all_passed(results));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Join, AFailedJoinUnderMpiCanBeTriedAgain) {
  const TempFolder folder;
  const auto results = run_ranks(
      2,
      [](int rank) {
        EXPECT_THROW(
            World::join({.engine = rank == 0 ? "gloo" : "auto", .join_timeout = seconds(20)}),
            MismatchError);
        std::this_thread::sleep_for(seconds(1));  // until all have failed
        expect_sum_over(World::join({.join_timeout = seconds(30)}));
      },
      under_pmi(folder.path()));
  EXPECT_TRUE(all_passed(results));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Join, ABadLogLevelStopsEveryRankBeforeItJoins) {
  const auto results =
      run_ranks(2, [](int) { expect_join_error<UsageError>({}, {"LOCKSTEP_LOG is 'loud'"}); },
                {.variables = {{"LOCKSTEP_LOG", "loud"}}});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, WithTheProgramsOwnStore) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const World world = World::join({.rank = 0, .size = 1, .store = store});
  expect_sum_over(world);
  EXPECT_THROW(World::join({.rank = 0}), UsageError);
  EXPECT_THROW(World::join({.rank = 1, .size = 1, .store = store}), UsageError);
}

TEST(Join, AgainInTheSameProcesses) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    for (int i = 0; i < 3; ++i) expect_sum_over(World::join());
    const World one = World::join();
    const World two = World::join();  // two at once
    expect_sum_over(two);
    expect_sum_over(one);
  })));
}

TEST(Join, ARankThatNeverComesIsNamedByAll) {
  const auto results = run_ranks(3,
                                 [](int rank) {
                                   if (rank == 1) return;
                                   expect_join_error<TimeoutError>(
                                       {.join_timeout = seconds(5)},
                                       {"2 of 3 ranks have come (0, 2); missing: rank 1"});
                                 },
                                 {.deadline = kBound});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, WithoutRank0) {
  const auto results =
      run_ranks(2,
                [](int rank) {
                  if (rank == 0) return;
                  expect_join_error<TimeoutError>({.join_timeout = seconds(5)},
                                                  {"missing: rank 0", "on rank 1"});
                },
                {.deadline = kBound});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, TwoProcessesWithOneRank) {
  // Which of the two comes second is chance; that one throws, and rank 0 and the other hear of it.
  const auto results = run_ranks(3,
                                 [](int) {
                                   expect_join_error<MismatchError>(
                                       {.join_timeout = seconds(10)},
                                       {"Two processes have rank 1", "rank of its own"});
                                 },
                                 {.deadline = kBound, .rank_variables = [](int rank) {
                                    return std::map<std::string, std::string>{
                                        {"RANK", rank == 2 ? "1" : std::to_string(rank)}};
                                  }});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, SizesThatDisagreeShowBothSides) {
  const auto results = run_ranks(
      2,
      [](int) {
        expect_join_error<MismatchError>({.join_timeout = seconds(10)},
                                         {"The size of the world is", "2 for", "3 for"});
      },
      {.deadline = kBound, .rank_variables = [](int rank) {
         return std::map<std::string, std::string>{{"WORLD_SIZE", std::to_string(rank + 2)}};
       }});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, EnginesThatDisagreeShowBothSides) {
  const auto results =
      run_ranks(2,
                [](int rank) {
                  expect_join_error<MismatchError>(
                      {.engine = rank == 0 ? "gloo" : "auto", .join_timeout = seconds(10)},
                      {"Rank 0 has the engine 'gloo', rank 1 (host", "has 'auto'"});
                },
                {.deadline = kBound});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, ARankThatDiesWhileJoining) {
  Ranks ranks(
      3,
      [](int rank) {
        if (rank == 1) {  // comes and dies; rank 2 comes late, so that the others still wait
          std::thread([] {
            std::this_thread::sleep_for(seconds(3));  // by then it has put down its record
            ::_exit(3);
          }).detach();
        }
        if (rank == 2) return;
        expect_join_error<PeerLostError>({.join_timeout = seconds(15)},
                                         {"rank 1 (host", "ended while the others were"});
      },
      {.deadline = kBound});
  const auto results = ranks.wait();
  EXPECT_TRUE(results[0].status.is_ok()) << show(results);
  EXPECT_EQ(results[1].status.code, 3);
}

TEST(Join, AnEngineThatDoesNotExist) {
  expect_join_error<UsageError>(
      {.engine = "pigeon"},
      {"There is no engine 'pigeon'", "auto, solo, nccl, shm, hierarchical, gloo"});
}

TEST(Join, AnEngineThatIsNotBuilt) {
  expect_join_error<UsageError>({.engine = "nccl"}, {"The engine 'nccl' is not in this build: "});
}

// The time that `lockstep run --lost-after` sets holds for the ranks' own connections as well.
TEST(Join, GlooLosesAHostWhenTheLaunchersDo) {
  EXPECT_TRUE(all_passed(
      run_ranks(2,
                [](int) {
                  const World world = World::join({.engine = "gloo", .join_timeout = seconds(30)});
                  int longest = 0;
                  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
                    const int fd = std::atoi(entry.path().filename().c_str());
                    int unanswered = 0;
                    socklen_t size = sizeof unanswered;
                    if (::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, &size) == 0) {
                      longest = std::max(longest, unanswered);
                    }
                  }
                  EXPECT_EQ(longest, 21'000);
                  world.barrier();
                },
                {.variables = {{"LOCKSTEP_LOST_AFTER", "21"}}})));
}

TEST(Join, AGlooTransportThatThisLibTorchDoesNotHave) {
  EXPECT_TRUE(all_passed(run_ranks(2,
                                   [](int) {
                                     expect_join_error<UsageError>(
                                         {.engine = "gloo"}, {"GLOO_DEVICE_TRANSPORT is TCP_TLS"});
                                   },
                                   {.variables = {{"GLOO_DEVICE_TRANSPORT", "TCP_TLS"}}})));
}

TEST(Join, TheEngineOfTheEnvironment) {
  ::setenv("LOCKSTEP_ENGINE", "gloo", 1);
  EXPECT_EQ(World::join().backend()->getBackendName(), "gloo");
  ::setenv("LOCKSTEP_ENGINE", "pigeon", 1);
  EXPECT_THROW(World::join(), UsageError);
  ::unsetenv("LOCKSTEP_ENGINE");
}

TEST(Join, NobodyServesTheStore) {
  const std::string port = std::to_string(free_port());
  const auto results = run_ranks(1,
                                 [](int) {
                                   expect_join_error<TimeoutError>(
                                       {.join_timeout = seconds(1)},
                                       {"no answer from the store at 127.0.0.1:", "rank 0"});
                                 },
                                 {.deadline = kBound,
                                  .has_place = false,
                                  .variables = {{"RANK", "1"},
                                                {"WORLD_SIZE", "2"},
                                                {"MASTER_ADDR", "127.0.0.1"},
                                                {"MASTER_PORT", port}}});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, APortInUse) {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(socket.get(), 1), 0);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const auto results =
      run_ranks(1,
                [](int) {
                  expect_join_error<SystemError>({}, {"rank 0 cannot listen on 127.0.0.1:",
                                                      "Address already in use", "set MASTER_PORT"});
                },
                {.deadline = kBound,
                 .has_place = false,
                 .must_exec = true,  // a forked rank would have the socket itself
                 .variables = {{"RANK", "0"},
                               {"WORLD_SIZE", "2"},
                               {"MASTER_ADDR", "127.0.0.1"},
                               {"MASTER_PORT", port}}});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, HalfASetOfVariables) {
  const auto results = run_ranks(
      1, [](int) { expect_join_error<UsageError>({}, {"WORLD_SIZE is not set, but RANK=1 is"}); },
      {.has_place = false, .variables = {{"RANK", "1"}}});
  EXPECT_TRUE(all_passed(results));
}

TEST(Join, ADescriptorThatIsNotOpen) {
  const auto results =
      run_ranks(1,
                [](int) {
                  expect_join_error<SystemError>({}, {"descriptor 999", "Bad file descriptor"});
                },
                {.variables = {}, .rank_variables = [](int) {
                   return std::map<std::string, std::string>{{"WORLD_SIZE", "2"},
                                                             {"LOCKSTEP_STORE", "fd:999"}};
                 }});
  EXPECT_TRUE(all_passed(results));
}

}  // namespace
}  // namespace lockstep::test
