#include "backend/hierarchy.h"

#include <fmt/format.h>

#include "base/posix.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// A caller that waits looks for ranks that are gone this often.
constexpr auto kLookAround = std::chrono::milliseconds(50);

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

std::string text_of(const shm::Request& request) {
  return request.is_mail ? request.is_send ? "send" : "recv" : request.operation.text();
}

}  // namespace

Hierarchy::Hierarchy(const EngineContext& context, std::shared_ptr<shm::Group> local,
                     Backend engine)
    : timeout_(context.timeout),
      layout_(context.rank, context.members),
      local_(std::move(local)),
      wire_(std::move(engine), context, partners_of(layout_)),
      steps_(std::make_shared<HostSteps>(layout_, *local_, wire_)),
      thread_([this] { run(); }) {}

Hierarchy::~Hierarchy() {
  {
    std::unique_lock lock(mutex_);
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
  if (!failure_) wire_.leave(std::nullopt);
  local_->leave();
}

std::shared_ptr<shm::Request> Hierarchy::start(shm::Operation operation) {
  shm::check(operation, rank(), size());
  auto task = std::make_shared<Task>();
  task->operation = std::move(operation);
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
    queue_.push_back(task);
  }
  changed_.notify_all();
  return task;
}

bool Hierarchy::poll(const shm::Request& request) {
  const std::lock_guard lock(mutex_);
  if (request.is_done) return true;
  throw_if_failed();
  return false;
}

void Hierarchy::wait(const shm::Request& request, std::chrono::milliseconds timeout) {
  if (request.is_mail) {
    return wait_for_mail(const_cast<Task&>(static_cast<const Task&>(request)), timeout);
  }
  std::unique_lock lock(mutex_);
  const auto start = Clock::now();
  while (!request.is_done) {
    throw_if_failed();
    if (changed_.wait_for(lock, std::min<std::chrono::milliseconds>(kLookAround, timeout)) ==
        std::cv_status::timeout) {
      const bool is_late = timeout < timeout_ && Clock::now() - start >= timeout;
      lock.unlock();
      look_around(request, is_late);
      lock.lock();
    }
  }
}

// On the thread of a caller that waits: finds what the running thread cannot see while it waits
// for one message.
void Hierarchy::look_around(const shm::Request& request, bool is_late) {
  const std::string what = text_of(request);
  try {
    const auto waiting = wire_.waiting();
    const auto elapsed = waiting ? Clock::now() - waiting->since : Clock::duration::zero();
    if (elapsed >= kPatience) throw_what_others_know(what);
    // Whoever waits inside a host is first to say so: it knows better for whom.
    if (is_late || elapsed >= timeout_ + kPatience) {
      wire_.throw_late(waiting ? waiting->peer : -1, what);
    }
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    interrupt(std::current_exception());
  }
}

void Hierarchy::throw_what_others_know(const std::string& what) {
  if (const auto told = wire_.told()) {
    throw_because(told->from, told->cause,
                  {.rank = rank(), .operation = what.substr(0, what.find(' '))});
  }
  local_->look_around(what);
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
  std::unique_lock lock(mutex_);
  while (!failure_) {
    changed_.wait(lock, [&] { return is_ending_ || cause_ || !queue_.empty(); });
    if (queue_.empty() && !cause_) return;
    run_next(lock);
  }
}

void Hierarchy::run_next(std::unique_lock<std::mutex>& lock) {
  try {
    if (cause_) std::rethrow_exception(cause_);
    const std::shared_ptr<Task> task = queue_.front();
    const std::uint64_t number = ++num_started_;
    lock.unlock();
    steps_->run(task->operation, number);
    task->operation.owner.reset();
    lock.lock();
    task->is_done = true;
    queue_.pop_front();
    changed_.notify_all();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    fail(lock, std::current_exception());
  }
}

// The end: others are told, the connections closed, and then the callers hear of it.
void Hierarchy::fail(std::unique_lock<std::mutex>& lock, std::exception_ptr error) {
  const std::string what = queue_.empty() ? "waiting" : text_of(*queue_.front());
  lock.unlock();
  steps_->drop();
  steps_.reset();  // messages that the engine cannot take back keep it
  error = first_cause(std::move(error), what);
  local_->give_up(error);
  wire_.leave(cause_of(error, rank()));
  lock.lock();
  failure_ = error;
  queue_.clear();
  changed_.notify_all();
}

// What others know of it, if this rank has only seen a connection break.
std::exception_ptr Hierarchy::first_cause(std::exception_ptr error, const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    if (cause_) return cause_;
  }
  try {
    std::rethrow_exception(error);
  } catch (const ConnectionLost&) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      try {
        throw_what_others_know(what);
      } catch (const Error&) {
        return std::current_exception();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (...) {  // NOLINT: it is the cause
  }
  return error;
}

void Hierarchy::check_mail(const char* operation, int peer, int least, int tag) const {
  if (peer < least || peer >= size() || tag < 0 || tag > kMaxTag) {
    throw UsageError({.rank = rank(), .operation = operation},
                     fmt::format("{} was given rank {} and tag {} in a world of {}.\n"
                                 "Give a rank from 0 to {} and a tag from 0 to {}.",
                                 operation, peer, tag, size(), size() - 1, kMaxTag));
  }
}

// Mail goes over the wire, also inside a host: who receives from any rank does not know whence.
std::shared_ptr<shm::Request> Hierarchy::send(const std::byte* memory, std::size_t bytes, int peer,
                                              int tag) {
  check_mail("send", peer, 0, tag);
  auto task = std::make_shared<Task>();
  task->is_mail = task->is_send = true;
  task->peer = peer;
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }
  if (peer == rank()) {
    task->at_home = local_->send(memory, bytes, layout_.my_index, tag);
  } else {
    const NoSigpipe no_sigpipe;
    task->parcel = wire_.send(peer, memory, bytes, tag, nullptr);
  }
  return task;
}

std::shared_ptr<shm::Request> Hierarchy::receive(std::byte* memory, std::size_t bytes, int peer,
                                                 int tag) {
  check_mail("recv", peer, shm::kAnyRank, tag);
  auto task = std::make_shared<Task>();
  task->is_mail = true;
  task->peer = peer;
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }
  if (peer == rank()) {
    task->at_home = local_->receive(memory, bytes, layout_.my_index, tag);
  } else {
    const NoSigpipe no_sigpipe;
    task->parcel = wire_.receive(peer, memory, bytes, tag, nullptr);
  }
  return task;
}

void Hierarchy::wait_for_mail(Task& task, std::chrono::milliseconds timeout) {
  if (task.is_done) return;
  if (task.at_home) {
    local_->wait(*task.at_home, timeout);
  } else {
    try {
      task.peer = wire_.wait_for_mail(task.parcel, text_of(task), timeout);
    } catch (...) {
      std::unique_lock lock(mutex_);
      interrupt(std::current_exception());
      changed_.wait(lock, [&] { return failure_ != nullptr; });
      throw_if_failed();
    }
  }
  task.is_done = true;
}

}  // namespace lockstep
