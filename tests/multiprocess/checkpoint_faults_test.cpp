// Checkpoints when something fails: the disk, a rank, the whole job.
//
// write(2), fsync(2), flock(2) and rename(2) of lockstep's own code are these here (--wrap of the
// linker), and fail when a test says so.

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/rmsprop.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <random>
#include <thread>

#include "base/text.h"
#include "multiprocess/checkpoint_run.h"
#include "support/job.h"
#include "support/run_ranks.h"

namespace {

// The call, the error, and how many of these calls succeed before it.
struct Fault {
  std::string call;
  int error = 0;
  std::atomic<int> left = 0;
} fault;

bool fails(const char* call) {
  if (fault.call != call || fault.left-- > 0) return false;
  errno = fault.error;
  return true;
}

}  // namespace

extern "C" {
ssize_t __real_write(int fd, const void* bytes, std::size_t size);
int __real_fsync(int fd);
int __real_rename(const char* from, const char* to);
int __real_flock(int fd, int operation);
ssize_t __wrap_write(int fd, const void* bytes, std::size_t size) {
  return fd > 2 && fails("write") ? -1 : __real_write(fd, bytes, size);
}
int __wrap_fsync(int fd) {
  struct stat status {};
  const bool is_folder = ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
  return fails("fsync") || (is_folder && fails("fsync of a folder")) ? -1 : __real_fsync(fd);
}
int __wrap_flock(int fd, int operation) {
  return fails("flock") ? -1 : __real_flock(fd, operation);
}
int __wrap_rename(const char* from, const char* to) {
  return fails("rename") ? -1 : __real_rename(from, to);
}
}

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

// Each call of a save fails once, on one of two ranks: all hear of it, and what was there stays.
TEST(DiskFaults, AreReportedOnAllRanksAndLoseNothing) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join();
    Training run(world);
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    run.step();
    checkpoints.save(1);
    const auto before = run.state();
    int num_faults = 0;
    for (const bool is_async : {false, true}) {
      for (const int bad_rank : {0, 1}) {
        for (const char* const call : {"write", "fsync", "rename"}) {
          for (const int error : {ENOSPC, EIO}) {
            for (int left = 0; left < 12; ++left) {
              if (rank == bad_rank) {
                fault.error = error;
                fault.left = left;
                fault.call = call;
              }
              bool is_saved = true;
              try {
                if (is_async) {
                  checkpoints.save_async(2);
                  checkpoints.wait();
                } else {
                  checkpoints.save(2);
                }
              } catch (const SystemError& failure) {
                is_saved = false;
                EXPECT_EQ(failure.code(), error) << failure.what();
                EXPECT_EQ(failure.peer(), bad_rank);
                const std::string text = failure.what();
                EXPECT_NE(text.find(std::strerror(error)), std::string::npos) << text;
                EXPECT_EQ(text.find("Because rank") == std::string::npos, rank == bad_rank) << text;
              }
              fault.call = "";
              world.barrier();
              const Loaded loaded = checkpoints.load_latest();
              EXPECT_TRUE(loaded.skipped.empty()) << loaded.skipped.front();
              // A rename that happened but is not known to be on the disk may stay.
              if (is_saved) {
                EXPECT_EQ(loaded.step, 2);
                EXPECT_TRUE(is_equal(before, run.state()));
              }
              for (const auto& entry : fs::directory_iterator(folder.path())) {
                EXPECT_FALSE(entry.path().filename().string().starts_with(".unfinished"))
                    << entry.path();
              }
              world.barrier();
              if (is_saved) break;  // there are no more such calls
              ++num_faults;
            }
          }
        }
      }
    }
    EXPECT_GT(num_faults, 30);
  };
  EXPECT_TRUE(all_passed(run_ranks(
      2, body, {.deadline = std::chrono::seconds(150), .variables = folder.variables()})));
}

// File systems that can less: they are warned of, and used.
TEST(DiskFaults, AFileSystemWithoutLocksOrSyncsOfFoldersIsUsable) {
  for (const auto& [call, error, words] :
       {std::tuple{"fsync of a folder", EINVAL, "cannot fsync a folder"},
        std::tuple{"flock", ENOSYS, "has no locks"}, std::tuple{"flock", ENOLCK, "has no locks"}}) {
    const TempFolder folder;
    fault.call = call;
    fault.error = error;
    fault.left = 0;
    testing::internal::CaptureStderr();
    const World world = World::join();
    Training run(world);
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    run.step();
    checkpoints.save(1);
    EXPECT_EQ(checkpoints.load_latest().step, 1);
    fault.call = "";
    const std::string text = testing::internal::GetCapturedStderr();
    const std::size_t first = text.find(words);
    ASSERT_NE(first, std::string::npos) << text;
    EXPECT_EQ(text.find(words, first + 1), std::string::npos) << text;
  }
}

// A rank is killed at a random moment while checkpoints are saved one after the other. The newest
// that is whole is never older than the last of which a rank was told that it is saved.
TEST(RandomKill, NeverLosesACheckpoint) {
  const TempFolder folder;
  const int round =
      std::getenv("LOCKSTEP_TEST_ROUND") ? std::atoi(std::getenv("LOCKSTEP_TEST_ROUND")) : 0;
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    const std::vector<NamedTensor> tensors = {{"a", at::zeros({1 << 18})},
                                              {"b", at::zeros({1 << 18})}};
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(tensors);
    const Loaded loaded = checkpoints.load_latest();
    EXPECT_TRUE(loaded.skipped.empty());
    const std::string told = folder.path() + "/.told-" + std::to_string(rank);
    std::int64_t last = 0;
    std::ifstream(told) >> last;
    EXPECT_GE(loaded.step, last);
    EXPECT_TRUE(tensors[0].tensor.eq(static_cast<double>(loaded.step)).all().item<bool>());
    EXPECT_TRUE(tensors[1].tensor.eq(static_cast<double>(loaded.step)).all().item<bool>());
    text::print("ready from {}\n", loaded.step);
    std::fflush(stdout);
    if (testing::Test::HasFailure()) return;
    try {
      for (std::int64_t step = loaded.step + 1;; ++step) {
        for (const NamedTensor& one : tensors) one.tensor.fill_(static_cast<double>(step));
        if (round % 2 == 0) {
          checkpoints.save(step);
        } else {
          checkpoints.save_async(step);
          checkpoints.wait();
        }
        std::ofstream(told + ".new") << step;
        fs::rename(told + ".new", told);
      }
    } catch (const Error&) {  // the other one is dead
    }
  };
  std::mt19937 random(std::random_device{}());
  const int rounds = soak(12, 300);
  for (int i = 0; i < rounds; ++i) {
    auto variables = folder.variables();
    variables["LOCKSTEP_TEST_ROUND"] = std::to_string(i);
    Ranks ranks(2, body, {.variables = variables});
    ranks.wait_for_output(0, "ready from");
    ranks.wait_for_output(1, "ready from");
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
    const int victim = static_cast<int>(random() % 2);
    ranks.kill(victim, SIGKILL);
    const auto results = ranks.wait();
    const auto& other = results[static_cast<std::size_t>(1 - victim)];
    ASSERT_TRUE(other.status.is_ok()) << "round " << i << "\n" << show(results);
  }
}

// tests/programs/trainer.cpp saves when it is told to stop, and goes on from there.
int count(const std::string& text, const std::string& what) {
  int times = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) {
    ++times;
  }
  return times;
}

TEST(Preemption, OneRankIsToldAllSaveAndTheJobGoesOn) {
  const TempFolder folder("");
  Job job({"run", "-n", "2", "--max-restarts", "1", "--", LOCKSTEP_TRAINER, folder.path(), "40"});
  job.wait_for_output("rank 1 is at step 5 ");
  const std::string line = job.out().substr(job.out().find("rank 1 is process ") + 18);
  ::kill(std::stoi(line), SIGTERM);
  EXPECT_EQ(job.wait().code, 0) << job.out() << job.err();
  EXPECT_NE(job.err().find("was told to stop, and has saved its state"), std::string::npos)
      << job.err();
  EXPECT_NE(job.err().find("restart 1 of 1"), std::string::npos);
  EXPECT_EQ(count(job.out(), "saves at step"), 2);
  EXPECT_EQ(count(job.out(), "goes on from step"), 2);
  // Every step once on each rank, over both lives.
  for (int step = 1; step <= 40; ++step) {
    EXPECT_EQ(count(job.out(), text::format("is at step {} ", step)), 2) << step;
  }
  EXPECT_EQ(count(job.out(), "weights are right"), 2);
}

TEST(Preemption, TheLauncherIsToldAndSaysThatTheJobCanGoOn) {
  const TempFolder folder("");
  Job job(
      {"run", "-n", "2", "--max-restarts", "3", "--", LOCKSTEP_TRAINER, folder.path(), "100000"});
  job.wait_for_output("rank 1 is at step 5 ");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait().code, kExitPreempted) << job.err();
  EXPECT_NE(job.err().find("All ranks have saved their state: start the job again to go on."),
            std::string::npos)
      << job.err();
  EXPECT_EQ(count(job.err(), "restart"), 0) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

// A rank that fails counts for more than another that has saved and left.
TEST(Preemption, ACrashIsNotTakenForASavedState) {
  const auto result =
      run_job({"run", "-n", "2", "--", "sh", "-c", "[ $RANK = 0 ] && exit 75; sleep 0.3; exit 3"});
  EXPECT_EQ(result.code, 3) << result.err;
  EXPECT_NE(result.err.find("rank 1 "), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("has saved its state"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace lockstep::test
