#include "engine/hierarchical/leaders.h"

#include <cstring>

#include "base/posix.h"

namespace lockstep {
namespace {

constexpr int kLeadersTag = Wire::kFirstOwnTag + 1;

}  // namespace

Leaders::Leaders(const HostLayout& layout, Wire& wire) : layout_(layout), wire_(wire) {
  if (!layout_.is_leader()) return;
  const NoSigpipe no_sigpipe;
  for (Inbox& inbox : inbox_) {
    inbox.messages = std::make_shared<std::vector<Message>>(layout_.hosts.ranks.size());
    expect_next();
  }
}

Parcel Leaders::expect(int host) {
  return wire_.receive(layout_.helper(host, 0), reinterpret_cast<std::byte*>(&from(host)),
                       sizeof(Message), kLeadersTag, inbox_[now_].messages);
}

// The present inbox is free: it is the last of those ahead.
void Leaders::expect_next() {
  for (int host = 0; host < layout_.num_hosts(); ++host) {
    if (host == layout_.host) continue;
    Parcel& parcel = inbox_[now_].parcels.emplace_back();
    parcel.peer = layout_.helper(host, 0);
    try {
      parcel = expect(host);
    } catch (const PeerLostError&) {  // NOLINT: it may have left after its last operation
    }
  }
  now_ = (now_ + 1) % kAhead;
}

void Leaders::tell(const OperationHeader& header, const std::byte* payload, std::size_t bytes) {
  mine_->header = header;
  if (bytes != 0) std::memcpy(mine_->payload, payload, bytes);
  for (int host = 0; host < layout_.num_hosts(); ++host) {
    if (host == layout_.host) continue;
    sent_.push_back(wire_.send(layout_.helper(host, 0),
                               reinterpret_cast<const std::byte*>(mine_.get()), sizeof(Message),
                               kLeadersTag, mine_));
  }
}

void Leaders::hear(const Wait& wait, const Compare& compare) {
  for (Parcel& parcel : inbox_[now_].parcels) {
    const int host = layout_.host_of(parcel.peer);
    if (!parcel.work) parcel = expect(host);  // throws, as now the message is needed
    wait(parcel);
    compare(parcel.peer, from(host).header);
  }
  inbox_[now_].parcels.clear();
}

void Leaders::end(const Wait& wait) {
  for (Parcel& parcel : sent_) wait(parcel);
  sent_.clear();
  expect_next();
}

void Leaders::drop() noexcept {
  sent_.clear();
  for (Inbox& inbox : inbox_) inbox.parcels.clear();
}

}  // namespace lockstep
