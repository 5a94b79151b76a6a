// Leaders: what the leaders of all hosts tell each other in every operation.
//
// Each tells all others what it is at, so that ranks at different operations find out, and gives
// them its host's bytes if they are few: a small operation is this one exchange. An engine such as
// Gloo sends a message only when it knows that the other side waits for it. So receives are posted
// some operations ahead, and an exchange takes one way between two hosts instead of a round trip.
// Threading: one thread.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "collective/operation.h"
#include "engine/hierarchical/layout.h"
#include "engine/hierarchical/wire.h"

namespace lockstep {

// What is compared between ranks.
struct OperationHeader {
  std::uint64_t number = 0;
  collective::Signature signature = {};
  bool operator==(const OperationHeader&) const = default;
};

class Leaders {
 public:
  static constexpr std::size_t kMessageBytes = 1024;  // fits into one packet
  static constexpr std::size_t kPayloadBytes = kMessageBytes - sizeof(OperationHeader);

  Leaders(const HostLayout& layout, Wire& wire);

  // Of one operation on a leader, in this order. `wait` waits for a message.
  using Wait = std::function<void(Parcel& parcel)>;
  using Compare = std::function<void(int leader, const OperationHeader& theirs)>;
  void tell(const OperationHeader& header, const std::byte* payload, std::size_t bytes);
  void hear(const Wait& wait, const Compare& compare);
  const std::byte* payload_of(int host) const { return from(host).payload; }
  void end(const Wait& wait);

  // Lets go of messages under way.
  void drop() noexcept;

 private:
  struct Message {
    OperationHeader header;
    std::byte payload[kPayloadBytes];
  };
  static_assert(sizeof(Message) == kMessageBytes);

  // What the others tell of one operation. The engine shares the memory.
  struct Inbox {
    std::shared_ptr<std::vector<Message>> messages;  // by host
    std::vector<Parcel> parcels;
  };
  // Two are enough if no leader is ever behind.
  static constexpr std::size_t kAhead = 4;

  Message& from(int host) const { return (*inbox_[now_].messages)[static_cast<std::size_t>(host)]; }
  Parcel expect(int host);
  void expect_next();

  const HostLayout& layout_;
  Wire& wire_;
  std::shared_ptr<Message> mine_ = std::make_shared<Message>();
  std::vector<Parcel> sent_;
  std::array<Inbox, kAhead> inbox_;
  std::size_t now_ = 0;  // the inbox of the present operation
};

}  // namespace lockstep
