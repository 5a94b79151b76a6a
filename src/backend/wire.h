// Wire: messages between ranks of different hosts, over any engine that sends and receives.
//
// Messages of one pair of ranks with one tag arrive in the order sent. A rank that fails tells its
// partners why before it closes its connections, so that they need not guess (Farewell). Threading:
// one thread sends, receives and waits; mail, look and interrupt() may come from any.
#pragma once

#include <lockstep/backend.h>
#include <lockstep/error.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/engines.h"
#include "base/cause.h"
#include "shm/operation.h"

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
  // Tags of a caller's own messages come first, then those of operations, then the wire's. Not
  // every MPI has tags beyond 2^19.
  static constexpr int kFirstOperationTag = 1 << 17;
  static constexpr int kFirstOwnTag = (1 << 18) - 2;

  // Connects to the partners. Collective: a partner has this rank among its own.
  Wire(Backend engine, const EngineContext& context, const std::vector<int>& partners);
  ~Wire() { close(); }

  // The owner of the memory is kept for as long as the engine may use it, which after a failure can
  // be longer than the message is waited for. A peer may be shm::kAnyRank for receive().
  using Owner = std::shared_ptr<const void>;
  Parcel send(int peer, const std::byte* memory, std::size_t bytes, int tag, Owner owner);
  Parcel receive(int peer, std::byte* memory, std::size_t bytes, int tag, Owner owner);
  // The waits that follow are one operation's, and have one deadline.
  void begin_operation();
  // Throws ConnectionLost, TimeoutError, WireInterrupted; messages name the operation.
  void wait(Parcel& parcel, const shm::Operation& operation);

  // The same for a message that a caller sends or receives; returns whom it was exchanged with.
  int wait_for_mail(Parcel& parcel, const std::string& what, std::chrono::milliseconds timeout);

  // Ends the waits that are under way, and all later ones.
  void interrupt() noexcept;

  // Whom wait() is waiting for, and since when the operation has waited.
  struct Waiting {
    int peer = -1;
    std::chrono::steady_clock::time_point since = {};
  };
  std::optional<Waiting> waiting() const;

  // What a partner has told, and who it is.
  struct Told {
    std::string from = {};
    Cause cause = {};
  };
  std::optional<Told> told() const;

  [[noreturn]] void throw_late(int peer, const std::string& what) const;

  // Tells all partners; without a cause, that this rank has left in peace. Then closes.
  void leave(const std::optional<Cause>& cause) noexcept;

 private:
  struct alignas(8) Farewell {
    std::uint64_t check = 0;  // a hash of all that follows: half a message does not count
    std::int32_t has_failed = 0;
    std::int32_t kind = 0;
    std::int32_t peer = -1;
    char message[1004] = {};
  };

  void close() noexcept;
  const Member& member(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  static std::uint64_t check_of(const Farewell& farewell);
  static std::optional<Farewell> read(const Farewell& arriving);
  void wait(Parcel& parcel, std::chrono::milliseconds timeout,
            const std::function<std::string()>& what);
  [[noreturn]] void throw_lost(int peer, const std::string& what, const std::string& reason) const;

  // Constant after construction.
  const int rank_;
  const std::vector<Member> members_;
  const std::chrono::milliseconds timeout_;
  std::vector<int> partners_;
  std::shared_ptr<std::vector<Farewell>> farewells_;  // by partner; written when one arrives
  Backend engine_;
  std::vector<Parcel> expected_;  // the farewells

  std::mutex post_mutex_;  // engines take one call at a time

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::vector<c10d::Work*> waited_for_;
  std::optional<Waiting> waiting_;
  std::optional<std::chrono::steady_clock::time_point> first_wait_;  // of the operation
  bool is_interrupted_ = false;
};

}  // namespace lockstep
