#include "engine/hierarchical/hierarchy.h"

#include <algorithm>
#include <utility>

#include "base/posix.h"
#include "base/text.h"
#include "shm/neighbours.h"

namespace lockstep {
namespace {

using collective::Message;
using collective::MessageRequest;
using collective::Request;
using Clock = std::chrono::steady_clock;

// A caller that waits checks this often for ranks that are gone.
constexpr auto kPeerCheckInterval = std::chrono::milliseconds(50);

// When a connection breaks or a message is late, others often know more, and are about to tell it.
constexpr auto kPatience = std::chrono::milliseconds(500);

// How long a wait goes on when a rank was lost: those who live may have left for the next
// generation, or they may be about to complete it.
constexpr auto kGraceOfEnded = std::chrono::seconds(2);

// A worker waits for a message until it comes, or the wire ends.
constexpr std::chrono::milliseconds kUntilItComes = std::chrono::hours(24 * 300);

constexpr int kMaxTag = Wire::kFirstOperationTag - 1;

std::vector<int> partners_of(const HostLayout& layout) {
  std::vector<int> partners;
  for (int host = 0; host < layout.num_hosts() && layout.is_in_team(); ++host) {
    if (host != layout.host) partners.push_back(layout.helper(host, layout.my_index));
  }
  return partners;
}

}  // namespace

Hierarchy::Hierarchy(const EngineContext& context, std::shared_ptr<shm::Group> local,
                     Backend engine)
    : timeout_(context.timeout),
      layout_(context.rank, context.members),
      local_(std::move(local)),
      channel_(context.channel),
      has_ended_(context.has_ended),
      wire_(std::move(engine), context, partners_of(layout_)),
      steps_(std::make_shared<HostSteps>(layout_, *local_, wire_)),
      thread_([this] { run(); }) {}

Hierarchy::~Hierarchy() { leave(); }

void Hierarchy::leave() noexcept {
  {
    const MutexLock lock(mutex_);
    if (is_ending_) return;
    is_ending_ = true;
    if (!queue_.empty()) interrupt(why_left());
  }
  changed_.notify_all();
  thread_.join();
  if (steps_) steps_->drop();  // before the connections close
  bool has_failed = false;
  {
    const MutexLock lock(mutex_);
    has_failed = failure_ != nullptr;
    if (!has_failed) failure_ = collective::world_has_ended(global_rank(rank()));
  }
  changed_.notify_all();
  wire_.interrupt();
  if (!has_failed) wire_.leave(std::nullopt);
  local_->leave();
}

// In the middle of an operation. Of an elastic job it is no mistake if somebody is lost.
std::exception_ptr Hierarchy::why_left() const {
  const int rank = global_rank(layout_.rank);
  if (!has_ended_ || !has_ended_()) return collective::world_has_ended(rank);
  try {
    collective::throw_ended(queue_.front()->operation.activity(), rank);
  } catch (...) {
    return std::current_exception();
  }
}

std::shared_ptr<Request> Hierarchy::start(collective::Operation operation) {
  collective::check(operation, *this);
  auto task = std::make_shared<Task>();
  task->operation = std::move(operation);
  task->operation.timeout = task->operation.timeout_or(timeout_);
  {
    const MutexLock lock(mutex_);
    throw_if_failed();
    if (channel_) task->number = channel_->start(collective::name_of(task->operation.kind));
    queue_.push_back(task);
  }
  changed_.notify_all();
  return task;
}

// Requests come from start(), and are this runner's to change.
bool Hierarchy::poll(const Request& request) {
  if (auto* task = const_cast<MessageTask*>(dynamic_cast<const MessageTask*>(&request))) {
    if (task->self) return wait_for_self(*task, Clock::now());
    wait_by_worker(*task);
  }
  const MutexLock lock(mutex_);
  if (request.is_done) return true;
  throw_if_failed();
  return false;
}

bool Hierarchy::wait_until(const Request& request, TimePoint until) {
  const auto start = Clock::now();
  if (auto* task = const_cast<MessageTask*>(dynamic_cast<const MessageTask*>(&request))) {
    if (task->self) return wait_for_self(*task, until);
    // This thread may have to move groups on meanwhile.
    if (until != kNoLimit || shm::neighbours::num_busy() > 0) {
      wait_by_worker(*task);
    } else if (take_waiter(*task)) {
      wait_for(*task, task->message.timeout_or(timeout_));
    }
  }
  shm::BoardWait board_wait(until == kNoLimit ? channel_.get() : nullptr, request.number);
  auto next_check = Clock::now() + kPeerCheckInterval;
  shm::neighbours::Looks looks;
  GaugeWait shown(gauges_.get());
  auto ended_at = Clock::time_point::max();  // since then somebody is known to be lost
  const MutexLock lock(mutex_);
  while (!request.is_done) {
    throw_if_failed();
    changed_.wait_until(mutex_, std::min({until, next_check, looks.next(nullptr)}));
    if (request.is_done) break;
    const auto now = Clock::now();
    if (now >= until) return false;
    const MutexUnlock unlock(mutex_);
    looks.look(nullptr, true, now);
    if (now < next_check) continue;
    next_check = now + kPeerCheckInterval;
    show_wait(shown, request, start);
    ended_at = has_ended_ && has_ended_() ? std::min(ended_at, now) : Clock::time_point::max();
    check_wait(request, until == kNoLimit ? now - start : Clock::duration::zero(),
               now - std::min(ended_at, now), board_wait);
  }
  return true;
}

void Hierarchy::show_wait(GaugeWait& wait, const Request& request, TimePoint since) {
  const auto waiting = wire_.waiting();
  const int other = waiting && waiting->peer >= 0 ? global_rank(waiting->peer) : -1;
  if (const auto* task = dynamic_cast<const MessageTask*>(&request)) {
    const int peer = task->message.peer;
    return wait.show(kWaitsForMessage, peer < 0 ? -1 : global_rank(peer), since);
  }
  wait.show(1 + static_cast<std::int32_t>(static_cast<const Task&>(request).operation.kind),
            other >= 0 ? other : local_->first_missing(), since);
}

// On the thread of a caller that waits, and not for the first time.
void Hierarchy::check_wait(const Request& request, Clock::duration waited,
                           Clock::duration since_end, shm::BoardWait& board_wait) {
  try {
    if (since_end >= kGraceOfEnded) {
      const auto* task = dynamic_cast<const Task*>(&request);
      collective::throw_ended(
          task != nullptr ? task->operation.activity() : Activity{"message", "a message"},
          global_rank(rank()));
    }
    if (const auto* task = dynamic_cast<const MessageTask*>(&request)) {
      const auto timeout = task->message.timeout_or(timeout_);
      const char* name = task->message.name();
      if (waited >= timeout) wire_.throw_late(task->parcel.peer, {name, name}, timeout);
    } else {
      const Activity activity = static_cast<const Task&>(request).operation.activity();
      board_wait.look(waited, [&] { return activity; });
      check_peers(activity);
    }
  } catch (...) {
    const MutexLock lock(mutex_);
    interrupt(std::current_exception());
  }
}

// Finds what the running thread cannot see while it waits for one message.
void Hierarchy::check_peers(const Activity& activity) {
  const auto waiting = wire_.waiting();
  if (!waiting) return;
  const auto elapsed = Clock::now() - waiting->since;
  if (elapsed >= kPatience) throw_what_others_know(activity);
  // Whoever waits inside a host reports first: it knows better for whom.
  if (elapsed >= waiting->timeout + kPatience) {
    wire_.throw_late(waiting->peer, activity, waiting->timeout);
  }
}

void Hierarchy::throw_what_others_know(const Activity& activity) {
  if (const auto cause = wire_.told()) {
    throw_cause(*cause, {.rank = global_rank(rank()), .operation = activity.operation},
                wire_.describe_global(cause->rank));
  }
  local_->check_peers(activity);
}

// Makes the running thread fail with `cause`, unless it does with another already.
void Hierarchy::interrupt(std::exception_ptr cause) {
  if (cause_ || failure_) return;
  cause_ = cause;
  wire_.interrupt();
  local_->give_up(cause);
  changed_.notify_all();
}

void Hierarchy::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

void Hierarchy::run() {
  const NoSigpipe no_sigpipe;
  const MutexLock lock(mutex_);
  while (!failure_) {
    while (!is_ending_ && !cause_ && queue_.empty()) changed_.wait(mutex_);
    if (queue_.empty() && !cause_) return;
    try {
      run_next();
    } catch (...) {
      fail(std::current_exception());
    }
  }
}

void Hierarchy::run_next() {
  if (cause_) std::rethrow_exception(cause_);
  const std::shared_ptr<Task> task = queue_.front();
  const std::uint64_t number = ++num_started_;
  {
    const MutexUnlock unlock(mutex_);
    steps_->run(task->operation, number);
    task->operation.owner.reset();
  }
  task->is_done = true;
  queue_.pop_front();
  changed_.notify_all();
}

// The end: others are told, the connections closed, and then the callers hear of it.
void Hierarchy::fail(std::exception_ptr error) {
  const Activity activity =
      queue_.empty() ? Activity{"waiting", "waiting"} : queue_.front()->operation.activity();
  {
    const MutexUnlock unlock(mutex_);
    wire_.interrupt();  // callers' messages end, too
    steps_->drop();
    error = first_cause(std::move(error), activity);
    local_->give_up(error);
    // Until here a caller's thread may move what the host is at, which refers to these steps.
    steps_.reset();  // messages that the engine cannot take back keep it
    wire_.leave(cause_of(error, global_rank(rank())));
  }
  failure_ = error;
  queue_.clear();
  changed_.notify_all();
}

// What others know of it, if this rank has only seen a connection break.
std::exception_ptr Hierarchy::first_cause(std::exception_ptr error, const Activity& activity) {
  {
    const MutexLock lock(mutex_);
    if (cause_) return cause_;
  }
  try {
    std::rethrow_exception(error);
  } catch (const ConnectionLost&) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      try {
        throw_what_others_know(activity);
      } catch (...) {
        return std::current_exception();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (...) {  // NOLINT: it is the cause
  }
  return error;
}

void Hierarchy::check(const Message& message) const {
  const int least = message.is_send ? 0 : collective::kAnyRank;
  if (message.peer < least || message.peer >= size() || message.tag < 0 || message.tag > kMaxTag) {
    throw UsageError(
        {.rank = global_rank(rank()), .operation = message.name()},
        text::format("{} was given rank {} and tag {} in a world of {}.\n"
                     "Give a rank from 0 to {} and a tag from 0 to {}.",
                     message.name(), message.peer, message.tag, size(), size() - 1, kMaxTag));
  }
}

// Messages go over the wire, also inside a host: a receive from any rank does not know from where.
std::shared_ptr<MessageRequest> Hierarchy::start(Message message) {
  check(message);
  {
    const MutexLock lock(mutex_);
    throw_if_failed();
  }
  auto task = std::make_shared<MessageTask>();
  task->message = message;
  if (message.peer == rank()) {
    message.peer = layout_.my_index;
    task->self = local_->start(std::move(message));
    return task;
  }
  const NoSigpipe no_sigpipe;
  try {
    task->parcel = message.is_send ? wire_.send(message.peer, message.memory, message.bytes,
                                                message.tag, message.owner)
                                   : wire_.receive(message.peer, message.memory, message.bytes,
                                                   message.tag, message.owner);
  } catch (const WireInterrupted&) {
    const MutexLock lock(mutex_);
    while (!failure_) changed_.wait(mutex_);
    throw_if_failed();
  }
  return task;
}

bool Hierarchy::wait_for_self(MessageTask& task, TimePoint until) {
  if (!local_->wait_until(*task.self, until)) return false;
  const MutexLock lock(mutex_);
  task.is_done = true;
  return true;
}

// Whether the caller is to wait for the message: only one thread may.
bool Hierarchy::take_waiter(MessageTask& task) {
  const MutexLock lock(mutex_);
  return !std::exchange(task.has_waiter, true);
}

void Hierarchy::wait_by_worker(MessageTask& task) {
  const MutexLock lock(mutex_);
  if (task.has_waiter) return;
  workers_.run([this, owner = task.shared_from_this()] { wait_for(*owner, kUntilItComes); });
  task.has_waiter = true;
}

// Whatever goes wrong is the end: callers find it in failure_.
void Hierarchy::wait_for(MessageTask& task, std::chrono::milliseconds timeout) {
  const Activity activity{task.message.name(), task.message.name()};
  try {
    const int peer = wire_.wait_for_message(task.parcel, activity, timeout);
    const MutexLock lock(mutex_);
    task.message.peer = peer;
    task.is_done = true;
  } catch (const WireInterrupted&) {  // NOLINT: whoever interrupted knows why
  } catch (...) {
    const auto cause = first_cause(std::current_exception(), activity);
    const MutexLock lock(mutex_);
    interrupt(cause);
  }
  changed_.notify_all();
}

}  // namespace lockstep
