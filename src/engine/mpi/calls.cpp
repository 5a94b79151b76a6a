#include "engine/mpi/calls.h"

#include <lockstep/error.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/text.h"

namespace lockstep::mpi {
namespace {

std::mutex calls_mutex;
std::atomic<bool> may_finalize{true};

void finalize_at_exit() {
  if (is_running() && may_finalize) MPI_Finalize();
}

}  // namespace

Calls::Calls() : lock_(calls_mutex) {}

void initialize(int rank) {
  const Calls calls;
  const auto refuse = [&](const std::string& message) {
    throw UsageError({.rank = rank, .operation = "join"}, message);
  };
  int flag = 0;
  MPI_Finalized(&flag);
  if (flag != 0) {
    refuse(
        "MPI has been finalised in this process, and cannot be started twice.\n"
        "Join before MPI_Finalize.");
  }
  int level = MPI_THREAD_SINGLE;
  MPI_Initialized(&flag);
  if (flag != 0) {
    MPI_Query_thread(&level);
  } else {
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS) {
      refuse("MPI_Init_thread failed.\nStart the program with mpirun, or choose another engine.");
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    std::atexit(finalize_at_exit);
  }
  if (level < MPI_THREAD_SERIALIZED) {
    refuse(
        "The engine \"mpi\" calls MPI from a thread of its own, and MPI was initialised without "
        "threads.\nCall MPI_Init_thread with MPI_THREAD_MULTIPLE instead of MPI_Init, or leave it "
        "to lockstep.");
  }
}

bool is_running() {
  int is_initialized = 0;
  int is_finalized = 0;
  MPI_Initialized(&is_initialized);
  MPI_Finalized(&is_finalized);
  return is_initialized != 0 && is_finalized == 0;
}

void never_finalize() noexcept { may_finalize = false; }

std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    return text::format("error {}", code);
  }
  return {text.data(), static_cast<std::size_t>(length)};
}

Communicator::Communicator(MPI_Comm handle) : handle_(handle) {
  MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN);
}
Communicator::Communicator(Communicator&& other) noexcept
    : handle_(std::exchange(other.handle_, MPI_COMM_NULL)) {}
Communicator& Communicator::operator=(Communicator&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Communicator::~Communicator() {
  const Calls calls;
  if (handle_ != MPI_COMM_NULL && is_running()) MPI_Comm_free(&handle_);
}

int Communicator::rank() const {
  int rank = 0;
  MPI_Comm_rank(handle_, &rank);
  return rank;
}
int Communicator::size() const {
  int size = 0;
  MPI_Comm_size(handle_, &size);
  return size;
}

ErrorsReturn::ErrorsReturn(MPI_Comm communicator) : communicator_(communicator) {
  MPI_Comm_get_errhandler(communicator_, &before_);
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
}
ErrorsReturn::~ErrorsReturn() {
  MPI_Comm_set_errhandler(communicator_, before_);
  MPI_Errhandler_free(&before_);
}

void wait(MPI_Request request, std::chrono::milliseconds timeout, int rank,
          const std::string& what) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    int is_done = 0;
    {
      const Calls calls;
      const int code = MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS) {
        throw PeerLostError({.rank = rank, .operation = "join"},
                            text::format("{} failed: {}.\nLook for the rank that failed first.",
                                         what, text_of(code)));
      }
    }
    if (is_done != 0) return;
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > timeout) {
      never_finalize();
      throw TimeoutError({.rank = rank, .operation = "join"},
                         text::format("{} waited {:.1f} s for other ranks.\nCheck that all ranks "
                                      "make this call, or raise JoinOptions::join_timeout.",
                                      what, std::chrono::duration<double>(timeout).count()));
    }
    sleep(pause_after(waited));
  }
}

FinalizeHook::FinalizeHook(std::function<void()> before) : before_(std::move(before)) {
  const Calls calls;
  // MPI_Finalize deletes what is attached to MPI_COMM_SELF before it does anything else.
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_delete, &key_, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, key_, this);
}

FinalizeHook::~FinalizeHook() {
  before_ = nullptr;
  const Calls calls;
  if (key_ == MPI_KEYVAL_INVALID || !is_running()) return;
  MPI_Comm_delete_attr(MPI_COMM_SELF, key_);
  MPI_Comm_free_keyval(&key_);
}

int FinalizeHook::on_delete(MPI_Comm, int, void* hook, void*) {
  auto* self = static_cast<FinalizeHook*>(hook);
  if (self->before_) {
    self->key_ = MPI_KEYVAL_INVALID;  // it is being deleted
    self->before_();
  }
  return MPI_SUCCESS;
}

std::chrono::nanoseconds pause_after(std::chrono::nanoseconds waited) {
  using std::chrono::microseconds;
  if (waited < microseconds(50)) return {};
  // A look takes 25 us or so: 1 or 2 % of a core.
  return std::min<std::chrono::nanoseconds>(waited / 16, microseconds(2000));
}

void sleep(std::chrono::nanoseconds pause) {
  if (pause.count() == 0) {
    ::sched_yield();
  } else {
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace lockstep::mpi
