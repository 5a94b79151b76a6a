// Messages between two ranks: from the sender's memory through a ring of cells (layout.h, Channel)
// to the receiver's, or, if it has not asked yet, to memory of its own until it does. So two ranks
// that send to each other at once cannot block each other.

#include <fmt/format.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cstring>

#include "shm/doorbell.h"
#include "shm/group.h"

namespace lockstep::shm {

Channel& Group::channel(int from, int to) const {
  std::byte* first = segments_[static_cast<std::size_t>(from)].data() + kChannelsOffset;
  return *reinterpret_cast<Channel*>(first + static_cast<std::size_t>(to) * sizeof(Channel));
}

std::string Group::text_of_mail(const Request& request) const {
  return fmt::format(
      "{} of {} bytes {} {} with tag {}", request.is_send ? "send" : "recv", request.bytes,
      request.is_send ? "to" : "from",
      request.peer == kAnyRank ? "any rank" : fmt::format("rank {}", name(request.peer)),
      request.tag);
}

std::shared_ptr<Request> Group::start_mail(Request request) {
  const int least = request.is_send ? 0 : kAnyRank;
  if (request.peer < least || request.peer >= size()) {
    throw UsageError({.rank = name(rank()), .operation = request.is_send ? "send" : "recv"},
                     fmt::format("There is no rank {} in a world of {}.\nGive a rank from 0 to {}.",
                                 request.peer, size(), size() - 1));
  }
  request.is_mail = true;
  auto shared = std::make_shared<Request>(std::move(request));
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  (shared->is_send ? outgoing_ : expected_).push_back(shared);
  try {
    move_mail();
  } catch (...) {
    fail(std::current_exception());
  }
  return shared;
}

std::shared_ptr<Request> Group::send(const std::byte* memory, std::size_t bytes, int peer,
                                     int tag) {
  Request request;
  request.is_send = true;
  request.memory = const_cast<std::byte*>(memory);
  request.bytes = bytes;
  request.peer = peer;
  request.tag = tag;
  return start_mail(std::move(request));
}

std::shared_ptr<Request> Group::receive(std::byte* memory, std::size_t bytes, int peer, int tag) {
  Request request;
  request.memory = memory;
  request.bytes = bytes;
  request.peer = peer;
  request.tag = tag;
  return start_mail(std::move(request));
}

bool Group::move_mail() {
  bool has_moved = false;
  // A ring belongs to the first message in it: later ones to the same rank wait for their turn.
  std::uint64_t busy = 0;
  for (const auto& request : outgoing_) {
    const std::uint64_t bit = std::uint64_t{1} << request->peer;
    if ((busy & bit) == 0) has_moved |= move_outgoing(*request);
    if (!request->is_done) busy |= bit;
  }
  std::erase_if(outgoing_, [](const auto& request) { return request->is_done; });
  for (int peer = 0; peer < size(); ++peer) has_moved |= move_incoming(peer);
  // A receive may have come after its message.
  for (auto message = unexpected_.begin(); message != unexpected_.end();) {
    if (const auto request = take_expected(message->from, message->tag)) {
      deliver(*request, message->from, message->data.data(), message->data.size());
      message = unexpected_.erase(message);
      has_moved = true;
    } else {
      ++message;
    }
  }
  return has_moved;
}

bool Group::move_outgoing(Request& request) {
  Channel& ring_to = channel(rank(), request.peer);
  bool has_moved = false;
  while (!request.is_done) {
    const std::uint64_t number = ring_to.num_written.load(std::memory_order_relaxed);
    if (number - ring_to.num_read.load() == kCells) break;
    Cell& cell = ring_to.cells[number % kCells];
    const std::size_t bytes = std::min(kCellBytes, request.bytes - request.bytes_moved);
    cell.message_bytes = request.bytes;
    cell.tag = request.tag;
    cell.bytes = static_cast<std::uint32_t>(bytes);
    if (bytes != 0) std::memcpy(cell.data, request.memory + request.bytes_moved, bytes);
    request.bytes_moved += bytes;
    request.is_done = request.bytes_moved == request.bytes;
    ring_to.num_written.store(number + 1);
    has_moved = true;
  }
  if (has_moved) ring(control(request.peer));
  return has_moved;
}

bool Group::move_incoming(int peer) {
  Channel& ring_from = channel(peer, rank());
  bool has_moved = false;
  while (true) {
    const std::uint64_t number = ring_from.num_read.load(std::memory_order_relaxed);
    if (ring_from.num_written.load() == number) break;
    const Cell& cell = ring_from.cells[number % kCells];
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
    ring_from.num_read.store(number + 1);
    has_moved = true;
  }
  if (has_moved) ring(control(peer));
  return has_moved;
}

std::shared_ptr<Request> Group::take_expected(int from, int tag) {
  const auto found = std::ranges::find_if(expected_, [&](const auto& request) {
    return request->tag == tag && (request->peer == kAnyRank || request->peer == from);
  });
  if (found == expected_.end()) return nullptr;
  auto request = *found;
  expected_.erase(found);
  return request;
}

void Group::deliver(Request& request, int from, const std::byte* data, std::size_t bytes) {
  if (bytes != request.bytes) {
    throw MismatchError({.rank = name(rank()), .peer = name(from), .operation = "recv"},
                        fmt::format("{} got a message of {} bytes from rank {}.\n"
                                    "Send and receive tensors of the same size and type.",
                                    text_of_mail(request), bytes, name(from)));
  }
  if (bytes != 0) std::memcpy(request.memory, data, bytes);
  request.peer = from;
  request.is_done = true;
}

void Group::check_mail_peer(const Request& request) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && (request.peer == peer || request.peer == kAnyRank)) {
      check_peer(peer, text_of_mail(request));
    }
  }
}

}  // namespace lockstep::shm
