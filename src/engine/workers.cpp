#include "engine/workers.h"

#include "base/posix.h"

namespace lockstep {

Workers::~Workers() {
  while (true) {
    std::vector<std::thread> threads;
    {
      const MutexLock lock(shared_->mutex);
      shared_->is_ending = true;
      threads.swap(shared_->threads);
    }
    if (threads.empty()) return;
    shared_->changed.notify_all();
    for (std::thread& thread : threads) {
      thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
    }
  }
}

void Workers::run(std::function<void()> job) {
  const MutexLock lock(shared_->mutex);
  if (shared_->num_idle <= shared_->jobs.size()) {
    const NoSigpipe no_sigpipe;  // for the thread: it may write to connections
    shared_->threads.emplace_back([shared = shared_] { work(*shared); });
  }
  shared_->jobs.push_back(std::move(job));
  shared_->changed.notify_one();
}

void Workers::work(Shared& shared) {
  const MutexLock lock(shared.mutex);
  while (true) {
    while (shared.jobs.empty() && !shared.is_ending) {
      ++shared.num_idle;
      shared.changed.wait(shared.mutex);
      --shared.num_idle;
    }
    if (shared.jobs.empty()) return;
    std::function<void()> job = std::move(shared.jobs.front());
    shared.jobs.pop_front();
    const MutexUnlock unlock(shared.mutex);
    job();
    job = nullptr;  // what it holds may have to go without the lock, too
  }
}

}  // namespace lockstep
