// MPI in this process: who starts and ends it, when it may be called, communicators, errors.
//
// Invariant: whoever has initialised MPI finalises it. lockstep's communicators return errors,
// which become exceptions; nothing here aborts. MPI is one for the process, and so are its mutex
// and its end: the only such state in lockstep. Threading: any thread may call.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>

namespace lockstep::mpi {

// While it lives, no other thread of lockstep calls MPI: MPI_THREAD_SERIALIZED is enough.
class Calls {
 public:
  Calls();

 private:
  std::lock_guard<std::mutex> lock_;
};

// Initialises MPI, unless it is; then it is finalised when the process exits.
// Throws UsageError if MPI allows too few threads, or has ended.
void initialize(int rank);

// Between MPI_Init and MPI_Finalize.
bool is_running();

// From now on lockstep leaves MPI as it is when the process exits: MPI_Finalize would wait for
// ranks that may never come. The launcher sees that something went wrong, and ends the job.
void never_finalize() noexcept;

// "MPI_ERR_TRUNCATE: message truncated"
std::string text_of(int code);

// Owns a communicator whose errors return.
class Communicator {
 public:
  Communicator() = default;
  explicit Communicator(MPI_Comm handle);
  Communicator(Communicator&& other) noexcept;
  Communicator& operator=(Communicator&& other) noexcept;
  ~Communicator();

  MPI_Comm get() const { return handle_; }
  int rank() const;
  int size() const;
  // Leaves it to MPI: others may still send there, and a later communicator must not get that.
  void release() noexcept { handle_ = MPI_COMM_NULL; }

 private:
  MPI_Comm handle_ = MPI_COMM_NULL;
};

// While it lives, errors on a communicator of others return.
class ErrorsReturn {
 public:
  explicit ErrorsReturn(MPI_Comm communicator);
  ~ErrorsReturn();
  ErrorsReturn(const ErrorsReturn&) = delete;
  ErrorsReturn& operator=(const ErrorsReturn&) = delete;

 private:
  MPI_Comm communicator_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

// Waits for a request of this thread's own: looks often at first, then ever more rarely.
// Throws TimeoutError that names `what` at the deadline, PeerLostError if MPI fails.
void wait(MPI_Request request, std::chrono::milliseconds timeout, int rank,
          const std::string& what);

// Calls `before` when MPI_Finalize is called, in there, while MPI can still be used.
class FinalizeHook {
 public:
  explicit FinalizeHook(std::function<void()> before);
  ~FinalizeHook();
  FinalizeHook(const FinalizeHook&) = delete;
  FinalizeHook& operator=(const FinalizeHook&) = delete;

 private:
  static int on_delete(MPI_Comm, int, void* hook, void*);

  std::function<void()> before_;
  int key_ = MPI_KEYVAL_INVALID;
};

// How long to pause between two looks, after having waited so long: nothing at first, so that a
// short wait stays short, then a fraction of it, so that computing threads keep their cores.
std::chrono::nanoseconds pause_after(std::chrono::nanoseconds waited);
void sleep(std::chrono::nanoseconds pause);  // nothing: lets others run

}  // namespace lockstep::mpi
