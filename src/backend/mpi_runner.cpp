#include "backend/mpi_runner.h"

#include <fmt/format.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cstdint>

namespace lockstep {
namespace {

// Without work the thread looks so often at first, and ever more rarely: what was sent may still
// need MPI to be called.
constexpr std::chrono::nanoseconds kShortestIdle = std::chrono::milliseconds(5);
constexpr std::chrono::nanoseconds kLongestIdle = std::chrono::milliseconds(200);
// Those who wait for mail look this often for ranks that are gone.
constexpr auto kLookAround = std::chrono::milliseconds(200);
constexpr auto kLastMail = std::chrono::seconds(1);

int largest_tag() {
  const mpi::Calls calls;
  void* value = nullptr;
  int is_set = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &is_set);
  return is_set != 0 ? *static_cast<int*>(value) : 32767;  // what every MPI has at least
}

std::string text_of_mail(const shm::Request& request, int peer_name) {
  return fmt::format("{} of {} bytes {} {} with tag {}", request.is_send ? "send" : "recv",
                     request.bytes, request.is_send ? "to" : "from",
                     request.peer == shm::kAnyRank ? "any rank" : fmt::format("rank {}", peer_name),
                     request.tag);
}

}  // namespace

MpiRunner::MpiRunner(const EngineContext& context, std::unique_ptr<MpiTraffic> traffic)
    : rank_(context.rank),
      size_(context.size()),
      timeout_(context.timeout),
      largest_tag_(largest_tag()),
      news_(context),
      traffic_(std::move(traffic)),
      thread_([this] { work(); }) {
  hook_ = std::make_unique<mpi::FinalizeHook>([this] {
    stop(std::make_exception_ptr(
        UsageError({.rank = news_.name(rank_)},
                   "The program has called MPI_Finalize, so there is no engine \"mpi\" any more.\n"
                   "Let the world end before.")));
  });
}

MpiRunner::~MpiRunner() {
  stop(std::make_exception_ptr(std::logic_error("the engine has ended")));
  hook_.reset();
}

std::shared_ptr<shm::Request> MpiRunner::start(shm::Operation operation) {
  check(operation, news_.name(rank_), size_);
  auto request = std::make_shared<shm::Request>();
  request->operation = std::move(operation);
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  operations_.push_back(request);
  wake_.notify_one();
  return request;
}

std::shared_ptr<shm::Request> MpiRunner::send(const std::byte* memory, std::size_t bytes, int peer,
                                              int tag) {
  shm::Request request;
  request.is_send = true;
  request.memory = const_cast<std::byte*>(memory);  // only read
  request.bytes = bytes;
  request.peer = peer;
  request.tag = tag;
  return start_mail(std::move(request));
}

std::shared_ptr<shm::Request> MpiRunner::receive(std::byte* memory, std::size_t bytes, int peer,
                                                 int tag) {
  shm::Request request;
  request.memory = memory;
  request.bytes = bytes;
  request.peer = peer;
  request.tag = tag;
  return start_mail(std::move(request));
}

std::shared_ptr<shm::Request> MpiRunner::start_mail(shm::Request request) {
  const int least = request.is_send ? 0 : shm::kAnyRank;
  const bool is_rank = request.peer >= least && request.peer < size_;
  if (!is_rank || request.tag < 0 || request.tag > largest_tag_) {
    throw UsageError({.rank = news_.name(rank_), .operation = request.is_send ? "send" : "recv"},
                     fmt::format("There is no rank {} in a world of {}, or no tag {}.\n"
                                 "Give a rank from 0 to {} and a tag from 0 to {}.",
                                 request.peer, size_, request.tag, size_ - 1, largest_tag_));
  }
  request.is_mail = true;
  const auto posted = std::make_shared<shm::Request>(std::move(request));
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  mail_.push_back(posted);
  wake_.notify_one();
  return posted;
}

bool MpiRunner::poll(const shm::Request& request) {
  std::unique_lock lock(mutex_);
  if (!request.is_done && failure_) throw_failure(lock);
  return request.is_done;
}

// The thread keeps the deadline of operations, and knows who is missing; that of mail begins here.
void MpiRunner::wait(const shm::Request& request) {
  wait_until(request, request.is_mail ? Clock::now() + timeout_ : Clock::time_point::max());
}

void MpiRunner::wait(const shm::Request& request, std::chrono::milliseconds timeout) {
  wait_until(request, Clock::now() + timeout);
}

void MpiRunner::wait_until(const shm::Request& request, Clock::time_point deadline) {
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  while (true) {
    const auto next_look = std::min(deadline, Clock::now() + kLookAround);
    done_.wait_until(lock, next_look,
                     [&] { return request.is_done || request.is_abandoned || failure_; });
    if (request.is_done) return;
    if (failure_) throw_failure(lock);
    if (request.is_abandoned) throw std::runtime_error("the wait for a message was ended");
    const int peer = request.peer;
    const std::string what =
        request.is_mail ? text_of_mail(request, news_.name(peer)) : request.operation.text();
    lock.unlock();
    try {
      if (request.is_mail && peer != shm::kAnyRank && peer != rank_) {
        news_.check_processes({peer}, what);
        // What a rank sent before it left has arrived by then.
        const bool must_be_there = Clock::now() - start > kLastMail;
        news_.check_store({peer}, must_be_there ? UINT64_MAX : 0, what);
      }
      if (Clock::now() >= deadline) {
        throw TimeoutError(
            {.rank = news_.name(rank_),
             .peer = request.is_mail ? news_.name(peer) : -1,
             .operation = what.substr(0, what.find(' '))},
            fmt::format("{} waited {:.1f} s.\nCheck that the other ranks make the matching calls, "
                        "or raise JoinOptions::timeout.",
                        what, std::chrono::duration<double>(deadline - start).count()));
      }
    } catch (...) {
      fail(std::current_exception());
    }
    lock.lock();
  }
}

bool MpiRunner::abandon(shm::Request& request) {
  const std::lock_guard lock(mutex_);
  request.is_abandoned = true;
  done_.notify_all();
  return true;
}

void MpiRunner::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

// Whoever waited may use his memory again when this throws.
void MpiRunner::throw_failure(std::unique_lock<std::mutex>& lock) {
  done_.wait(lock, [&] { return has_left_; });
  std::rethrow_exception(failure_);
}

void MpiRunner::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = error;
    has_failed_ = true;
    is_over_ = true;
  }
  mpi::never_finalize();
  wake_.notify_one();
  done_.notify_all();
  news_.tell_failure(error);
}

void MpiRunner::stop(const std::exception_ptr& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = reason;
    is_over_ = true;
  }
  wake_.notify_one();
  done_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void MpiRunner::work() {
  try {
    while (const RequestPtr request = next()) {
      run(request);
      finish(request);
    }
  } catch (const Ended&) {  // NOLINT: there is nobody to tell
  } catch (const MpiProblem& problem) {
    fail(error_of(problem));
  } catch (...) {
    fail(std::current_exception());
  }
  leave();
}

std::exception_ptr MpiRunner::error_of(const MpiProblem& problem) const {
  const std::string what = problem.mail
                               ? text_of_mail(*problem.mail, news_.name(problem.mail->peer))
                           : traffic_->present ? traffic_->present->operation.text()
                                               : "waiting";
  const ErrorPlace place{.rank = news_.name(rank_),
                         .peer = news_.name(problem.peer),
                         .operation = what.substr(0, what.find(' '))};
  if (problem.has_wrong_size) {
    return std::make_exception_ptr(
        MismatchError(place, fmt::format("{} got something else: {}.\nSend and receive tensors of "
                                         "the same size and type.",
                                         what, problem.what())));
  }
  return std::make_exception_ptr(
      PeerLostError(place, fmt::format("{} failed between this rank and rank {}: {}.\n"
                                       "Look for the rank that failed first.",
                                       what, place.peer, problem.what())));
}

// The next operation; nothing at the end. Mail goes on meanwhile.
MpiRunner::RequestPtr MpiRunner::next() {
  auto start = Clock::now();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto is_needed = [&] { return is_over_ || !operations_.empty() || !mail_.empty(); };
      const std::chrono::nanoseconds waited = Clock::now() - start;
      wake_.wait_for(lock,
                     traffic_->has_mail() ? mpi::pause_after(waited)
                                          : std::clamp(waited / 8, kShortestIdle, kLongestIdle),
                     is_needed);
      if (!mail_.empty()) start = Clock::now();
      if (is_over_) return nullptr;
      if (!operations_.empty()) {
        RequestPtr request = std::move(operations_.front());
        operations_.pop_front();
        return request;
      }
    }
    post_mail();
    traffic_->move();
    deliver_mail();
  }
}

void MpiRunner::post_mail() {
  std::deque<RequestPtr> mail;
  {
    const std::lock_guard lock(mutex_);
    mail.swap(mail_);
  }
  for (RequestPtr& request : mail) traffic_->post(std::move(request));
}

void MpiRunner::deliver_mail() {
  const auto delivered = traffic_->take_delivered();
  if (delivered.empty()) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [request, peer] : delivered) {
    request->peer = peer;
    request->is_done = true;
  }
  done_.notify_all();
}

void MpiRunner::finish(const RequestPtr& request) {
  const std::lock_guard lock(mutex_);
  request->is_done = true;
  done_.notify_all();
}

// The thread's end.
void MpiRunner::leave() {
  const bool is_in_peace = traffic_->present == nullptr;
  const std::uint64_t num_done = is_in_peace ? number_ : number_ - 1;
  if (!traffic_->cancel()) {
    // MPI may still read or write this memory, whatever becomes of the engine.
    mpi::never_finalize();
    static_cast<void>(traffic_.release());  // NOLINT
  }
  bool has_failed = false;
  {
    const std::lock_guard lock(mutex_);
    has_left_ = true;
    has_failed = has_failed_;
  }
  if (traffic_ && (has_failed || !is_in_peace)) traffic_->keep_communicators();
  done_.notify_all();
  if (!has_failed) news_.tell_farewell(num_done);
}

}  // namespace lockstep
