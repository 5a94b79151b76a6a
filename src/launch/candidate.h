// Candidate: this launcher in a job whose coordinator is elected (--coordinator).
//
// It follows whoever holds the lease in etcd (a RemoteLeader), until it is elected itself: then it
// is the Coordinator, with the ranks that run here, to the end. If it loses the lease, it stops.
// Threading: the event loop's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "launch/coordinator.h"
#include "launch/election.h"

namespace lockstep {

class Candidate {
 public:
  // Throws: UsageError.
  Candidate(EventLoop& loop, Output& output, Host& host, const RunOptions& options);

  Coordinator* coordinator() const { return coordinator_.get(); }  // null: another one is
  // At the end of the job. See Election::resign.
  void resign(std::function<void()> done = {});

 private:
  void on_elected(const ElectedLeader& leader);
  void on_lost(const std::string& reason);
  void on_unreachable(const std::string& reason);

  EventLoop& loop_;
  Output& output_;
  Host& host_;
  const RunOptions& options_;
  bool is_resigned_ = false;
  std::unique_ptr<RemoteLeader> remote_;
  std::unique_ptr<Coordinator> coordinator_;
  std::optional<Election> election_;  // destroyed first: it calls back
};

}  // namespace lockstep
