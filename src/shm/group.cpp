#include "shm/group.h"

#include <lockstep/error.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "base/cause.h"
#include "base/log.h"
#include "base/text.h"
#include "shm/connect.h"
#include "shm/doorbell.h"

namespace lockstep::shm {
namespace {

using collective::MessageRequest;
using collective::OperationRequest;
using Clock = std::chrono::steady_clock;

// Dead and failed peers are looked for this often while waiting.
constexpr auto kPeerCheckInterval = std::chrono::milliseconds(50);
// And where somebody says that there are any, it is asked this often.
constexpr auto kNoticeInterval = std::chrono::milliseconds(4);
// Then those who live may not come either, as they have left for the next generation; who is in the
// middle of a step that can end has so long.
constexpr auto kGraceOfEnded = std::chrono::milliseconds(500);
constexpr auto kTimeToDie = std::chrono::seconds(1);
constexpr auto kFirstWarning = std::chrono::seconds(10);

// How much longer than its timeout a rank waits for one that waits for another host.
constexpr auto kGraceForOutside = std::chrono::milliseconds(1500);

// How often a waiting rank polls before it offers its core to whoever is ready to run: that may be
// the rank it waits for. Without a core for each rank it offers it after every look.
constexpr int kLooksPerYield = 25;
// How long it polls without a core of its own, and after each sleep.
constexpr std::chrono::nanoseconds kShortSpin = std::chrono::microseconds(50);

}  // namespace

Group::Group(const GroupOptions& options, const Exchange& exchange)
    : options_(options),
      peers_(connect(options, exchange)),
      num_looks_(peers_.has_core_for_each ? kLooksPerYield : 1),
      pid_(::getpid()),
      areas_(peers_),
      messages_(peers_, areas_),
      pieces_(peers_, areas_, options.simd) {
  if (!peers_.has_core_for_each) options_.spin = std::min(options_.spin, kShortSpin);
}

Group::~Group() { leave(); }

void Group::leave() noexcept {
  if (is_forked()) return;
  const MutexLock lock(mutex_);
  if (has_left_) return;
  has_left_ = true;
  if (!failure_) {
    failure_ = collective::world_has_ended(peers_.my_global_rank());
    peers_.self().state.store(RankState::kLeft);
  }
  forget_requests();
  for (int peer = 0; peer < size(); ++peer) ring_even_if_awake(peers_.control(peer));
}

// Their memory may be the group's own, whose last owner they would keep alive for ever.
void Group::forget_requests() {
  pieces_.clear();
  messages_.clear();
  set_idle();
}

// A group that nobody shares cannot be kept alive by others who move it on: it is not listed.
void Group::set_busy() {
  if (place_ && place_->is_busy()) return;
  if (!place_ && (options_.is_attended || weak_from_this().expired())) return;
  if (!place_) place_ = neighbours::add(weak_from_this());
  place_->set_busy(true);
}

void Group::set_idle() {
  if (place_) place_->set_busy(false);
}

// What a forked child has of its parent's group is the memory that the parent goes on to use.
bool Group::is_forked() const noexcept { return ::getpid() != pid_; }

bool Group::move_on(bool is_waiting) noexcept {
  if (is_forked() || !mutex_.try_lock()) return false;
  bool has_moved = false;
  if (place_ && place_->is_busy()) {
    try {
      has_moved = progress(is_waiting);
    } catch (...) {
      remember(std::current_exception());
    }
    if (pieces_.is_idle() && messages_.is_idle()) set_idle();
  }
  mutex_.unlock();
  return has_moved;
}

bool Group::cancel(std::span<const Request* const> requests) {
  const MutexLock lock(mutex_);
  return messages_.cancel(requests);
}

std::byte* Group::allocate(std::size_t bytes) {
  try {
    return areas_.allocate(bytes);
  } catch (const UsageError&) {
    throw;
  } catch (...) {
    const MutexLock lock(mutex_);
    fail(std::current_exception());
  }
}

void Group::release(std::byte* memory) noexcept { areas_.release(memory); }

std::shared_ptr<collective::Request> Group::start(Operation operation) {
  collective::check(operation, *this);
  const MutexLock lock(mutex_);
  throw_if_failed();
  const std::uint64_t number =
      options_.channel ? options_.channel->start(collective::name_of(operation.kind)) : 0;
  auto request = pieces_.add(std::move(operation));
  request->number = number;
  set_busy();
  return request;
}

std::shared_ptr<MessageRequest> Group::start(Message message) {
  const MutexLock lock(mutex_);
  messages_.check(message);
  throw_if_failed();
  try {
    auto request = messages_.add(std::move(message));
    messages_.progress();
    set_busy();
    return request;
  } catch (...) {
    fail(std::current_exception());
  }
}

bool Group::progress(bool is_waiting) {
  try {
    const bool has_moved = pieces_.progress(is_waiting);
    return (!messages_.is_idle() && messages_.progress()) || has_moved;
  } catch (const Unreachable& memory) {
    throw_unreachable(memory);
  }
}

// The descriptors of a process that ends are gone a moment before it counts as dead.
void Group::throw_unreachable(const Unreachable& memory) const {
  const auto until = Clock::now() + kTimeToDie;
  PeerState state = look_at(memory.peer);
  while (state.is_fine() && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    state = look_at(memory.peer);
  }
  if (!state.is_fine()) throw_lost(memory.peer, state, pieces_.oldest_activity());
  const Cause cause = cause_of(memory.error, peers_.my_global_rank());
  throw_cause(cause, {.rank = peers_.my_global_rank(),
                      .peer = peers_.global_rank(memory.peer),
                      .operation = "shared memory"});
}

bool Group::is_done(const Request& request) {
  if (request.is_done) return true;
  // Requests come from start(), and are this group's to change.
  const auto* operation = dynamic_cast<const PendingOperation*>(&request);
  return operation != nullptr && pieces_.is_done(const_cast<PendingOperation&>(*operation));
}

// Throws the failure, unless the request was done before it.
bool Group::is_known_to_be_done(const Request& request) {
  if (request.is_done || (failure_ && is_done(request))) return true;
  throw_if_failed();
  return false;
}

bool Group::poll(const Request& request) {
  const MutexLock lock(mutex_);
  if (is_known_to_be_done(request)) return true;
  try {
    progress(false);
  } catch (...) {
    fail(std::current_exception());
  }
  if (neighbours::are_others_busy(place_.get())) looks_.look(place_.get(), false, Clock::now());
  return is_done(request);
}

bool Group::wait_until(const Request& request, TimePoint until) {
  const MutexLock lock(mutex_);
  if (is_known_to_be_done(request)) return true;
  try {
    return wait_locked(request, until);
  } catch (...) {
    fail(std::current_exception());
  }
}

bool Group::wait_locked(const Request& request, TimePoint until) {
  const auto start = Clock::now();
  BoardWait board_wait(until == kNoLimit ? options_.channel.get() : nullptr, request.number);
  GaugeWait shown(options_.gauges.get());
  auto last_check = start;
  auto spin_until = start + options_.spin;
  bool has_warned = false;
  auto ended_at = Clock::time_point::max();  // since then somebody is known to be lost
  while (true) {
    bool has_moved = false;
    for (int look = 0; look < num_looks_ && !has_moved; ++look) {
      has_moved = progress(true);
      if (is_done(request)) return true;
      relax();
    }
    const auto now = Clock::now();
    if (now >= until) return false;
    if (neighbours::are_others_busy(place_.get())) {
      has_moved |= looks_.look(place_.get(), true, now);
    }
    if (has_moved) spin_until = now + options_.spin;
    if (now < spin_until) {
      if (!has_moved) ::sched_yield();
      continue;
    }
    show_wait(shown, request, start);
    Sleep sleep(peers_.self());
    if (progress(true)) continue;
    if (is_done(request)) return true;
    const bool has_ended = options_.has_ended && options_.has_ended();
    ended_at = has_ended ? std::min(ended_at, now) : Clock::time_point::max();
    if (now - last_check >= kPeerCheckInterval || has_ended) {
      board_wait.look(now - start, [&] { return activity_of(request); });
      check_peers_of(request);
      last_check = now;
      if (now >= ended_at && now - ended_at >= kGraceOfEnded) {
        collective::throw_ended(activity_of(request), peers_.my_global_rank());
      }
    }
    const auto timeout = timeout_of(request);
    if (until == kNoLimit && now - start >= timeout) time_out(request, timeout, now - start);
    if (now - start >= kFirstWarning && !has_warned) {
      has_warned = true;
      warn_of(request);
    }
    const auto next_look = looks_.next(place_.get());  // the peers of others do not wake this rank
    {
      const MutexUnlock unlock(mutex_);
      sleep.nap(std::min<std::chrono::nanoseconds>(
          {options_.has_ended ? kNoticeInterval : kPeerCheckInterval, timeout, until - now,
           std::max(next_look, now) - now}));
    }
    throw_if_failed();
    spin_until = Clock::now() + std::min(options_.spin, kShortSpin);
  }
}

void Group::show_wait(GaugeWait& wait, const Request& request, TimePoint since) const {
  if (!options_.gauges) return;
  if (const auto* message = dynamic_cast<const MessageRequest*>(&request)) {
    return wait.show(kWaitsForMessage, peers_.global_rank(message->message.peer), since);
  }
  const auto kind = static_cast<const OperationRequest&>(request).operation.kind;
  // Who has retired its last piece has done its part.
  const std::uint64_t last = pieces_.last_of(static_cast<const PendingOperation&>(request));
  int missing = -1;
  for (const int peer : missing_ranks()) {
    if (missing < 0 && peers_.control(peer).retired.load() < last) missing = peer;
  }
  wait.show(1 + static_cast<std::int32_t>(kind), peers_.global_rank(missing), since);
}

int Group::first_missing() {
  const MutexLock lock(mutex_);
  if (pieces_.is_idle()) return -1;
  const std::vector<int> missing = missing_ranks();
  return missing.empty() ? -1 : peers_.global_rank(missing.front());
}

Activity Group::activity_of(const Request& request) const {
  const auto* message = dynamic_cast<const MessageRequest*>(&request);
  if (message != nullptr) {
    return message->message.activity(peers_.global_rank(message->message.peer));
  }
  return static_cast<const OperationRequest&>(request).operation.activity();
}

std::chrono::milliseconds Group::timeout_of(const Request& request) const {
  const auto* message = dynamic_cast<const MessageRequest*>(&request);
  if (message != nullptr) return message->message.timeout_or(options_.timeout);
  return static_cast<const OperationRequest&>(request).operation.timeout_or(options_.timeout);
}

// Throws if the request cannot end any more, because a rank is gone or has failed. A rank that has
// retired an operation's last piece has done its part. One that has left comes last: it may have
// done so because another has died, which it has seen in another group.
void Group::check_peers_of(const Request& request) {
  const auto* message = dynamic_cast<const MessageRequest*>(&request);
  const Activity activity = message != nullptr ? activity_of(request) : pieces_.oldest_activity();
  std::optional<std::pair<int, PeerState>> first_left;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const auto matters = [&]() LOCKSTEP_REQUIRES(mutex_) {
      if (message == nullptr) {
        return peers_.control(peer).retired.load() <
               pieces_.last_of(static_cast<const PendingOperation&>(request));
      }
      if (message->message.peer != peer && message->message.peer != kAnyRank) return false;
      progress(true);
      return !is_done(request);
    };
    if (!matters()) continue;
    // It may have done its part and gone between two looks: what it did counts.
    const PeerState state = look_at(peer);
    if (state.is_fine() || !matters()) continue;
    if (state.state != RankState::kLeft) throw_lost(peer, state, activity);
    if (!first_left) first_left = {peer, state};
  }
  if (first_left && !is_done(request)) throw_lost(first_left->first, first_left->second, activity);
}

std::string Group::describe(int peer) const {
  const int global_rank = peers_.global_rank(peer);
  if (options_.describe) return options_.describe(global_rank);
  return text::format("rank {} (pid {})", global_rank, peers_.process(peer).pid);
}

// First whether it lives, then what it says: of one that has ended that is its last word.
Group::PeerState Group::look_at(int peer) const {
  const ProcessId& process = peers_.process(peer);
  // If somebody is known to be dead, it may be one that the kernel still takes apart.
  const bool lives =
      options_.has_ended && options_.has_ended() ? !is_ending(process) : is_alive(process);
  return {.is_alive = lives, .state = peers_.control(peer).state.load()};
}

void Group::throw_lost(int peer, const PeerState& its, const Activity& activity) const {
  ErrorPlace place{.rank = peers_.my_global_rank(), .operation = activity.operation};
  if (its.state == RankState::kFailed) {
    const Cause cause = cause_from(peers_.control(peer).cause);
    throw_cause(cause, place, options_.describe ? options_.describe(cause.rank) : "");
  }
  place.peer = peers_.global_rank(peer);
  if (!its.is_alive) {
    throw PeerLostError(place, text::format("{} lost {}, which {}.\nLook at the last lines of rank "
                                            "{}, fix the cause and restart the job.",
                                            activity.text, describe(peer),
                                            describe_end(peers_.process(peer)), place.peer));
  }
  throw PeerLostError(place, text::format("{} waits for {}, which has left this world.\nMake "
                                          "the same calls on all ranks before the world ends.",
                                          activity.text, describe(peer)));
}

// Those that have not posted what is waited for.
std::vector<int> Group::missing_ranks() const {
  std::vector<int> missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !pieces_.has_posted(peer, pieces_.oldest())) missing.push_back(peer);
  }
  return missing;
}

void Group::warn_of(const Request& request) const {
  std::vector<int> missing;
  for (const int peer : missing_ranks()) missing.push_back(peers_.global_rank(peer));
  const bool is_message = dynamic_cast<const MessageRequest*>(&request) != nullptr;
  Log(peers_.my_global_rank())
      .warning("{} has been waiting for {} for {} s", activity_of(request).text,
               is_message || missing.empty() ? "other ranks"
                                             : text::format("rank {}", text::join(missing, ", ")),
               kFirstWarning.count());
}

// Throws, unless a better-informed rank reports first.
void Group::time_out(const Request& request, std::chrono::milliseconds timeout,
                     std::chrono::nanoseconds waited) const {
  const double seconds = std::chrono::duration<double>(timeout).count();
  const Activity activity = activity_of(request);
  ErrorPlace place{.rank = peers_.my_global_rank(), .operation = activity.operation};
  if (const auto* message = dynamic_cast<const MessageRequest*>(&request)) {
    place.peer = peers_.global_rank(message->message.peer);
    throw TimeoutError(place, text::format("{} waited {:.1f} s.\nCheck that the other side makes "
                                           "the matching call, or raise JoinOptions::timeout.",
                                           activity.text, seconds));
  }
  std::string missing;
  for (const int peer : missing_ranks()) {
    const int outside = peers_.control(peer).waits_outside.load() - 1;
    if (outside >= 0 && waited < timeout + kGraceForOutside) return;
    if (place.peer < 0) place.peer = outside >= 0 ? outside : peers_.global_rank(peer);
    missing += text::format("{}{}", missing.empty() ? "rank " : ", ", peers_.global_rank(peer));
    if (outside >= 0 && options_.describe) {
      missing += text::format(", which waits for {}", options_.describe(outside));
    }
  }
  throw TimeoutError(
      place,
      text::format("{} waited {:.1f} s for {}.\nCheck what it is doing, make the same calls "
                   "in the same order on all ranks, or raise JoinOptions::timeout.",
                   activity.text, seconds,
                   missing.empty() ? "a rank that was stopped in the middle of it" : missing));
}

void Group::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

// The first failure ends the group: it is kept, told to the others, and thrown.
void Group::fail(std::exception_ptr error) {
  remember(std::move(error));
  std::rethrow_exception(failure_);
}

void Group::remember(std::exception_ptr error) {
  forget_requests();
  if (failure_) return;
  failure_ = error;
  Control& mine = peers_.self();
  to_text(cause_of(error, peers_.my_global_rank())).copy(mine.cause, kCauseBytes - 1);
  mine.state.store(RankState::kFailed);
  for (int peer = 0; peer < size(); ++peer) ring_even_if_awake(peers_.control(peer));
}

void Group::check_peers(const Activity& activity) {
  const MutexLock lock(mutex_);
  throw_if_failed();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const PeerState state = look_at(peer);
    if (!state.is_fine() && state.state != RankState::kLeft) throw_lost(peer, state, activity);
  }
}

void Group::give_up(std::exception_ptr error) noexcept {
  const MutexLock lock(mutex_);
  if (!has_left_) remember(std::move(error));
}

}  // namespace lockstep::shm
