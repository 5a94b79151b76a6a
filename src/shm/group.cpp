// How a group is made, waited for, and ends.

#include "shm/group.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/error.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <sstream>

#include "base/cause.h"
#include "base/log.h"
#include "shm/doorbell.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

// Dead and failed peers are looked for this often while waiting.
constexpr auto kLookAround = std::chrono::milliseconds(50);
constexpr auto kFirstWarning = std::chrono::seconds(10);

// So much longer than its timeout a rank waits for one that waits for another host.
constexpr auto kPatienceForOthers = std::chrono::milliseconds(1500);

// A waiting rank looks for news so often before it offers its core to whoever is ready to run: that
// may be the rank it waits for. Without a core for each rank it offers it after every look.
constexpr int kLooksPerYield = 25;
// How long it looks without a core of its own, and after each sleep.
constexpr std::chrono::nanoseconds kShortSpin = std::chrono::microseconds(50);

// The cores that this process may use, as a text of one character each.
std::string allowed_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  std::string text;
  if (::sched_getaffinity(0, sizeof cores, &cores) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) text += CPU_ISSET(core, &cores) ? '1' : '0';
    text.erase(text.find_last_of('1') + 1);
  }
  return text.empty() ? "1" : text;
}

// Adds the cores of `more` to `all`.
void unite(std::string& all, const std::string& more) {
  if (all.size() < more.size()) all.resize(more.size(), '0');
  for (std::size_t i = 0; i < more.size(); ++i) {
    if (more[i] == '1') all[i] = '1';
  }
}

// What a rank tells the others: who it is, what it was built as, and where its memory is.
std::string introduction(const Segment& segment) {
  const SegmentName name = segment.name();
  return fmt::format("{} {} {} {} {} {} {} {}", kShmVersion, sizeof(Control), name.owner.pid,
                     name.owner.start_time, name.fd, name.bytes, name.address, allowed_cores());
}

}  // namespace

Group::Group(const GroupOptions& options, const Exchange& exchange)
    : options_(options),
      staging_users_(kStagingPieces, 0),
      peer_areas_(static_cast<std::size_t>(options.size)),
      arriving_(static_cast<std::size_t>(options.size)) {
  if (options.size < 1 || options.size > kMaxRanks || options.rank < 0 ||
      options.rank >= options.size) {
    throw UsageError({.rank = options.rank, .operation = "shared memory"},
                     fmt::format("Rank {} of {} cannot be: the engine \"shm\" connects 1 to {} "
                                 "ranks.\nUse fewer ranks on this host, or the engine \"gloo\".",
                                 options.rank, options.size, kMaxRanks));
  }
  connect(exchange);
}

void Group::connect(const Exchange& exchange) {
  Segment mine = Segment::create(segment_bytes(size()));
  auto* control = new (mine.data()) Control;
  for (int peer = 0; peer < size(); ++peer) {
    new (mine.data() + kChannelsOffset + static_cast<std::size_t>(peer) * sizeof(Channel)) Channel;
  }
  control->magic = kShmMagic;
  control->version = kShmVersion;
  const std::vector<std::string> all = exchange(introduction(mine));
  std::string all_cores;
  for (int peer = 0; peer < size(); ++peer) {
    const std::string& text = all[static_cast<std::size_t>(peer)];
    std::istringstream fields(text);
    std::uint32_t version = 0;
    std::size_t control_bytes = 0;
    SegmentName segment;
    std::string cores;
    fields >> version >> control_bytes >> segment.owner.pid >> segment.owner.start_time >>
        segment.fd >> segment.bytes >> segment.address >> cores;
    if (!fields || version != kShmVersion || control_bytes != sizeof(Control)) {
      throw MismatchError(
          {.rank = name(rank()), .peer = name(peer), .operation = "shared memory"},
          fmt::format("Rank {} was built with another version of lockstep: its shared memory is "
                      "version {} with {} bytes, here it is {} with {}.\n"
                      "Start the same program on all ranks.",
                      name(peer), version, control_bytes, kShmVersion, sizeof(Control)));
    }
    unite(all_cores, cores);
    processes_.push_back(segment.owner);
    segments_.push_back(peer == rank() ? std::move(mine) : Segment::attach(segment));
    controls_.push_back(reinterpret_cast<Control*>(segments_.back().data()));
  }
  if (std::ranges::count(all_cores, '1') >= size()) {
    num_looks_ = kLooksPerYield;
  } else {
    options_.spin = std::min(options_.spin, kShortSpin);
  }
  exchange("attached");  // nobody goes away before all have attached
}

Group::~Group() { leave(); }

void Group::leave() noexcept {
  const std::lock_guard lock(mutex_);
  if (has_left_) return;
  has_left_ = true;
  if (!failure_) self().state.store(RankState::kLeft);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) ring_even_if_awake(control(peer));
  }
}

std::uint64_t Group::num_pieces(const Operation& operation) const {
  const std::size_t per_piece = elements_per_piece(operation);
  return std::max<std::uint64_t>((operation.count + per_piece - 1) / per_piece, 1);
}

std::shared_ptr<Request> Group::start(Operation operation) {
  check(operation, name(rank()), size());
  auto request = std::make_shared<Request>();
  request->num_pieces = num_pieces(operation);
  request->operation = std::move(operation);
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  waiting_.push_back(request);
  while (post_next()) {
  }
  return request;
}

void Group::run(const Operation& operation) {
  check(operation, name(rank()), size());
  std::unique_lock lock(mutex_);
  throw_if_failed();
  const bool is_alone = waiting_.empty() && active_.empty() && !has_mail();
  const bool is_small = operation.kind == Kind::kAllReduce &&
                        operation.count <= kSmallBytes / size_of(operation.type);
  Piece piece;
  bool is_posted = false;
  if (is_alone && is_small) {
    try {
      is_posted = post(operation, 0, piece);
      if (is_posted && run_at_once(piece)) return;
    } catch (...) {
      fail(std::current_exception());
    }
  }
  Request request;
  request.operation = operation;
  request.num_pieces = num_pieces(operation);
  // Not owned: when this returns or throws, nothing refers to it any more (see fail()).
  const std::shared_ptr<Request> alias(std::shared_ptr<Request>(), &request);
  if (is_posted) {
    request.num_posted = 1;
    request.last_piece = piece.number;
    piece.request = alias;
    active_.push_back(std::move(piece));
  } else {
    waiting_.push_back(alias);
  }
  wait_locked(lock, request, options_.timeout);
}

bool Group::is_done(const Request& request) {
  if (request.is_done || request.is_mail) return request.is_done;
  if (request.num_done < request.num_pieces) return false;
  if (request.must_be_retired && min_retired_ < request.last_piece &&
      min_retired() < request.last_piece) {
    return false;
  }
  const_cast<Request&>(request).is_done = true;
  return true;
}

bool Group::poll(const Request& request) {
  const std::lock_guard lock(mutex_);
  if (request.is_done) return true;
  throw_if_failed();
  try {
    progress(false);
  } catch (...) {
    fail(std::current_exception());
  }
  return is_done(request);
}

void Group::wait(const Request& request, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (request.is_done) return;
  throw_if_failed();
  wait_locked(lock, request, timeout);
}

void Group::wait_locked(std::unique_lock<std::mutex>& lock, const Request& request,
                        std::chrono::milliseconds timeout) {
  try {
    const auto start = Clock::now();
    auto last_look = start;
    auto spin_until = start + options_.spin;
    bool has_warned = false;
    while (true) {
      bool has_moved = false;
      for (int look = 0; look < num_looks_ && !has_moved; ++look) {
        has_moved = progress(true);
        if (is_done(request)) return;
        relax();
      }
      const auto now = Clock::now();
      if (has_moved) spin_until = now + options_.spin;
      if (now < spin_until) {
        if (!has_moved) ::sched_yield();
        continue;
      }
      Sleep sleep(self());
      if (progress(true)) continue;
      if (is_done(request)) return;
      if (now - last_look >= kLookAround) {
        if (request.is_mail) {
          check_mail_peer(request);
        } else {
          check_peers(request.num_posted == 0 ? num_posted_ + 1 : request.last_piece);
        }
        last_look = now;
      }
      if (now - start >= timeout) time_out(request, timeout, now - start);
      if (now - start >= kFirstWarning && !has_warned) {
        has_warned = true;
        std::vector<int> missing;
        for (const int peer : missing_ranks()) missing.push_back(name(peer));
        const bool is_known = !request.is_mail && !missing.empty();
        Log(name(rank()))
            .warning("{} has been waiting for {} for {} s",
                     request.is_mail ? text_of_mail(request) : request.operation.text(),
                     is_known ? fmt::format("rank {}", fmt::join(missing, ", ")) : "other ranks",
                     kFirstWarning.count());
      }
      lock.unlock();
      sleep.nap(std::min<std::chrono::nanoseconds>(kLookAround, timeout));
      lock.lock();
      throw_if_failed();
      spin_until = Clock::now() + std::min(options_.spin, kShortSpin);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    fail(std::current_exception());
  }
}

// Throws if an operation up to piece `number` cannot end any more, because a rank is gone or has
// failed. A rank that has retired the piece has done its part.
void Group::check_peers(std::uint64_t number) {
  const std::string what =
      active_.empty() ? "room for an operation" : active_.front().request->operation.text();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && control(peer).retired.load() < number) check_peer(peer, what);
  }
}

std::string Group::describe(int peer) const {
  if (options_.describe) return options_.describe(name(peer));
  return fmt::format("rank {} (pid {})", name(peer),
                     processes_[static_cast<std::size_t>(peer)].pid);
}

// Throws if the rank is gone or has failed, while this one waits for `what`.
void Group::check_peer(int peer, const std::string& what) {
  const Control& theirs = control(peer);
  const ErrorPlace place{
      .rank = name(rank()), .peer = name(peer), .operation = what.substr(0, what.find(' '))};
  const RankState state = theirs.state.load();
  if (state == RankState::kFailed) {
    throw_because(options_.describe ? describe(peer) : fmt::format("rank {}", name(peer)),
                  {static_cast<ErrorKind>(theirs.failure_kind), theirs.failure_peer, theirs.reason},
                  place);
  }
  const ProcessId& process = processes_[static_cast<std::size_t>(peer)];
  if (!is_alive(process)) {
    throw PeerLostError(
        place,
        fmt::format("{} lost {}, which {}.\nLook at the last lines of rank {}, mend the cause, and "
                    "start the job again.",
                    what, describe(peer), describe_end(process), name(peer)));
  }
  if (state == RankState::kLeft) {
    throw PeerLostError(place, fmt::format("{} waits for {}, which has left this world.\nMake "
                                           "the same calls on all ranks before the world ends.",
                                           what, describe(peer)));
  }
}

// Those that have not posted what is waited for.
std::vector<int> Group::missing_ranks() const {
  std::vector<int> missing;
  const std::uint64_t number = active_.empty() ? num_posted_ + 1 : active_.front().number;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && control(peer).retired.load() < number &&
        slot(peer, number).posted.load() != number) {
      missing.push_back(peer);
    }
  }
  return missing;
}

// Throws, unless somebody else is to speak first.
void Group::time_out(const Request& request, std::chrono::milliseconds timeout,
                     std::chrono::nanoseconds waited) {
  const double seconds = std::chrono::duration<double>(timeout).count();
  if (request.is_mail) {
    throw TimeoutError(
        {.rank = name(rank()),
         .peer = name(request.peer),
         .operation = request.is_send ? "send" : "recv"},
        fmt::format("{} waited {:.1f} s.\nCheck that the other side makes the matching call, or "
                    "raise JoinOptions::timeout.",
                    text_of_mail(request), seconds));
  }
  const std::string what = request.operation.text();
  int culprit = -1;
  std::string whom;
  for (const int peer : missing_ranks()) {
    const int outside = control(peer).waits_outside.load() - 1;
    if (outside >= 0 && waited < timeout + kPatienceForOthers) return;
    if (culprit < 0) culprit = outside >= 0 ? outside : name(peer);
    whom += fmt::format("{}{}", whom.empty() ? "rank " : ", ", name(peer));
    if (outside >= 0 && options_.describe) {
      whom += fmt::format(", which waits for {}", options_.describe(outside));
    }
  }
  throw TimeoutError(
      {.rank = name(rank()), .peer = culprit, .operation = what.substr(0, what.find(' '))},
      fmt::format(
          "{} waited {:.1f} s for {}.\nCheck what it is doing, make the same calls in the "
          "same order on all ranks, or raise JoinOptions::timeout.",
          what, seconds,
          whom.empty() ? std::string("a rank that was stopped in the middle of it") : whom));
}

void Group::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

// The first failure is this group's end: it is kept, told to the others, and thrown.
void Group::fail(std::exception_ptr error) {
  remember(std::move(error));
  std::rethrow_exception(failure_);
}

void Group::remember(std::exception_ptr error) {
  waiting_.clear();
  active_.clear();
  if (failure_) return;
  failure_ = error;
  const Cause cause = cause_of(error, name(rank()));
  Control& mine = self();
  mine.failure_kind = static_cast<int>(cause.kind);
  mine.failure_peer = cause.peer;
  cause.message.copy(mine.reason, kReasonBytes - 1);
  mine.state.store(RankState::kFailed);
  for (int peer = 0; peer < size(); ++peer) ring_even_if_awake(control(peer));
}

void Group::look_around(const std::string& what) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && control(peer).state.load() != RankState::kLeft) check_peer(peer, what);
  }
}

void Group::give_up(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!has_left_) remember(std::move(error));
}

}  // namespace lockstep::shm
