// FaultScript: what goes wrong, on which rank, at which step. Ranks play it themselves:
//
//   const auto script = FaultScript().kill_at(1, 3);
//   run_ranks(2, [&](int rank) { for (int step = 0; step < 9; ++step) { script.play(rank, step);
//   ... } });
#pragma once

#include <unistd.h>

#include <csignal>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>

namespace lockstep::test {

class FaultScript {
 public:
  FaultScript& kill_at(int rank, int step) { return signal_at(rank, step, SIGKILL); }
  FaultScript& stop_at(int rank, int step) { return signal_at(rank, step, SIGSTOP); }
  FaultScript& exit_at(int rank, int step, int code) {
    return at(rank, step, [code] { ::_exit(code); });
  }
  FaultScript& throw_at(int rank, int step) {
    return at(rank, step, [] { throw std::runtime_error("a fault of the script"); });
  }

  // Called by each rank when it reaches a step.
  void play(int rank, int step) const {
    const auto found = faults_.find({rank, step});
    if (found != faults_.end()) found->second();
  }

 private:
  FaultScript& signal_at(int rank, int step, int signal) {
    return at(rank, step, [signal] { ::raise(signal); });
  }
  FaultScript& at(int rank, int step, std::function<void()> fault) {
    faults_[{rank, step}] = std::move(fault);
    return *this;
  }

  std::map<std::pair<int, int>, std::function<void()>> faults_;
};

}  // namespace lockstep::test
