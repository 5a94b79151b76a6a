// Mutex, MutexLock, Condition: the standard ones, with annotations by which clang checks at compile
// time that guarded state is touched only under its lock (-Wthread-safety, in ./dev verify).
//
//   Mutex mutex_;
//   int count_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
//   void add() LOCKSTEP_REQUIRES(mutex_);
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define LOCKSTEP_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define LOCKSTEP_THREAD_ANNOTATION(x)
#endif
#define LOCKSTEP_CAPABILITY(x) LOCKSTEP_THREAD_ANNOTATION(capability(x))
#define LOCKSTEP_SCOPED_CAPABILITY LOCKSTEP_THREAD_ANNOTATION(scoped_lockable)
#define LOCKSTEP_GUARDED_BY(x) LOCKSTEP_THREAD_ANNOTATION(guarded_by(x))
#define LOCKSTEP_REQUIRES(...) LOCKSTEP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define LOCKSTEP_EXCLUDES(...) LOCKSTEP_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define LOCKSTEP_ACQUIRE(...) LOCKSTEP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define LOCKSTEP_TRY_ACQUIRE(...) LOCKSTEP_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define LOCKSTEP_RELEASE(...) LOCKSTEP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))

namespace lockstep {

template <typename Standard>
class LOCKSTEP_CAPABILITY("mutex") BasicMutex {
 public:
  void lock() LOCKSTEP_ACQUIRE() { standard_.lock(); }
  bool try_lock() LOCKSTEP_TRY_ACQUIRE(true) { return standard_.try_lock(); }
  void unlock() LOCKSTEP_RELEASE() { standard_.unlock(); }

 private:
  friend class Condition;
  Standard standard_;
};
using Mutex = BasicMutex<std::mutex>;
using RecursiveMutex = BasicMutex<std::recursive_mutex>;

template <typename AnyMutex>
class LOCKSTEP_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(AnyMutex& mutex) LOCKSTEP_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() LOCKSTEP_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  AnyMutex& mutex_;
};

// The reverse: the mutex is free while this lives.
class LOCKSTEP_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) LOCKSTEP_RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~MutexUnlock() LOCKSTEP_RELEASE() { mutex_.lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits may end early: look at the state again, in a loop.
class Condition {
 public:
  void notify_one() noexcept { standard_.notify_one(); }
  void notify_all() noexcept { standard_.notify_all(); }

  void wait(Mutex& mutex) LOCKSTEP_REQUIRES(mutex) {
    std::unique_lock lock(mutex.standard_, std::adopt_lock);
    standard_.wait(lock);
    lock.release();
  }
  // False at the deadline.
  template <typename Time>
  bool wait_until(Mutex& mutex, const Time& deadline) LOCKSTEP_REQUIRES(mutex) {
    std::unique_lock lock(mutex.standard_, std::adopt_lock);
    const bool is_early = standard_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return is_early;
  }
  template <typename Duration>
  bool wait_for(Mutex& mutex, const Duration& limit) LOCKSTEP_REQUIRES(mutex) {
    return wait_until(mutex, std::chrono::steady_clock::now() + limit);
  }

 private:
  std::condition_variable standard_;
};

}  // namespace lockstep
