#include "engine/hierarchical/wire.h"

#include <ATen/ATen.h>

#include <atomic>
#include <bit>

#include "base/hash.h"
#include "base/posix.h"
#include "base/text.h"
#include "engine/hosts.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNoticeTag = Wire::kFirstOwnTag;

// The engine's own deadline comes after ours, because it closes all connections without a word.
constexpr auto kGrace = std::chrono::seconds(2);

constexpr const char* kTimedOut = "Timed out";  // as Gloo says it

// How long a notice may take to leave this host.
constexpr auto kNoticeDeadline = std::chrono::milliseconds(500);

at::Tensor tensor_of(const std::byte* memory, std::size_t bytes, Wire::Owner owner) {
  return at::from_blob(
      const_cast<std::byte*>(memory), {static_cast<std::int64_t>(bytes)},
      [owner = std::move(owner)](void*) {}, at::kByte);
}

}  // namespace

Wire::Wire(Backend engine, const EngineContext& context, const std::vector<int>& partners)
    : rank_(context.rank),
      members_(context.members),
      partners_(partners),
      notices_(std::make_shared<std::vector<Notice>>(partners.size())),
      engine_(std::move(engine)) {
  const NoSigpipe no_sigpipe;
  for (std::size_t i = 0; i < partners_.size(); ++i) {
    expected_.push_back(receive(partners_[i], reinterpret_cast<std::byte*>(&(*notices_)[i]),
                                sizeof(Notice), kNoticeTag, notices_));
  }
}

Parcel Wire::send(int peer, const std::byte* memory, std::size_t bytes, int tag, Owner owner) {
  std::vector<at::Tensor> tensors = {tensor_of(memory, bytes, std::move(owner))};
  try {
    const MutexLock lock(post_mutex_);
    if (!engine_) throw WireInterrupted();
    return {engine_->send(tensors, peer, tag), peer};
  } catch (const std::exception& error) {
    throw_lost(peer, {"send", text::format("send of {} bytes", bytes)}, error.what());
  }
}

Parcel Wire::receive(int peer, std::byte* memory, std::size_t bytes, int tag, Owner owner) {
  std::vector<at::Tensor> tensors = {tensor_of(memory, bytes, std::move(owner))};
  try {
    const MutexLock lock(post_mutex_);
    if (!engine_) throw WireInterrupted();
    return {peer == collective::kAnyRank ? engine_->recvAnysource(tensors, tag)
                                         : engine_->recv(tensors, peer, tag),
            peer};
  } catch (const std::exception& error) {
    throw_lost(peer, {"recv", text::format("recv of {} bytes", bytes)}, error.what());
  }
}

void Wire::begin_operation(std::chrono::milliseconds timeout) {
  const MutexLock lock(mutex_);
  first_wait_.reset();
  timeout_ = timeout;
}

void Wire::wait(Parcel& parcel, const Activity& activity) {
  std::chrono::milliseconds timeout{0};
  {
    const MutexLock lock(mutex_);
    if (!first_wait_) first_wait_ = Clock::now();
    timeout = timeout_;
    waiting_ = {parcel.peer, *first_wait_, timeout};
  }
  wait(parcel, timeout, kGrace, activity);
  const MutexLock lock(mutex_);
  waiting_.reset();
}

int Wire::wait_for_message(Parcel& parcel, const Activity& activity,
                           std::chrono::milliseconds timeout) {
  wait(parcel, timeout, {}, activity);
  return parcel.peer == collective::kAnyRank ? parcel.work->sourceRank() : parcel.peer;
}

void Wire::wait(Parcel& parcel, std::chrono::milliseconds timeout, std::chrono::milliseconds grace,
                const Activity& activity) {
  {
    const MutexLock lock(mutex_);
    if (is_interrupted_) throw WireInterrupted();
    waited_for_.push_back(parcel.work.get());
  }
  bool is_done = false;
  std::string problem;
  try {
    is_done = parcel.work->wait(timeout + grace);
  } catch (const TimeoutError&) {  // lockstep's own engines'
    problem = kTimedOut;
  } catch (const Error& error) {
    problem = error.message();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  {
    const MutexLock lock(mutex_);
    std::erase(waited_for_, parcel.work.get());
    if (is_interrupted_) throw WireInterrupted();
  }
  if (!problem.empty()) {
    if (problem.find(kTimedOut) != std::string::npos) throw_late(parcel.peer, activity, timeout);
    throw_lost(parcel.peer, activity, problem);
  }
  if (!is_done) throw WireInterrupted();
}

void Wire::interrupt() noexcept {
  const MutexLock lock(mutex_);
  is_interrupted_ = true;
  for (c10d::Work* work : waited_for_) {
    try {
      work->abort();
    } catch (...) {  // NOLINT: an engine that cannot ends the wait at its deadline
    }
  }
}

std::optional<Wire::Waiting> Wire::waiting() const {
  const MutexLock lock(mutex_);
  return waiting_;
}

std::string Wire::describe(int rank) const { return lockstep::describe(member(rank)); }

std::string Wire::describe_global(int global_rank) const {
  return lockstep::describe(members_, global_rank);
}

std::uint64_t Wire::check_of(const Notice& notice) {
  return hash_bytes(reinterpret_cast<const std::byte*>(&notice) + sizeof notice.check,
                    sizeof notice - sizeof notice.check, 1);
}

// It may be arriving right now: it is copied by words, and counts if it is whole.
std::optional<Wire::Notice> Wire::read(const Notice& arriving) {
  constexpr std::size_t kWords = sizeof(Notice) / sizeof(std::uint64_t);
  auto* source = reinterpret_cast<std::uint64_t*>(const_cast<Notice*>(&arriving));
  std::array<std::uint64_t, kWords> words;
  for (std::size_t i = 0; i < kWords; ++i) {
    words[i] = std::atomic_ref(source[i]).load(std::memory_order_relaxed);
    if (words[0] == 0) return std::nullopt;
  }
  auto copy = std::bit_cast<Notice>(words);
  copy.cause[sizeof copy.cause - 1] = '\0';
  return copy.check == check_of(copy) ? std::optional(copy) : std::nullopt;
}

std::optional<Cause> Wire::told() const {
  for (const Notice& arriving : *notices_) {
    const auto notice = read(arriving);
    if (notice && notice->cause[0] != '\0') return cause_from(notice->cause);
  }
  return std::nullopt;
}

void Wire::throw_lost(int peer, const Activity& activity, const std::string& reason) const {
  const ErrorPlace place{
      .rank = global_rank(rank_), .peer = global_rank(peer), .operation = activity.operation};
  const std::string& what = activity.text;
  if (peer < 0) {
    throw ConnectionLost(place, text::format("{} lost a connection: {}\n"
                                             "Look for the rank that failed first.",
                                             what, reason.substr(0, reason.find('\n'))));
  }
  for (std::size_t i = 0; i < partners_.size(); ++i) {
    const auto notice = partners_[i] == peer ? read((*notices_)[i]) : std::nullopt;
    if (notice && notice->cause[0] == '\0') {
      throw PeerLostError(place, text::format("{} waits for {}, which has left this world.\n"
                                              "Make the same calls on all ranks before the world "
                                              "ends.",
                                              what, describe(peer)));
    }
  }
  throw ConnectionLost(
      place, text::format("{} lost {}: its connection broke ({}).\nLook at the last lines of rank "
                          "{}, and whether its host {} is up and can be reached.",
                          what, describe(peer), reason.substr(0, reason.find('\n')),
                          member(peer).rank, member(peer).host));
}

void Wire::throw_late(int peer, const Activity& activity, std::chrono::milliseconds timeout) const {
  throw TimeoutError(
      {.rank = global_rank(rank_), .peer = global_rank(peer), .operation = activity.operation},
      text::format("{} waited {:.1f} s for {}.\nCheck what it is doing and whether its host can be "
                   "reached, make the same calls in the same order on all ranks, or raise "
                   "JoinOptions::timeout.",
                   activity.text, std::chrono::duration<double>(timeout).count(),
                   peer < 0 ? std::string("any rank") : describe(peer)));
}

void Wire::leave(const std::optional<Cause>& cause) noexcept {
  const NoSigpipe no_sigpipe;
  const auto notice = std::make_shared<Notice>();
  if (cause) to_text(*cause).copy(notice->cause, sizeof notice->cause - 1);
  notice->check = check_of(*notice);
  std::vector<Parcel> sent;
  for (const int partner : partners_) {
    try {
      sent.push_back(send(partner, reinterpret_cast<const std::byte*>(notice.get()), sizeof(Notice),
                          kNoticeTag, notice));
    } catch (...) {  // NOLINT: it is gone
    }
  }
  const auto deadline = Clock::now() + kNoticeDeadline;
  for (Parcel& parcel : sent) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    try {
      parcel.work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {  // NOLINT: it is gone, or does not listen
    }
  }
  sent.clear();
  close();
}

// First what refers to memory, then the connections.
void Wire::close() noexcept {
  const MutexLock lock(post_mutex_);
  expected_.clear();
  engine_.reset();
}

}  // namespace lockstep
