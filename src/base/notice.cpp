#include "base/notice.h"

#include <sys/mman.h>
#include <unistd.h>

namespace lockstep {

Fd make_notice() {
  Fd memory = make_memfd("lockstep-notice");
  if (::ftruncate(memory.get(), sizeof(NoticeWords)) != 0) {
    throw_errno("cannot make memory for notices", "Free some memory.");
  }
  return memory;
}

void write_notice(int fd, const NoticeWords& words) {
  // Stores of aligned words through the page cache, which is what ranks have mapped.
  if (::pwrite(fd, &words, sizeof words, 0) != static_cast<ssize_t>(sizeof words)) {
    throw_errno("cannot write a notice", "Free some memory.");
  }
}

Notice::Notice(int fd) {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {  // NOLINT: the system's macro casts
    throw_errno("cannot map the launcher's notices",
                "Start the program with lockstep run, which passes a descriptor on.");
  }
  shared_ = static_cast<const Shared*>(memory);
}

}  // namespace lockstep
