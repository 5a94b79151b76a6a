#include "engine/mpi/runner.h"

#include <lockstep/error.h>

#include <algorithm>
#include <cstdint>

#include "base/text.h"
#include "shm/neighbours.h"

namespace lockstep {
namespace {

// Without work the thread looks so often at first, and ever more rarely: what was sent may still
// need MPI to be called.
constexpr std::chrono::nanoseconds kShortestIdle = std::chrono::milliseconds(5);
constexpr std::chrono::nanoseconds kLongestIdle = std::chrono::milliseconds(200);
// Those who wait for a message check this often for ranks that are gone.
constexpr auto kPeerPollInterval = std::chrono::milliseconds(200);
// What a rank sent before it left has arrived after this time.
constexpr auto kLastMessage = std::chrono::seconds(1);

int largest_tag() {
  const mpi::Calls calls;
  void* value = nullptr;
  int is_set = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &is_set);
  return is_set != 0 ? *static_cast<int*>(value) : 32767;  // what every MPI has at least
}

}  // namespace

MpiRunner::MpiRunner(const EngineContext& context, std::unique_ptr<MpiTraffic> traffic)
    : rank_(context.rank),
      size_(context.size()),
      timeout_(context.timeout),
      largest_tag_(largest_tag()),
      channel_(context.channel),
      notices_(context),
      traffic_(std::move(traffic)),
      thread_([this] { work(); }) {
  hook_ = std::make_unique<mpi::FinalizeHook>([this] {
    stop(std::make_exception_ptr(
        UsageError({.rank = notices_.global_rank(rank_)},
                   "The program has called MPI_Finalize, so there is no engine \"mpi\" any more.\n"
                   "Let the world end before.")));
  });
}

MpiRunner::~MpiRunner() {
  leave();
  hook_.reset();
}

void MpiRunner::leave() noexcept { stop(collective::world_has_ended(notices_.global_rank(rank_))); }

std::shared_ptr<collective::Request> MpiRunner::start(Operation operation) {
  collective::check(operation, *this);
  auto request = std::make_shared<MpiOperation>();
  request->operation = std::move(operation);
  const MutexLock lock(mutex_);
  throw_if_failed();
  if (channel_) {
    request->number = channel_->start(collective::name_of(request->operation.kind));
  }
  operations_.push_back(request);
  wake_.notify_one();
  return request;
}

std::shared_ptr<collective::MessageRequest> MpiRunner::start(collective::Message message) {
  const int least = message.is_send ? 0 : collective::kAnyRank;
  const bool is_rank = message.peer >= least && message.peer < size_;
  if (!is_rank || message.tag < 0 || message.tag > largest_tag_) {
    throw UsageError({.rank = notices_.global_rank(rank_), .operation = message.name()},
                     text::format("There is no rank {} in a world of {}, or no tag {}.\n"
                                  "Give a rank from 0 to {} and a tag from 0 to {}.",
                                  message.peer, size_, message.tag, size_ - 1, largest_tag_));
  }
  auto request = std::make_shared<MpiMessage>();
  request->message = std::move(message);
  const MutexLock lock(mutex_);
  throw_if_failed();
  messages_.push_back(request);
  wake_.notify_one();
  return request;
}

bool MpiRunner::poll(const collective::Request& request) {
  const MutexLock lock(mutex_);
  if (!request.is_done && failure_) throw_failure();
  return request.is_done;
}

// The thread keeps the deadline of operations, and knows who is missing; that of a message begins
// here.
bool MpiRunner::wait_until(const collective::Request& request, TimePoint until) {
  const auto start = Clock::now();
  const auto* message = dynamic_cast<const MpiMessage*>(&request);
  const auto timeout = message != nullptr ? message->message.timeout_or(timeout_) : timeout_;
  const auto deadline = message != nullptr && until == kNoLimit ? start + timeout : kNoLimit;
  const auto& abandonable = dynamic_cast<const Abandonable&>(request);
  shm::BoardWait board_wait(until == kNoLimit ? channel_.get() : nullptr, request.number);
  shm::neighbours::Looks looks;  // at other worlds of this process
  const MutexLock lock(mutex_);
  while (true) {
    const auto next_check = std::min({until, deadline, Clock::now() + kPeerPollInterval});
    while (!request.is_done && !abandonable.is_abandoned && !failure_ &&
           (done_.wait_until(mutex_, std::min(next_check, looks.next(nullptr))) ||
            Clock::now() < next_check)) {
      const MutexUnlock unlock(mutex_);
      looks.look(nullptr, true, Clock::now());
    }
    if (request.is_done) return true;
    if (failure_) throw_failure();
    if (Clock::now() >= until) return false;
    if (abandonable.is_abandoned) throw std::runtime_error("the wait for a message was ended");
    const Activity activity = message != nullptr
                                  ? activity_of(message->message)
                                  : static_cast<const MpiOperation&>(request).operation.activity();
    // Copied here: of any source it is written when the message comes.
    const int its_peer = message != nullptr ? message->message.peer : collective::kAnyRank;
    const int peer = message != nullptr ? notices_.global_rank(its_peer) : -1;
    const MutexUnlock unlock(mutex_);
    try {
      board_wait.look(Clock::now() - start, [&] { return activity; });
      check_peer(its_peer, activity, Clock::now() - start);
      if (Clock::now() >= deadline) {
        throw TimeoutError(
            {.rank = notices_.global_rank(rank_), .peer = peer, .operation = activity.operation},
            text::format("{} waited {:.1f} s.\nCheck that the other ranks make the matching calls, "
                         "or raise JoinOptions::timeout.",
                         activity.text, std::chrono::duration<double>(timeout).count()));
      }
    } catch (...) {
      fail(std::current_exception());
    }
  }
}

void MpiRunner::check_peer(int peer, const Activity& activity, Clock::duration waited) {
  if (peer == collective::kAnyRank || peer == rank_) return;
  notices_.check_processes({peer}, activity);
  notices_.check_store({peer}, waited > kLastMessage ? UINT64_MAX : 0, activity);
}

bool MpiRunner::abandon(collective::Request& request) {
  const MutexLock lock(mutex_);
  dynamic_cast<Abandonable&>(request).is_abandoned = true;
  done_.notify_all();
  return true;
}

void MpiRunner::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

// Whoever waited may use its memory again when this throws.
void MpiRunner::throw_failure() {
  while (!has_left_) done_.wait(mutex_);
  std::rethrow_exception(failure_);
}

void MpiRunner::fail(const std::exception_ptr& error) {
  {
    const MutexLock lock(mutex_);
    if (failure_) return;
    failure_ = error;
    has_failed_ = true;
    is_over_ = true;
  }
  mpi::never_finalize();
  wake_.notify_one();
  done_.notify_all();
  notices_.tell_failure(error);
}

void MpiRunner::stop(const std::exception_ptr& reason) noexcept {
  {
    const MutexLock lock(mutex_);
    if (!failure_) failure_ = reason;
    is_over_ = true;
  }
  wake_.notify_one();
  done_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void MpiRunner::work() {
  try {
    while (const OperationPtr request = next()) {
      run(request);
      finish(request);
    }
  } catch (const Ended&) {  // NOLINT: there is nobody to tell
  } catch (const MpiProblem& problem) {
    fail(error_of(problem));
  } catch (...) {
    fail(std::current_exception());
  }
  end();
}

std::exception_ptr MpiRunner::error_of(const MpiProblem& problem) const {
  const Activity activity = problem.message     ? activity_of(problem.message->message)
                            : traffic_->present ? traffic_->present->operation.activity()
                                                : Activity{"waiting", "waiting"};
  const std::string& what = activity.text;
  const ErrorPlace place{.rank = notices_.global_rank(rank_),
                         .peer = notices_.global_rank(problem.peer),
                         .operation = activity.operation};
  if (problem.has_wrong_size) {
    return std::make_exception_ptr(
        MismatchError(place, text::format("{} got something else: {}.\nSend and receive tensors of "
                                          "the same size and type.",
                                          what, problem.what())));
  }
  return std::make_exception_ptr(
      PeerLostError(place, text::format("{} failed between this rank and rank {}: {}.\n"
                                        "Look for the rank that failed first.",
                                        what, place.peer, problem.what())));
}

// The next operation; nothing at the end. Messages go on meanwhile.
MpiRunner::OperationPtr MpiRunner::next() {
  auto start = Clock::now();
  while (true) {
    {
      const MutexLock lock(mutex_);
      const std::chrono::nanoseconds waited = Clock::now() - start;
      const auto deadline =
          Clock::now() + (traffic_->has_messages()
                              ? mpi::pause_after(waited)
                              : std::clamp(waited / 8, kShortestIdle, kLongestIdle));
      while (!is_over_ && operations_.empty() && messages_.empty() &&
             wake_.wait_until(mutex_, deadline)) {
      }
      if (!messages_.empty()) start = Clock::now();
      if (is_over_) return nullptr;
      if (!operations_.empty()) {
        OperationPtr request = std::move(operations_.front());
        operations_.pop_front();
        return request;
      }
    }
    post_messages();
    traffic_->move();
    deliver_messages();
  }
}

void MpiRunner::post_messages() {
  std::deque<std::shared_ptr<MpiMessage>> messages;
  {
    const MutexLock lock(mutex_);
    messages.swap(messages_);
  }
  for (auto& request : messages) traffic_->post(std::move(request));
}

void MpiRunner::deliver_messages() {
  const auto delivered = traffic_->take_delivered();
  if (delivered.empty()) return;
  const MutexLock lock(mutex_);
  for (const auto& [request, peer] : delivered) {
    request->message.peer = peer;
    request->is_done = true;
  }
  done_.notify_all();
}

void MpiRunner::finish(const OperationPtr& request) {
  const MutexLock lock(mutex_);
  request->is_done = true;
  done_.notify_all();
}

// The thread's end.
void MpiRunner::end() {
  const bool is_idle = traffic_->present == nullptr;
  const std::uint64_t num_done = is_idle ? number_ : number_ - 1;
  if (!traffic_->cancel()) {
    // MPI may still read or write this memory, whatever becomes of the engine.
    mpi::never_finalize();
    static_cast<void>(traffic_.release());  // NOLINT
  }
  bool has_failed = false;
  {
    const MutexLock lock(mutex_);
    has_left_ = true;
    has_failed = has_failed_;
  }
  if (traffic_ && (has_failed || !is_idle)) traffic_->keep_communicators();
  done_.notify_all();
  if (!has_failed) notices_.tell_leaving(num_done);
}

}  // namespace lockstep
