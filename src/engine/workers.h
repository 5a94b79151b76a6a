// Workers: threads for jobs that wait for long. Each job has a thread to itself; one that is idle
// takes the next job, and without jobs there are no threads.
//
// Threading: any thread may call, and any may destroy it, also one of its own in the middle of a
// job.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace lockstep {

class Workers {
 public:
  Workers() = default;
  ~Workers();  // returns when all jobs are done, but for one that it is called in
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Runs the job, which does not throw, and may call this, too. Throws std::system_error if there
  // can be no more threads.
  void run(std::function<void()> job);

 private:
  // Outlives its Workers where a job destroys them.
  struct Shared {
    Mutex mutex;
    Condition changed;
    std::deque<std::function<void()>> jobs LOCKSTEP_GUARDED_BY(mutex);  // that no thread has yet
    std::size_t num_idle LOCKSTEP_GUARDED_BY(mutex) = 0;
    bool is_ending LOCKSTEP_GUARDED_BY(mutex) = false;
    std::vector<std::thread> threads LOCKSTEP_GUARDED_BY(mutex);
  };
  static void work(Shared& shared);

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace lockstep
