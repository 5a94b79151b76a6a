#include "base/lifeline.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep {
namespace {

pthread_mutex_t* map_lock(int fd) {
  void* const memory =
      ::mmap(nullptr, sizeof(pthread_mutex_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {  // NOLINT: the system's macro casts
    throw_errno("cannot map the lifeline of a rank",
                "Start the program with lockstep run, which passes a descriptor on.");
  }
  return static_cast<pthread_mutex_t*>(memory);
}

void unmap_lock(pthread_mutex_t* lock) { ::munmap(lock, sizeof *lock); }

}  // namespace

Fd make_lifeline() {
  Fd memory = make_memfd("lockstep-lifeline");
  if (::ftruncate(memory.get(), sizeof(pthread_mutex_t)) != 0) {
    throw_errno("cannot make memory for a lifeline", "Free some memory.");
  }
  const std::unique_ptr<pthread_mutex_t, void (*)(pthread_mutex_t*)> lock(map_lock(memory.get()),
                                                                          unmap_lock);
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(lock.get(), &attributes);
  ::pthread_mutexattr_destroy(&attributes);
  return memory;
}

void watch_lifeline(int fd, std::function<void()> call) {
  pthread_mutex_t* const lock = map_lock(fd);
  try {
    std::thread([lock, call = std::move(call)] {
      ::pthread_mutex_lock(lock);  // EOWNERDEAD, when the kernel has taken it from the rank
      ::pthread_mutex_unlock(lock);
      unmap_lock(lock);
      call();
    }).detach();
  } catch (const std::system_error& error) {
    unmap_lock(lock);
    errno = error.code().value();
    throw_errno("cannot start a thread", "Raise the limit on processes (ulimit -u).");
  }
}

void hold_lifeline(int fd) {
  pthread_mutex_t* const lock = map_lock(fd);  // stays mapped as long as the process lives
  const int result = ::pthread_mutex_trylock(lock);
  if (result == EOWNERDEAD) {  // a thread of this process had it, and has ended
    ::pthread_mutex_consistent(lock);
  } else if (result != 0) {
    unmap_lock(lock);
  }
}

}  // namespace lockstep
