#include "shm/messages.h"

#include <lockstep/error.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/text.h"

namespace lockstep::shm {

void Messages::check(const Message& message) const {
  const int least = message.is_send ? 0 : kAnyRank;
  if (message.peer >= least && message.peer < peers_.size) return;
  throw UsageError({.rank = peers_.my_global_rank(), .operation = message.name()},
                   text::format("There is no rank {} in a world of {}.\nGive a rank from 0 to {}.",
                                message.peer, peers_.size, peers_.size - 1));
}

void Messages::make_channel_to(int peer) {
  std::atomic<std::uint64_t>& channels = peers_.self().channels;
  if ((channels.load(std::memory_order_relaxed) & bit(peer)) != 0) return;
  areas_.take_reserved(channel_offset(peer), kChannelBytes);
  new (&peers_.channel(peers_.rank, peer)) Channel;
  channels.fetch_or(bit(peer));
}

std::shared_ptr<PendingMessage> Messages::add(Message message) {
  if (message.is_send) make_channel_to(message.peer);
  auto request = std::make_shared<PendingMessage>();
  request->message = std::move(message);
  (request->message.is_send ? outgoing_ : expected_).push_back(request);
  return request;
}

bool Messages::cancel(std::span<const collective::Request* const> requests) {
  const auto is_one = [&](const Pending& expected) {
    return std::ranges::find(requests, expected.get()) != requests.end();
  };
  if (std::ranges::count_if(expected_, is_one) != std::ssize(requests)) return false;
  std::erase_if(expected_, is_one);
  return true;
}

bool Messages::progress() {
  bool has_moved = false;
  // A ring belongs to the first message in it: later ones to the same rank wait for their turn.
  std::uint64_t busy = 0;
  for (const auto& request : outgoing_) {
    const std::uint64_t peer = bit(request->message.peer);
    if ((busy & peer) == 0) has_moved |= send_cells(*request);
    if (!request->is_done) busy |= peer;
  }
  std::erase_if(outgoing_, [](const auto& request) { return request->is_done; });
  for (int peer = 0; peer < peers_.size; ++peer) has_moved |= receive_cells(peer);
  return deliver_unexpected() || has_moved;
}

bool Messages::send_cells(PendingMessage& request) {
  const Message& message = request.message;
  Channel& channel = peers_.channel(peers_.rank, message.peer);
  bool has_moved = false;
  while (!request.is_done) {
    const std::uint64_t number = channel.num_written.load(std::memory_order_relaxed);
    if (number - channel.num_read.load() == kCells) break;
    Cell& cell = channel.cells[number % kCells];
    const std::size_t bytes = std::min(kCellBytes, message.bytes - request.bytes_moved);
    cell.message_bytes = message.bytes;
    cell.tag = message.tag;
    cell.bytes = static_cast<std::uint32_t>(bytes);
    if (bytes != 0) std::memcpy(cell.data, message.memory + request.bytes_moved, bytes);
    request.bytes_moved += bytes;
    request.is_done = request.bytes_moved == message.bytes;
    channel.num_written.store(number + 1);
    has_moved = true;
  }
  if (has_moved) ring(peers_.control(message.peer));
  return has_moved;
}

bool Messages::receive_cells(int peer) {
  if ((peers_.control(peer).channels.load() & bit(peers_.rank)) == 0) return false;
  Channel& channel = peers_.channel(peer, peers_.rank);
  bool has_moved = false;
  while (true) {
    const std::uint64_t number = channel.num_read.load(std::memory_order_relaxed);
    if (channel.num_written.load() == number) break;
    const Cell& cell = channel.cells[number % kCells];
    Arriving& message = arriving_[static_cast<std::size_t>(peer)];
    if (message.data.empty()) {
      message.from = peer;
      message.tag = cell.tag;
      message.message_bytes = cell.message_bytes;
      message.data.reserve(cell.message_bytes);
    }
    message.data.insert(message.data.end(), cell.data, cell.data + cell.bytes);
    if (message.data.size() == message.message_bytes) {
      unexpected_.push_back(std::move(message));
      message = {};
    }
    channel.num_read.store(number + 1);
    has_moved = true;
  }
  if (has_moved) ring(peers_.control(peer));
  return has_moved;
}

bool Messages::deliver_unexpected() {
  bool has_moved = false;
  for (auto message = unexpected_.begin(); message != unexpected_.end();) {
    if (const Pending request = take_expected(message->from, message->tag)) {
      deliver(*request, *message);
      message = unexpected_.erase(message);
      has_moved = true;
    } else {
      ++message;
    }
  }
  return has_moved;
}

Messages::Pending Messages::take_expected(int from, int tag) {
  const auto found = std::ranges::find_if(expected_, [&](const Pending& request) {
    const Message& message = request->message;
    return message.tag == tag && (message.peer == kAnyRank || message.peer == from);
  });
  if (found == expected_.end()) return nullptr;
  Pending request = *found;
  expected_.erase(found);
  return request;
}

void Messages::deliver(PendingMessage& request, const Arriving& arrived) const {
  Message& message = request.message;
  const std::size_t bytes = arrived.data.size();
  if (bytes != message.bytes) {
    const int from = peers_.global_rank(arrived.from);
    throw MismatchError({.rank = peers_.my_global_rank(), .peer = from, .operation = "recv"},
                        text::format("{} got a message of {} bytes from rank {}.\n"
                                     "Send and receive tensors of the same size and type.",
                                     activity(message).text, bytes, from));
  }
  if (bytes != 0) std::memcpy(message.memory, arrived.data.data(), bytes);
  message.peer = arrived.from;
  request.is_done = true;
}

}  // namespace lockstep::shm
