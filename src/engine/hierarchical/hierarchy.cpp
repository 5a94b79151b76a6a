#include "engine/hierarchical/hierarchy.h"
#include "base/text.h"

#include "base/posix.h"

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
      wire_(std::move(engine), context, partners_of(layout_)),
      steps_(std::make_shared<HostSteps>(layout_, *local_, wire_)),
      thread_([this] { run(); }) {}

Hierarchy::~Hierarchy() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
    if (!queue_.empty()) {
      interrupt(std::make_exception_ptr(
          UsageError({.rank = rank(), .operation = "end"},
                     "The world ended before all operations were done.\n"
                     "Wait for what was started, on all ranks, before it ends.")));
    }
  }
  changed_.notify_all();
  thread_.join();
  bool has_failed = false;
  {
    const MutexLock lock(mutex_);
    has_failed = failure_ != nullptr;
  }
  if (!has_failed) wire_.leave(std::nullopt);
  local_->leave();
}

std::shared_ptr<Request> Hierarchy::start(collective::Operation operation) {
  collective::check(operation, rank(), size());
  auto task = std::make_shared<Task>();
  task->operation = std::move(operation);
  {
    const MutexLock lock(mutex_);
    throw_if_failed();
    if (channel_) task->number = channel_->start(collective::name_of(task->operation.kind));
    queue_.push_back(task);
  }
  changed_.notify_all();
  return task;
}

bool Hierarchy::poll(const Request& request) {
  const MutexLock lock(mutex_);
  if (request.is_done) return true;
  throw_if_failed();
  return false;
}

void Hierarchy::wait(const Request& request, std::chrono::milliseconds timeout) {
  if (const auto* message = dynamic_cast<const MessageTask*>(&request)) {
    return wait_for_message(const_cast<MessageTask&>(*message), timeout);
  }
  shm::BoardWait board_wait(timeout < timeout_ ? nullptr : channel_.get(), request.number);
  const MutexLock lock(mutex_);
  const auto start = Clock::now();
  while (!request.is_done) {
    throw_if_failed();
    if (changed_.wait_for(mutex_,
                          std::min<std::chrono::milliseconds>(kPeerCheckInterval, timeout))) {
      continue;
    }
    const auto waited = Clock::now() - start;
    const MutexUnlock unlock(mutex_);
    check_peers(static_cast<const Task&>(request).operation.activity(),
                timeout < timeout_ && waited >= timeout, board_wait, waited);
  }
}

// On the thread of a caller that waits: finds what the running thread cannot see while it waits
// for one message.
void Hierarchy::check_peers(const Activity& activity, bool is_late, shm::BoardWait& board_wait,
                            std::chrono::nanoseconds waited) {
  try {
    board_wait.look(waited, [&] { return activity; });
    const auto waiting = wire_.waiting();
    const auto elapsed = waiting ? Clock::now() - waiting->since : Clock::duration::zero();
    if (elapsed >= kPatience) throw_what_others_know(activity);
    // Whoever waits inside a host reports first: it knows better for whom.
    if (is_late || elapsed >= timeout_ + kPatience) {
      wire_.throw_late(waiting ? waiting->peer : -1, activity);
    }
  } catch (const Error&) {
    const MutexLock lock(mutex_);
    interrupt(std::current_exception());
  }
}

void Hierarchy::throw_what_others_know(const Activity& activity) {
  if (const auto cause = wire_.told()) {
    throw_cause(*cause, {.rank = rank(), .operation = activity.operation},
                wire_.describe(cause->rank));
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
    steps_->drop();
    steps_.reset();  // messages that the engine cannot take back keep it
    error = first_cause(std::move(error), activity);
    local_->give_up(error);
    wire_.leave(cause_of(error, rank()));
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
      } catch (const Error&) {
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
        {.rank = rank(), .operation = message.name()},
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
  task->parcel =
      message.is_send
          ? wire_.send(message.peer, message.memory, message.bytes, message.tag, nullptr)
          : wire_.receive(message.peer, message.memory, message.bytes, message.tag, nullptr);
  return task;
}

void Hierarchy::wait_for_message(MessageTask& task, std::chrono::milliseconds timeout) {
  if (task.is_done) return;
  if (task.self) {
    local_->wait(*task.self, timeout);
  } else {
    try {
      task.message.peer =
          wire_.wait_for_message(task.parcel, {task.message.name(), task.message.name()}, timeout);
    } catch (...) {
      const MutexLock lock(mutex_);
      interrupt(std::current_exception());
      while (!failure_) changed_.wait(mutex_);
      throw_if_failed();
    }
  }
  task.is_done = true;
}

}  // namespace lockstep
