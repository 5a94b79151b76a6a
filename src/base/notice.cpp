#include "base/notice.h"

#include <sys/mman.h>
#include <unistd.h>

namespace lockstep {

static_assert(std::atomic<int>::is_always_lock_free);

Fd make_notice() {
  Fd memory = make_memfd("lockstep-notice");
  if (::ftruncate(memory.get(), sizeof(std::atomic<int>)) != 0) {
    throw_errno("cannot make memory for notices", "Free some memory.");
  }
  return memory;
}

void write_notice(int fd, int generation) {
  // A store of an aligned word through the page cache, which is what ranks have mapped.
  if (::pwrite(fd, &generation, sizeof generation, 0) != static_cast<ssize_t>(sizeof generation)) {
    throw_errno("cannot write a notice", "Free some memory.");
  }
}

Notice::Notice(int fd) {
  void* const memory = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {  // NOLINT: the system's macro casts
    throw_errno("cannot map the launcher's notices",
                "Start the program with lockstep run, which passes a descriptor on.");
  }
  wanted_ = static_cast<const std::atomic<int>*>(memory);
}

}  // namespace lockstep
