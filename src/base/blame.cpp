#include "base/blame.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;  // of all processes of a host

// From an error to the end of its process: an exception must unwind, which may finish a checkpoint,
// and a crash may dump a core.
constexpr auto kEndMayTake = std::chrono::seconds(30);

struct Blame {
  std::int32_t pid = 0;  // who wrote it: a child of the rank has the variable, too
  std::int32_t blamed = -1;
  Clock::rep when = 0;
};

off_t place_of(int local_rank) { return static_cast<off_t>(sizeof(Blame)) * local_rank; }

}  // namespace

std::string blame_address(int fd, int local_rank) {
  return text::format("{}:{}:{}", fd, local_rank, inode_of(fd));
}

void leave_blame(int rank, int blamed) noexcept {
  const int before = errno;
  const char* const address = std::getenv(kBlameVariable);
  const char* const own_rank = std::getenv("RANK");
  int fd = -1;
  int local_rank = 0;
  unsigned long long inode = 0;
  if (address != nullptr && own_rank != nullptr && std::atoi(own_rank) == rank &&
      std::sscanf(address, "%d:%d:%llu", &fd, &local_rank, &inode) == 3 && inode_of(fd) == inode) {
    const Blame blame{
        .pid = ::getpid(), .blamed = blamed, .when = Clock::now().time_since_epoch().count()};
    [[maybe_unused]] const ssize_t told = ::pwrite(fd, &blame, sizeof blame, place_of(local_rank));
  }
  errno = before;
}

int read_blame(int fd, int local_rank, pid_t pid, Clock::time_point end) {
  Blame blame;
  const ssize_t count = ::pread(fd, &blame, sizeof blame, place_of(local_rank));
  if (count != static_cast<ssize_t>(sizeof blame) || blame.pid != pid) return -1;
  return end - Clock::time_point(Clock::duration(blame.when)) < kEndMayTake ? blame.blamed : -1;
}

}  // namespace lockstep
