// Wire: messages between ranks of different hosts, over any engine that sends and receives.
//
// Messages of one pair of ranks with one tag arrive in the order sent. A rank that fails tells its
// partners why before it closes its connections, so that they need not guess (Notice). Threading:
// one thread sends, receives and waits for operations; all else may come from any.
#pragma once

#include <lockstep/backend.h>
#include <lockstep/error.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "base/cause.h"
#include "base/mutex.h"
#include "collective/request.h"
#include "engine/engines.h"

namespace lockstep {

// The connection to a rank broke: it died, or closed it because of something that others know.
struct ConnectionLost : PeerLostError {
  using PeerLostError::PeerLostError;
};

// A wait was ended by interrupt(), whose caller knows why.
struct WireInterrupted {};

// A message under way. Its memory is free once the message is waited for or gone.
struct Parcel {
  c10::intrusive_ptr<c10d::Work> work;
  int peer = -1;
};

class Wire {
 public:
  using Activity = collective::Activity;

  // Tags of a caller's own messages come first, then those of operations, then the wire's. Not
  // every MPI has tags beyond 2^19.
  static constexpr int kFirstOperationTag = 1 << 17;
  static constexpr int kFirstOwnTag = (1 << 18) - 2;

  // Connects to the partners. Collective: a partner has this rank among its own.
  Wire(Backend engine, const EngineContext& context, const std::vector<int>& partners);
  ~Wire() { close(); }

  // The owner of the memory is kept for as long as the engine may use it, which after a failure can
  // be longer than the message is waited for. A peer may be collective::kAnyRank for receive().
  using Owner = std::shared_ptr<const void>;
  Parcel send(int peer, const std::byte* memory, std::size_t bytes, int tag, Owner owner);
  Parcel receive(int peer, std::byte* memory, std::size_t bytes, int tag, Owner owner);
  // The waits that follow are one operation's, and have one deadline.
  void begin_operation(std::chrono::milliseconds timeout);
  // Throws ConnectionLost, TimeoutError, WireInterrupted; errors name the activity.
  void wait(Parcel& parcel, const Activity& activity);

  // The same for a caller's point-to-point message; returns whom it was exchanged with.
  int wait_for_message(Parcel& parcel, const Activity& activity, std::chrono::milliseconds timeout);

  // Ends the waits that are under way, and all later ones.
  void interrupt() noexcept;

  // Whom wait() is waiting for, since when the operation has waited, and how long it may.
  struct Waiting {
    int peer = -1;
    std::chrono::steady_clock::time_point since = {};
    std::chrono::milliseconds timeout = {};
  };
  std::optional<Waiting> waiting() const;

  // What errors call a rank, by its global rank.
  std::string describe_global(int global_rank) const;

  // The cause that a partner has told, if one has.
  std::optional<Cause> told() const;

  [[noreturn]] void throw_late(int peer, const Activity& activity,
                               std::chrono::milliseconds timeout) const;

  // Tells all partners the cause; without one, that this rank has left regularly. Then closes.
  void leave(const std::optional<Cause>& cause) noexcept;

 private:
  // The last message of a rank: why it leaves.
  struct alignas(8) Notice {
    std::uint64_t check = 0;  // a hash of all that follows: half a message does not count
    char cause[1016] = {};    // as a text; empty: it leaves regularly
  };

  void close() noexcept;
  const Member& member(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  int global_rank(int rank) const { return rank < 0 ? rank : member(rank).rank; }
  std::string describe(int rank) const;
  static std::uint64_t check_of(const Notice& notice);
  static std::optional<Notice> read(const Notice& arriving);
  void wait(Parcel& parcel, std::chrono::milliseconds timeout, std::chrono::milliseconds grace,
            const Activity& activity);
  [[noreturn]] void throw_lost(int peer, const Activity& activity, const std::string& reason) const;

  // Constant after construction.
  const int rank_;
  const std::vector<Member> members_;
  std::vector<int> partners_;
  std::shared_ptr<std::vector<Notice>> notices_;  // by partner; written when one arrives

  Mutex post_mutex_;  // engines take one call at a time
  Backend engine_ LOCKSTEP_GUARDED_BY(post_mutex_);
  std::vector<Parcel> expected_ LOCKSTEP_GUARDED_BY(post_mutex_);  // the notices

  mutable Mutex mutex_;
  std::vector<c10d::Work*> waited_for_ LOCKSTEP_GUARDED_BY(mutex_);
  std::optional<Waiting> waiting_ LOCKSTEP_GUARDED_BY(mutex_);
  // Of the operation.
  std::optional<std::chrono::steady_clock::time_point> first_wait_ LOCKSTEP_GUARDED_BY(mutex_);
  std::chrono::milliseconds timeout_ LOCKSTEP_GUARDED_BY(mutex_){0};
  bool is_interrupted_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
