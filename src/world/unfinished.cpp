#include "world/unfinished.h"

#include <utility>

namespace lockstep {

void UnfinishedWorks::add(c10::intrusive_ptr<c10d::Work> work, std::string operation,
                          std::string subject) {
  const MutexLock lock(mutex_);
  all_.push_back({std::move(work), std::move(operation), std::move(subject)});
}

std::optional<UnfinishedWorks::Failure> UnfinishedWorks::take_failure() {
  const MutexLock lock(mutex_);
  if (all_.empty()) return std::nullopt;
  std::optional<Failure> first;
  std::vector<One> left;
  for (One& one : all_) {
    if (!one.work->isCompleted()) {
      left.push_back(std::move(one));
    } else if (const auto error = one.work->exception(); error && !first) {
      first = Failure{error, std::move(one.operation), std::move(one.subject)};
    }
  }
  all_ = std::move(left);
  return first;
}

}  // namespace lockstep
