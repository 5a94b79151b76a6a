// Messages: point-to-point between two ranks of a group.
//
// From the sender's memory through a ring of cells (layout.h, Channel) to the receiver's, or, if it
// has not asked yet, to memory of its own until it does. So two ranks that send to each other at
// once cannot block each other. A ring takes memory with the first message of a pair: ranks
// that send none need none. Threading: guarded by the group's mutex.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "collective/request.h"
#include "shm/areas.h"
#include "shm/peers.h"

namespace lockstep::shm {

using collective::Activity;
using collective::kAnyRank;
using collective::Message;

struct PendingMessage : collective::MessageRequest {
  std::size_t bytes_moved = 0;
};

class Messages {
 public:
  Messages(const Peers& peers, Areas& areas)
      : peers_(peers), areas_(areas), arriving_(static_cast<std::size_t>(peers.size)) {}

  // Throws UsageError if there is no such rank.
  void check(const Message& message) const;

  // Begins a message; progress() moves it on. Throws SystemError if there is no room for a ring.
  std::shared_ptr<PendingMessage> add(Message message);
  void clear() {
    outgoing_.clear();
    expected_.clear();
  }
  // Forgets receives that no message has come for; false, and forgets none, if one of them is none.
  bool cancel(std::span<const collective::Request* const> requests);
  bool is_idle() const { return outgoing_.empty() && expected_.empty(); }

  // Returns whether anything moved. Throws MismatchError.
  bool progress();

  Activity activity(const Message& message) const {
    return message.activity(peers_.global_rank(message.peer));
  }

 private:
  // What has come so far of a message.
  struct Arriving {
    int from = 0;
    int tag = 0;
    std::size_t message_bytes = 0;
    std::vector<std::byte> data;
  };
  using Pending = std::shared_ptr<PendingMessage>;

  static std::uint64_t bit(int rank) { return std::uint64_t{1} << rank; }
  void make_channel_to(int peer);  // unless it is there
  bool send_cells(PendingMessage& request);
  bool receive_cells(int peer);
  bool deliver_unexpected();
  void deliver(PendingMessage& request, const Arriving& message) const;
  Pending take_expected(int from, int tag);

  const Peers& peers_;
  Areas& areas_;
  std::deque<Pending> outgoing_;
  std::deque<Pending> expected_;     // receives that no message has come for
  std::vector<Arriving> arriving_;   // by sender: the message under way
  std::deque<Arriving> unexpected_;  // complete, in the order of arrival
};

}  // namespace lockstep::shm
