// Group: the ranks of one host, connected by shared memory. All collectives on raw memory.
//
// Invariant: all ranks start the same operations in the same order; the first that differs is an
// error on all ranks. Results do not depend on timing: see collective/reduce.h. No wait is without
// a deadline, and a rank that dies, leaves or fails ends the waiting of all others (layout.h, "A
// piece's life"). Threading: any thread may call; one mutex guards all state, and is free while a
// thread sleeps. Who waits here moves the other groups of this process on, too (neighbours.h).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/gauges.h"
#include "base/mutex.h"
#include "collective/runner.h"
#include "shm/areas.h"
#include "shm/board.h"
#include "shm/messages.h"
#include "shm/neighbours.h"
#include "shm/peers.h"
#include "shm/pieces.h"

namespace lockstep::shm {

struct GroupOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // How long to poll before sleeping; never longer than 50 us if there are fewer cores than ranks,
  // by the ranks' affinity and the quota of their cgroups.
  std::chrono::nanoseconds spin = std::chrono::microseconds(50);
  Simd simd = collective::best_simd();
  std::vector<int> global_ranks = {};  // what errors call the ranks; empty: 0 to size - 1
  std::string system_root = {};        // as in SegmentOptions
  // With other hosts: what errors call a rank of any, by its global rank.
  std::function<std::string(int global_rank)> describe = {};
  std::shared_ptr<BoardChannel> channel = {};  // if other ranks are to see what this one waits for
  // A thread of the caller's own waits for whatever is started: nobody else need move it on.
  bool is_attended = false;
  // Where deaths are events: whether one of the ranks has died. Waits then look for it at once.
  std::function<bool()> has_ended = {};
  // Where this rank shows for whom it waits; null: a caller does.
  std::shared_ptr<Gauges> gauges = {};
};

// Gives every rank the texts of all ranks, in the order of ranks. Used while a group is made.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

class Group final : public collective::Runner, public std::enable_shared_from_this<Group> {
 public:
  using Request = collective::Request;

  // Collective. Throws SystemError (no room), MismatchError (another build of lockstep).
  Group(const GroupOptions& options, const Exchange& exchange);
  ~Group() override;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const override { return peers_.rank; }
  int size() const override { return peers_.size; }
  int global_rank(int peer) const override { return peers_.global_rank(peer); }
  bool can_reduce_once() const override { return true; }
  bool is_needed_elsewhere() override {
    return options_.channel && options_.channel->are_others_stuck_outside();
  }
  std::shared_ptr<Request> start(Operation operation) override;
  std::shared_ptr<collective::MessageRequest> start(Message message) override;

  // Moves all operations on, without doing more than this rank's share.
  bool poll(const Request& request) override;
  bool wait_until(const Request& request, TimePoint until) override;

  // Takes back receives that no message has come for.
  bool cancel(std::span<const Request* const> requests) override;

  // For one that waits in another group: the same as poll() for all requests, unless another thread
  // is in this group. What goes wrong is thrown to those who wait here. Returns whether anything
  // moved.
  bool move_on(bool is_waiting) noexcept;

  // For one that waits elsewhere: throws if a rank has failed, or has died before it left.
  void check_peers(const Activity& activity);
  // The first rank, by its global rank, that has not posted what is waited for; -1: there is none.
  int first_missing();
  // Says that this rank waits for one outside the group, by its global rank; -1: for none any more.
  // Those who wait for this rank then let it report the timeout first.
  void set_waiting_outside(int global_rank) noexcept {
    peers_.self().waits_outside.store(global_rank + 1);
  }
  // Ends the group with `error`, which the others are told. Waiting threads throw it, too.
  void give_up(std::exception_ptr error) noexcept;

  void leave() noexcept override;  // the destructor does it, too

  // Memory that others reach: operations on it move no bytes but the result. Freed memory is kept
  // for the next allocation. Where there is no room, the group ends: the others count on this rank.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* memory) noexcept;

 private:
  bool progress(bool is_waiting) LOCKSTEP_REQUIRES(mutex_);
  bool is_done(const Request& request) LOCKSTEP_REQUIRES(mutex_);
  bool is_known_to_be_done(const Request& request) LOCKSTEP_REQUIRES(mutex_);
  bool wait_locked(const Request& request, TimePoint until) LOCKSTEP_REQUIRES(mutex_);

  void set_busy() LOCKSTEP_REQUIRES(mutex_);
  void set_idle() LOCKSTEP_REQUIRES(mutex_);
  bool is_forked() const noexcept;

  Activity activity_of(const Request& request) const;
  std::chrono::milliseconds timeout_of(const Request& request) const;
  void check_peers_of(const Request& request) LOCKSTEP_REQUIRES(mutex_);
  struct PeerState {
    bool is_alive = true;
    RankState state = {};
    bool is_fine() const {
      return is_alive && state != RankState::kFailed && state != RankState::kLeft;
    }
  };
  PeerState look_at(int peer) const;
  [[noreturn]] void throw_lost(int peer, const PeerState& its, const Activity& activity) const;
  [[noreturn]] void throw_unreachable(const Unreachable& memory) const LOCKSTEP_REQUIRES(mutex_);
  std::string describe(int peer) const;
  std::vector<int> missing_ranks() const LOCKSTEP_REQUIRES(mutex_);
  void warn_of(const Request& request) const LOCKSTEP_REQUIRES(mutex_);
  void show_wait(GaugeWait& wait, const Request& request, TimePoint since) const
      LOCKSTEP_REQUIRES(mutex_);
  void time_out(const Request& request, std::chrono::milliseconds timeout,
                std::chrono::nanoseconds waited) const LOCKSTEP_REQUIRES(mutex_);
  [[noreturn]] void fail(std::exception_ptr error) LOCKSTEP_REQUIRES(mutex_);
  void remember(std::exception_ptr error) LOCKSTEP_REQUIRES(mutex_);
  void forget_requests() LOCKSTEP_REQUIRES(mutex_);
  void throw_if_failed() const LOCKSTEP_REQUIRES(mutex_);

  // Constant after construction.
  GroupOptions options_;
  Peers peers_;
  const int num_looks_;  // before a rank that waits offers its core to others
  const pid_t pid_;      // of the process that made it

  Areas areas_;
  Mutex mutex_;
  Messages messages_ LOCKSTEP_GUARDED_BY(mutex_);
  Pieces pieces_ LOCKSTEP_GUARDED_BY(mutex_);
  std::exception_ptr failure_ LOCKSTEP_GUARDED_BY(mutex_);
  bool has_left_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  // Among the neighbours of others, from the first operation on. Made busy by start(); found to be
  // idle by others who wait, so that a call that nobody waits beside pays nothing for it.
  std::shared_ptr<neighbours::Place> place_ LOCKSTEP_GUARDED_BY(mutex_);
  neighbours::Looks looks_ LOCKSTEP_GUARDED_BY(mutex_);  // at others
};

}  // namespace lockstep::shm
