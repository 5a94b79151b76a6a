// UnfinishedWorks: operations on a device that were under way when the host stopped waiting.
//
// The host runs ahead of a device: a wait there only orders streams. So each operation is looked at
// until it is done, as one that fails has made no result of what was handed out: by the next step
// of a reducer, and by the next call of a World. Threading: any thread may call.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace lockstep {

class UnfinishedWorks {
 public:
  // What it is, for an error: the `operation` of the `subject`.
  void add(c10::intrusive_ptr<c10d::Work> work, std::string operation, std::string subject);

  struct Failure {
    std::exception_ptr error;
    std::string operation;
    std::string subject;
  };
  // The first of those that have failed since the last call. Waits for none.
  std::optional<Failure> take_failure();

 private:
  struct One {
    c10::intrusive_ptr<c10d::Work> work;
    std::string operation;
    std::string subject;
  };
  Mutex mutex_;
  std::vector<One> all_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
