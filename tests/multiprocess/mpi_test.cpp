// The MPI engine beside a program's own MPI: who initialises it, whose communicator it is, one
// order of summation, and ranks that differ, stay away, leave or die. Tests in which the engine
// fails call MPI_Finalize themselves: lockstep would not, and mpirun would report that.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <lockstep/mpi.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int start_mpi(int level = MPI_THREAD_MULTIPLE) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  EXPECT_EQ(provided, level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

bool is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

void expect_sum(const World& world) {
  const auto sum = world.all_reduce(at::full({1000}, world.rank() + 1.0));
  EXPECT_EQ(sum[7].item<double>(), world.size() * (world.size() + 1) / 2);
}

// Runs f and gives back the error it must throw.
template <typename E>
E expect_error(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& error) {
    std::cout << error.what() << std::endl;
    return error;
  }
  throw std::runtime_error("nothing was thrown");
}

// Under mpirun several hosts are connected by its MPI.
TEST(MpiEngine, ConnectsHostsByDefault) {
  const auto results = run_ranks(
      3,
      [](int rank) {
        ::setenv("LOCKSTEP_HOST_ID", rank == 1 ? "b" : "a", 1);
        const World world = World::join();
        EXPECT_EQ(world.backend()->getBackendName(), "hierarchical:mpi");
        expect_sum(world);
        expect_sum(world.duplicate());
      },
      mpirun(3));
  EXPECT_TRUE(all_passed(results));
  EXPECT_NE(results[0].output.find("3 ranks on 2 hosts, started by OpenMPI; engine: "
                                   "hierarchical:mpi (several hosts, with the MPI between them"),
            std::string::npos)
      << results[0].output;
}

// Messages with one tag arrive in the order sent, however many receives wait for them.
TEST(MpiEngine, KeepsTheOrderOfMessagesWithOneTag) {
  EXPECT_TRUE(all_passed(run_ranks(
      2,
      [](int rank) {
        const World world = World::join({.engine = "mpi", .timeout = seconds(30)});
        std::vector<at::Tensor> tensors;
        std::vector<c10::intrusive_ptr<c10d::Work>> works;
        for (int i = 1; i <= 400; ++i) {
          tensors.push_back(rank == 0 ? at::zeros({i * 37}) : at::full({i * 37}, i, at::kFloat));
          std::vector<at::Tensor> one = {tensors.back()};
          works.push_back(rank == 0 ? world.backend()->recv(one, 1, 5)
                                    : world.backend()->send(one, 0, 5));
        }
        for (std::size_t i = 0; i < works.size(); ++i) {
          works[i]->wait();
          EXPECT_EQ(tensors[i].min().item<int>(), static_cast<int>(i) + 1);
        }
        world.barrier();
      },
      mpirun(2))));
}

class Threads : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Levels, Threads,
                         testing::Values(MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE));

TEST_P(Threads, TheProgramMayInitialiseAndFinaliseMpi) {
  const auto body = [&](int) {
    start_mpi(GetParam());
    {
      const World world = World::join({.engine = "mpi"});
      EXPECT_EQ(world.backend()->getBackendName(), "mpi");
      expect_sum(world);
      const World other = world.duplicate();
      expect_sum(other);
      expect_sum(world);
    }
    EXPECT_FALSE(is_finalized());
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, mpirun(3))));
}

TEST(MpiEngine, LockstepInitialisesMpiIfNobodyHas) {
  const auto body = [](int) {
    expect_sum(World::join({.engine = "mpi"}));
    expect_sum(World::join({.engine = "mpi"}));  // and once is enough
    int flag = 0;
    MPI_Initialized(&flag);
    EXPECT_NE(flag, 0);
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, WithoutThreadsItSaysWhatToCall) {
  const auto body = [](int) {
    MPI_Init(nullptr, nullptr);
    const auto error = expect_error<UsageError>([] { World::join({.engine = "mpi"}); });
    EXPECT_NE(error.message().find("MPI_Init_thread"), std::string::npos);
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, RanksThatMpirunHasNotStartedAreRefused) {
  const auto body = [](int) {
    const auto error = expect_error<UsageError>([] { World::join({.engine = "mpi"}); });
    EXPECT_NE(error.message().find("Start the program with mpirun"), std::string::npos);
  };
  // OpenMPI leaks a little.
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = {{"ASAN_OPTIONS", "detect_leaks=0"}}})));
}

TEST(MpiEngine, AWorldMayBeACommunicatorInAnyOrder) {
  const auto body = [](int) {
    const int rank = start_mpi();
    MPI_Comm half = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);  // 4, 2, 0 and 3, 1
    {
      const World world = join_mpi(half);
      MPI_Comm_free(&half);
      ASSERT_EQ(world.size(), rank % 2 == 0 ? 3 : 2);
      EXPECT_EQ(world.rank(), (4 - rank) / 2);
      const auto all = world.all_gather(at::full({1}, rank));
      for (int peer = 0; peer < world.size(); ++peer) {
        EXPECT_EQ(all[peer].item<int>(), (rank % 2 == 0 ? 4 : 3) - 2 * peer);
      }
      expect_sum(world.duplicate());  // the communicator is gone, its copy is not
      expect_sum(join_mpi(MPI_COMM_WORLD));
      expect_sum(join_mpi(MPI_COMM_SELF));
      expect_sum(join_mpi(MPI_COMM_WORLD, {.engine = "shm"}));
      expect_sum(world);
    }
    expect_error<UsageError>([] { join_mpi(MPI_COMM_NULL); });
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(5, body, mpirun(5))));
}

// As if on another host: in a user namespace of its own. False where the system forbids it.
bool move_away() {
  const uid_t user = ::getuid();
  const gid_t group = ::getgid();
  if (::unshare(CLONE_NEWUSER) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << user << " " << user << " 1";
  std::ofstream("/proc/self/gid_map") << group << " " << group << " 1";
  return true;
}

TEST(MpiEngine, OverSeveralHostsTheStoreHasAPortOfItsOwn) {
  const auto body = [](int) {
    const bool is_away = std::string(std::getenv("OMPI_COMM_WORLD_RANK")) == "2" && move_away();
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      if (rank == 2) {
        EXPECT_EQ(world.local_size(), is_away ? 1 : 3);
      }
      expect_sum(world);
      expect_sum(world.duplicate());
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, mpirun(3, {"--mca", "btl", "tcp,self"}))));
}

TEST(MpiEngine, AWorldMayBeSomeOfTheProcesses) {
  auto options = mpirun(3);
  const auto path =
      std::filesystem::temp_directory_path() / ("lockstep-mpi-" + std::to_string(::getpid()));
  options.variables["LOCKSTEP_TEST_FILE"] = path;
  const auto body = [](int rank) {
    start_mpi();
    ::setenv("LOCKSTEP_HOST_ID", rank == 0 ? "b" : "a", 1);
    if (rank != 1) {  // which takes no part
      const auto store = c10::make_intrusive<c10d::FileStore>(std::getenv("LOCKSTEP_TEST_FILE"), 2);
      for (const std::string engine : {"mpi", "auto"}) {
        const World world =
            World::join({.engine = engine, .rank = rank == 2 ? 0 : 1, .size = 2, .store = store});
        expect_sum(world);
        EXPECT_EQ(world.all_gather(at::full({1}, rank))[0].item<int>(), 2);
        EXPECT_TRUE(world.backend()->getBackendName().ends_with("mpi")) << "mpirun started it";
      }
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, options)));
  std::filesystem::remove(path);
}

at::Tensor numbers(int rank, std::int64_t count, at::ScalarType type) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank) + 1);
  return at::randn({count}, generator).to(type);
}

// ((g0+g1)+(g2+g3)) in f32, rounded once.
at::Tensor tree(int size, std::int64_t count, at::ScalarType type) {
  std::vector<at::Tensor> level;
  for (int rank = 0; rank < size; ++rank)
    level.push_back(numbers(rank, count, type).to(at::kFloat));
  while (level.size() > 1) {
    std::vector<at::Tensor> next;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      next.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = next;
  }
  return level[0].to(type);
}

class Bits : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Bits, testing::Values(2, 3, 4));

TEST_P(Bits, TheSumIsTheTreeWhateverTheSize) {
  const auto body = [&](int) {
    const World world = World::join({.engine = "mpi"});
    ASSERT_EQ(world.size(), GetParam());
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      // With the header, in slices, and in several pieces.
      for (const std::int64_t count : {1, 1000, 1001, 100003, (16 << 20) + 5}) {
        if (count > 200000 && type != at::kBFloat16) continue;  // one such is enough
        const auto sum = world.all_reduce(numbers(world.rank(), count, type));
        EXPECT_TRUE(at::equal(sum, tree(world.size(), count, type))) << type << " " << count;
      }
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(GetParam(), body, mpirun(GetParam()))));
}

TEST(MpiEngine, EachRankMayHaveAFactor) {
  const auto body = [](int rank) {
    const World world = World::join({.engine = "mpi"});
    for (const std::int64_t count : {10, 10000}) {
      const auto tensor = at::ones({count});
      world.all_reduce(tensor, c10d::makePreMulSum(rank == 0 ? 0.25 : 0.75));
      EXPECT_TRUE(at::equal(tensor, at::ones({count})));
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, LargeOperationsGoInPieces) {
  const auto body = [](int) {
    const World world = World::join({.engine = "mpi"});
    const std::int64_t count = (9 << 20) + 3;  // 36 MiB
    const auto mine = at::arange(count, at::kInt).add_(world.rank());
    const auto all = world.all_gather(mine);
    for (int peer = 0; peer < world.size(); ++peer) {
      EXPECT_TRUE(at::equal(all[peer], at::arange(count, at::kInt).add_(peer)));
    }
    EXPECT_TRUE(at::equal(world.broadcast(mine.clone(), 1), all[1]));
    EXPECT_TRUE(at::equal(world.reduce_scatter(all), all[world.rank()] * 2));
    std::vector<at::Tensor> tensors = {mine.clone()};
    c10d::ReduceOptions to_last;
    to_last.rootRank = 1;
    world.backend()->reduce(tensors, to_last)->wait();
    EXPECT_TRUE(at::equal(tensors[0], world.rank() == 1 ? all[0] + all[1] : mine));
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, MoreBytesThanAnIntCounts) {
  if (soak(0, 1) == 0) return;  // takes 7 GB
  auto options = mpirun(2);
  options.deadline = seconds(300);
  const auto body = [](int rank) {
    const World world = World::join({.engine = "mpi"});
    const std::int64_t count = (std::int64_t{1} << 31) + 5;
    std::vector<at::Tensor> tensors = {at::ones({count}, at::kChar)};
    world.all_reduce(tensors[0]);
    EXPECT_EQ(tensors[0].min().item<int>(), 2);
    EXPECT_EQ(tensors[0].max().item<int>(), 2);
    if (rank == 0) {
      world.backend()->send(tensors, 1, 0)->wait();
    } else {
      tensors[0].zero_();
      world.backend()->recv(tensors, 0, 0)->wait();
      EXPECT_EQ(tensors[0].min().item<int>(), 2);
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, options)));
}

TEST(MpiEngine, MessagesThatNobodyWaitsForArrive) {
  const auto body = [](int rank) {
    const World world = World::join({.engine = "mpi"});
    if (rank == 0) {
      std::vector<at::Tensor> out = {at::full({1000000}, 7)};
      world.backend()->send(out, 1, 3);  // neither work nor tensor is kept
    } else {
      std::this_thread::sleep_for(milliseconds(200));
      std::vector<at::Tensor> in = {at::zeros({1000000}, at::kLong)};
      world.backend()->recv(in, 0, 3)->wait();
      EXPECT_EQ(in[0].sum().item<std::int64_t>(), 7000000);
    }
    world.barrier();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, DifferentCallsThrowOnAllRanksAndShowBothSides) {
  const auto body = [](int) {
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      const auto error = expect_error<MismatchError>([&] {
        if (rank == 2) {
          world.broadcast(at::zeros({50000}));
        } else {
          world.all_reduce(at::zeros({50000}));
        }
      });
      EXPECT_NE(error.message().find("is all_reduce of f32[50000], 200000 bytes on rank 0, but "
                                     "broadcast of f32[50000], 200000 bytes on rank 2"),
                std::string::npos);
    }
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      const auto tensor = at::zeros({rank == 1 ? 5 : 4});
      expect_error<MismatchError>([&] { world.all_reduce(tensor); });
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, mpirun(3))));
}

// Of different worlds, which do not see each other's messages.
TEST(MpiEngine, RanksThatWaitInDifferentWorldsAreTold) {
  const auto body = [](int) {
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD, {.timeout = seconds(60)});
      const World metrics = world.duplicate("the metrics");
      const auto error = expect_error<MismatchError>([&] { (rank == 1 ? metrics : world).sum(1); });
      EXPECT_NE(error.message().find("ranks 0, 2 in all_reduce of f64[1], 8 bytes, of the world; "
                                     "rank 1 in all_reduce of f64[1], 8 bytes, of the metrics"),
                std::string::npos);
      std::this_thread::sleep_for(seconds(2));  // until all have seen it
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, mpirun(3))));
}

TEST(MpiEngine, WhoIsSentTheWrongSizeTellsTheOthers) {
  const auto body = [](int) {
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      std::vector<std::int64_t> splits = {1, rank == 0 ? 2 : 1, 1};
      std::vector<std::int64_t> even = {1, 1, 1};
      auto in = at::zeros({rank == 0 ? 4 : 3});
      auto out = at::zeros({3});
      const auto error = expect_error<MismatchError>([&] {
        world.backend()->alltoall_base(out, in, even, splits)->wait();
        EXPECT_NE(rank, 1);
        world.barrier();
      });
      EXPECT_EQ(error.message().starts_with("Because rank 1: "), rank != 1);
      EXPECT_NE(error.message().find("Rank 0 sends 8 bytes, but rank 1 has room for 4"),
                std::string::npos);
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, mpirun(3))));
}

TEST(MpiEngine, AMessageOfAnotherSizeIsAMismatch) {
  const auto body = [](int) {
    const int rank = start_mpi();
    for (const int sent : {3, 5}) {
      const World world = join_mpi(MPI_COMM_WORLD, {.timeout = seconds(10)});
      std::vector<at::Tensor> tensors = {at::zeros({rank == 0 ? sent : 4})};
      if (rank == 0) {
        world.backend()->send(tensors, 1, 0)->wait();
        world.store()->wait({"seen"});
      } else {
        expect_error<MismatchError>([&] { world.backend()->recv(tensors, 0, 0)->wait(); });
        world.store()->set("seen", "");
      }
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, ARankThatStaysAwayIsATimeoutThatNamesIt) {
  const auto body = [](int) {
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD, {.timeout = milliseconds(1000)});
      expect_sum(world);
      if (rank == 1) {
        std::this_thread::sleep_for(seconds(4));
      } else {
        const auto error = expect_error<TimeoutError>([&] { world.all_reduce(at::ones({10})); });
        EXPECT_EQ(error.peer(), 1);
        EXPECT_NE(error.message().find("all_reduce of f32[10], 40 bytes waited 1.0 s for rank 1."),
                  std::string::npos);
        const auto start = std::chrono::steady_clock::now();
        const auto later = expect_error<TimeoutError>([&] { world.barrier(); });
        EXPECT_EQ(later.message(), error.message());
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(500));
      }
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, AWaitThatReachesItsLimitEndsNothing) {
  const auto body = [](int) {
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      std::vector<at::Tensor> tensors = {at::ones({100000})};
      std::vector<at::Tensor> sum = {at::ones({100000})};
      if (rank == 0) {
        const auto work = world.backend()->recv(tensors, 1, 0);
        const auto reduced = world.backend()->allreduce(sum);
        expect_error<TimeoutError>([&] { work->wait(milliseconds(300)); });
        expect_error<TimeoutError>([&] { reduced->wait(milliseconds(100)); });
        EXPECT_FALSE(work->isCompleted());
        world.store()->set("seen", "");
        work->wait();
        reduced->wait();
      } else {
        world.store()->wait({"seen"});
        world.backend()->send(tensors, 0, 0)->wait();
        world.backend()->allreduce(sum)->wait();
      }
      EXPECT_EQ(sum[0][0].item<int>(), 2);
      expect_sum(world);
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

TEST(MpiEngine, AnOperationMayHaveATimeoutOfItsOwn) {
  const auto body = [](int) {
    const int rank = start_mpi();
    for (const bool is_message : {false, true}) {
      const World world = join_mpi(MPI_COMM_WORLD, {.timeout = std::chrono::minutes(10)});
      if (rank == 0) {
        std::vector<at::Tensor> tensors = {at::ones({10})};
        c10d::AllreduceOptions options;
        options.timeout = milliseconds(700);
        world.backend()->setTimeout(milliseconds(600));
        const auto error = expect_error<TimeoutError>([&] {
          (is_message ? world.backend()->recv(tensors, 1, 0)
                      : world.backend()->allreduce(tensors, options))
              ->wait();
        });
        EXPECT_NE(error.message().find(is_message ? "waited 0.6 s" : "waited 0.7 s"),
                  std::string::npos);
        world.store()->set("seen", "");
      }
      world.store()->wait({"seen"});
    }
    MPI_Finalize();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

// A large message that nobody takes cannot be taken back, and MPI may read it at any time.
TEST(MpiEngine, MemoryOfAMessageBetweenHostsIsKeptForMpi) {
  const auto body = [](int rank) {
    ::setenv("LOCKSTEP_HOST_ID", rank == 1 ? "b" : "a", 1);
    static std::atomic<bool> is_freed{false};
    {
      const World world = World::join({.engine = "hierarchical:mpi"});
      if (rank == 0) {
        constexpr std::int64_t kCount = 4 << 20;
        std::vector<at::Tensor> tensors = {at::from_blob(
            new float[kCount], {kCount},
            [](void* memory) {
              delete[] static_cast<float*>(memory);
              is_freed = true;
            },
            at::kFloat)};
        world.backend()->send(tensors, 1, 0);
        std::this_thread::sleep_for(milliseconds(300));  // until MPI has it
      }
      world.barrier();
    }
    if (rank == 0) std::cout << (is_freed ? "was freed" : "was kept") << std::endl;
  };
  // mpirun complains of a rank that may not finalise MPI any more.
  const auto results = run_ranks(2, body, mpirun(2));
  EXPECT_NE(results[0].output.find("was kept"), std::string::npos) << show(results);
}

TEST(MpiEngine, TheOthersHearOfARankThatLeaves) {
  const auto body = [](int) {
    const int rank = start_mpi();
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      expect_sum(world);
      if (rank != 1) {
        const auto error = expect_error<PeerLostError>([&] { world.all_reduce(at::ones({10})); });
        EXPECT_EQ(error.peer(), 1);
        EXPECT_NE(error.message().find("which has left this world"), std::string::npos);
      }
    }
    {
      const World world = join_mpi(MPI_COMM_WORLD);
      std::vector<at::Tensor> tensors = {at::ones({10})};
      if (rank == 0) {
        const auto work = world.backend()->recv(tensors, 1, 0);
        EXPECT_EQ(expect_error<PeerLostError>([&] { work->wait(); }).peer(), 1);
      }
    }
    MPI_Finalize();
  };
  auto options = mpirun(3);
  options.deadline = seconds(30);
  EXPECT_TRUE(all_passed(run_ranks(3, body, options)));
}

// Usually mpirun ends the whole job; OpenMPI's lets it go on if asked, and the others hear of it.
TEST(MpiEngine, AKilledRankIsLost) {
  const auto body = [](int rank) {
    const World world = World::join({.engine = "mpi"});
    for (int step = 0;; ++step) {
      if (rank == 1 && step == 2) std::raise(SIGKILL);
      try {
        world.all_reduce(at::ones({1000}));
      } catch (const PeerLostError& error) {
        EXPECT_EQ(error.peer(), 1);
        std::cout << "rank " << rank << " heard: " << error.what() << std::endl;
        std::this_thread::sleep_for(seconds(1));  // until the others have, too
        return;
      }
    }
  };
  const auto results = run_ranks(3, body, mpirun(3, {"--enable-recovery"}));
  EXPECT_FALSE(results[0].was_late) << show(results);
  for (const char* text : {"rank 0 heard: ", "rank 2 heard: ", "all_reduce of f32[1000]"}) {
    EXPECT_NE(results[0].output.find(text), std::string::npos) << show(results);
  }
  EXPECT_EQ(results[0].output.find("MPI_ABORT"), std::string::npos) << show(results);
}

TEST(MpiEngine, AProgramMayFinaliseMpiUnderAWorld) {
  const auto body = [](int) {
    start_mpi();
    const World world = join_mpi(MPI_COMM_WORLD);
    expect_sum(world);
    MPI_Finalize();
    const auto error = expect_error<UsageError>([&] { world.barrier(); });
    EXPECT_NE(error.message().find("MPI_Finalize"), std::string::npos);
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, mpirun(2))));
}

}  // namespace
}  // namespace lockstep::test
