// Shared memory that is there in full, for the same user only, and an error with numbers if not.

#include "shm/segment.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "base/cgroup.h"
#include "support/fake_system.h"
#include "unit/shm/thread_ranks.h"

namespace lockstep::shm {
namespace {

// Runs `body` in a child, which ends with the number it returns.
int in_child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Segment, IsZeroResidentAndSealed) {
  const Segment segment = Segment::create(1 << 20);
  for (std::size_t i = 0; i < segment.size(); ++i) ASSERT_EQ(segment.data()[i], std::byte{0});
  EXPECT_NE(::ftruncate(segment.name().fd, 0), 0) << "a peer could make it shrink";
  EXPECT_EQ(errno, EPERM);
}

TEST(Segment, IsSharedWithAnotherProcess) {
  const Segment segment = Segment::create(8192);
  const SegmentName name = segment.name();
  const int code = in_child([&] {
    const Segment theirs = Segment::attach(name);
    theirs.data()[5000] = std::byte{42};
    return 0;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(segment.data()[5000], std::byte{42});
}

// Each process takes its part, so that a NUMA machine gives it memory that is near.
TEST(Segment, IsTakenInPartsByTheProcessesThatShareIt) {
  if (!Segment::can_take_attached()) return;  // before Linux 5.14
  constexpr std::size_t kBytes = 8 << 20;
  const Segment segment = Segment::create(0, {.reserved_bytes = kBytes});
  const SegmentName name = segment.name();
  const auto resident = [&] {
    struct stat status {};
    EXPECT_EQ(::fstat(name.fd, &status), 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  };
  EXPECT_EQ(resident(), 0U);
  segment.take(0, kBytes / 4, {});
  EXPECT_EQ(resident(), kBytes / 4);
  const int code = in_child([&] {
    const Segment theirs = Segment::attach(name);
    theirs.take(kBytes / 4, kBytes - kBytes / 4, {});
    theirs.data()[kBytes - 1] = std::byte{42};
    return 0;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(resident(), kBytes);
  EXPECT_EQ(segment.data()[kBytes - 1], std::byte{42});
}

TEST(Segment, OfAnotherUserCannotBeAttached) {
  if (::geteuid() != 0) return;  // only root can become another user to try
  const Segment segment = Segment::create(8192);
  const SegmentName name = segment.name();
  const int code = in_child([&] {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) return 1;
    try {
      Segment::attach(name);
      return 2;
    } catch (const SystemError& error) {
      return error.code() == EACCES ? 0 : 3;
    }
  });
  EXPECT_EQ(code, 0);
}

TEST(Segment, ThatIsNotTheOneNamedIsRefused) {
  const Segment segment = Segment::create(8192);
  const Segment twin = Segment::create(8192);
  const Fd other = make_memfd("other");
  ASSERT_EQ(::ftruncate(other.get(), 8192), 0);  // of the same size, but not sealed
  SegmentName other_size = segment.name();
  other_size.bytes = 4096;
  SegmentName other_file = segment.name();
  other_file.fd = other.get();
  SegmentName other_segment = segment.name();  // as if the number had been used again
  other_segment.fd = twin.name().fd;
  SegmentName other_process = segment.name();
  other_process.owner.start_time += 1;
  for (const SegmentName& name : {other_size, other_file, other_segment, other_process}) {
    EXPECT_EQ(in_child([&] {
                try {
                  Segment::attach(name);
                  return 1;
                } catch (const MismatchError&) {
                  return 0;
                }
              }),
              0);
  }
}

TEST(Segment, WhatIsReservedTakesMemoryLater) {
  constexpr std::size_t kBytes = 1 << 20;
  const Segment segment = Segment::create(kBytes, {.reserved_bytes = 4 * kBytes});
  EXPECT_EQ(segment.size(), 5 * kBytes);
  const auto resident = [&] {
    struct stat status {};
    ::fstat(segment.name().fd, &status);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  };
  EXPECT_EQ(resident(), kBytes);
  segment.take(2 * kBytes, kBytes, {});
  EXPECT_EQ(resident(), 2 * kBytes);
  for (std::size_t i = 2 * kBytes; i < 3 * kBytes; ++i) ASSERT_EQ(segment.data()[i], std::byte{0});
  const test::FakeSystem full;
  full.write("/proc/meminfo", "MemAvailable: 1 kB");
  EXPECT_THROW(segment.take(3 * kBytes, kBytes, {.system_root = full.root()}), SystemError);
}

// Another rank that does so while this one looks has no claim any more, or less memory is left.
TEST(Segment, WhatIsTakenMeanwhileCounts) {
  const test::FakeSystem system;
  system.write("/proc/meminfo", "MemAvailable: 1024 kB");
  const auto take_all = [&] {
    system.write("/proc/meminfo", "MemAvailable: 0 kB");
    return std::map<std::uint64_t, double>();
  };
  EXPECT_THROW(Segment::create(8192, {.system_root = system.root(), .claimed_by_others = take_all}),
               SystemError);
}

// What the error says if the limit `resource` leaves no room for 64 MiB.
int refusal_names_bytes(int resource, rlim_t limit, const char* word) {
  return in_child([&] {
    const rlimit tight{limit, limit};
    ::setrlimit(static_cast<__rlimit_resource>(resource), &tight);
    try {
      Segment::create(64 << 20);
      return 1;
    } catch (const SystemError& error) {
      return error.message().find("67108864 bytes of shared memory are needed") == std::string::npos
                 ? 2
             : error.message().find(word) == std::string::npos ? 3
                                                               : 0;
    }
  });
}

TEST(Segment, ATightLimitIsAnErrorWithByteCounts) {
  EXPECT_EQ(refusal_names_bytes(RLIMIT_FSIZE, 1 << 20, "file sizes is 1048576"), 0);
#ifndef LOCKSTEP_SANITIZED  // they need address space
  EXPECT_EQ(refusal_names_bytes(RLIMIT_AS, 32 << 20, "address space is 33554432"), 0);
#endif
  EXPECT_EQ(in_child([] {
              try {
                Segment::create(std::size_t{1} << 50);
                return 1;
              } catch (const SystemError& error) {
                return error.message().find("1125899906842624 bytes") == std::string::npos ? 2 : 0;
              }
            }),
            0);
}

// A real one, where this machine lets us make it: the check above is not all that is needed, the
// kernel must agree with it.
TEST(Cgroup, ThatIsTooSmallIsAnErrorWithByteCounts) {
  const std::string name = "lockstep-test-" + std::to_string(::getpid());
  const bool is_v1 = std::filesystem::exists("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  const std::filesystem::path group =
      std::filesystem::path(is_v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") / name;
  std::error_code error;
  if (!std::filesystem::create_directory(group, error)) {
    GTEST_SKIP() << "this machine lets nobody make a cgroup: " << error.message();
  }
  const int code = in_child([&] {
    std::ofstream(group / (is_v1 ? "memory.limit_in_bytes" : "memory.max")) << (48 << 20);
    std::ofstream(group / "cgroup.procs") << ::getpid();
    if (memory_left_in_cgroup("") > (48 << 20))
      return 77;  // the memory controller is not delegated
    try {
      Segment::create(64 << 20);
      return 1;
    } catch (const SystemError& refusal) {
      const bool names_need =
          refusal.message().find("67108864 bytes of shared memory are needed") != std::string::npos;
      const bool names_cgroup =
          refusal.message().find("memory cgroup has only") != std::string::npos;
      if (!names_need || !names_cgroup) return 2;
    }
    Segment::create(8 << 20);  // what fits is given
    return 0;
  });
  std::filesystem::remove(group, error);
  if (code == 77) GTEST_SKIP() << "this machine's memory controller is not ours to use";
  EXPECT_EQ(code, 0);
}

TEST(Segment, TwoBuildsRefuseEachOther) {
  const Exchange other_build = [](const std::string& mine) {
    return std::vector<std::string>{mine, "999 " + mine.substr(mine.find(' ') + 1)};
  };
  try {
    Group group({.rank = 0, .size = 2}, other_build);
    FAIL();
  } catch (const MismatchError& error) {
    EXPECT_NE(error.message().find("Rank 1 was built with another version"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::shm
