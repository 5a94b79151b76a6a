// Election: which launcher of a job coordinates it, decided by a lease in etcd.
//
// The key /lockstep/<job id>/coordinator names the leader. It is put only if it does not exist, and
// etcd deletes it when the leader's lease ends. Invariant: at most one launcher holds the lease, by
// is_held(): the leader counts the lease from the moment when it asked for it, on its own clock,
// and gives it up a tenth of its time before etcd ends it. Threading: belongs to the loop's thread.
// Calls to etcd block, so they run on threads of their own; these share only a Candidacy with the
// election, and may outlive it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "launch/event_loop.h"

namespace lockstep {

struct ElectedLeader {
  std::string address = {};  // where the other launchers reach it
  int port = 0;
  std::string host = {};  // its name, for messages
  std::int64_t term =
      0;  // larger for each leader of a job: of two that decide, the larger one counts
  bool is_self = false;
};

class Election {
 public:
  struct Callbacks {
    // There is a leader, this launcher or another one; again when it is another, or a new term.
    std::function<void(const ElectedLeader&)> elected = [](const ElectedLeader&) {};
    // This launcher was the leader and can no longer be sure of it: it must stop deciding now. It
    // remains a candidate.
    std::function<void(const std::string& reason)> lost = [](const std::string&) {};
    // etcd does not answer, or not as etcd does. Once per outage; the election continues.
    std::function<void(const std::string& reason)> unreachable = [](const std::string&) {};
  };

  // `url`: as for Etcd (launch/etcd.h). `self`: how the other launchers reach this one; its term is
  // ignored. `ttl`: how long a leader that is gone remains the leader. Callbacks come from the
  // loop, and may destroy the election. Throws: UsageError.
  Election(EventLoop& loop, const std::string& url, const std::string& job_id, ElectedLeader self,
           std::chrono::seconds ttl, Callbacks callbacks);
  ~Election();  // resigns, without waiting for etcd
  Election(const Election&) = delete;
  Election& operator=(const Election&) = delete;

  // Is this launcher the leader at this moment? Ask before a decision that cannot be taken back: a
  // process that was suspended finds out here before the loop can call `lost`.
  bool is_held() const { return is_leading_ && EventLoop::Clock::now() < held_until_; }

  // No longer a candidate; no callbacks any more. The lease is revoked in the background, so that
  // another launcher takes over at once. The loop calls `done` when etcd has answered or has not in
  // time (2 s to connect and 2 s to answer, for each endpoint), even if the election is gone by
  // then. A process that exits earlier leaves the lease to end by itself.
  void resign(std::function<void()> done = {});

 private:
  struct Candidacy;
  struct Finding;

  void schedule(std::chrono::milliseconds delay);
  void take_turn();
  void take(const Finding& finding, bool was_leading);
  void hold_until(EventLoop::Clock::time_point end);
  void lose(const std::string& why);
  void report_problem(const std::string& problem);
  void cancel_timers();

  // Constant after construction.
  EventLoop& loop_;
  const Callbacks callbacks_;
  const std::chrono::milliseconds ttl_;
  const std::chrono::milliseconds pause_;  // between two looks at the key
  const std::shared_ptr<Candidacy> candidacy_;

  bool is_leading_ = false;
  bool is_resigned_ = false;
  bool is_outage_ = false;
  std::string last_problem_;  // of this outage
  std::int64_t told_term_ = 0;
  EventLoop::Clock::time_point held_until_;
  std::optional<EventLoop::Timer> next_turn_;
  std::optional<EventLoop::Timer> end_of_lease_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // turns that come back ask for it
};

}  // namespace lockstep
