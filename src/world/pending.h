// What a Pending holds: the works of one call, and how they become its result.
//
// Invariant: works are waited for once, and the result is made once.
// Threading: one thread at a time; a thread that waits for works shares a Waiter with it, and
// nothing else, as it may outlive it.
#pragma once

#include <lockstep/pending.h>
#include <lockstep/world.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "world/unfinished.h"

namespace lockstep {

// A work of the engine, and where its tensors are.
struct StartedWork {
  c10::intrusive_ptr<c10d::Work> work;
  at::DeviceType device = at::kCPU;
};

struct Pending::State {
 public:
  using Works = std::vector<StartedWork>;

  struct Call {
    const char* operation;
    at::Tensor subject;
    Works works;
    std::function<at::Tensor()> finish;
  };
  // `timeout` is the engine's, and `unfinished` takes works on devices at the end.
  State(World world, Call call, std::chrono::milliseconds timeout,
        std::shared_ptr<UnfinishedWorks> unfinished);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  bool is_done();
  using Limit = std::optional<std::chrono::milliseconds>;
  // Without a limit, and once the timeout has passed, only the engine's own deadline counts.
  void wait(Limit limit);
  at::Tensor result();

 private:
  using Clock = std::chrono::steady_clock;
  void wait_for_works();
  bool is_done_before(Clock::time_point deadline);
  void keep_unfinished();
  void sleep_in_works(std::chrono::milliseconds limit) const;
  [[noreturn]] void throw_late(std::chrono::milliseconds limit) const;
  void let_go() noexcept;
  void keep_in_thread();

  // What a thread that waits for the works has found.
  struct Waiter {
    explicit Waiter(Works its_works) : works(std::move(its_works)) {}
    static void start(const std::shared_ptr<Waiter>& waiter);
    void run() noexcept LOCKSTEP_EXCLUDES(mutex);
    bool has_ended() LOCKSTEP_EXCLUDES(mutex);
    void wait() LOCKSTEP_EXCLUDES(mutex);  // until then; throws what went wrong

    const Works works;
    Mutex mutex;
    Condition changed;
    bool is_over LOCKSTEP_GUARDED_BY(mutex) = false;
    std::exception_ptr error LOCKSTEP_GUARDED_BY(mutex);
  };

  // Constant after construction.
  const World world_;  // before the works, so that the engine goes after them
  const char* const operation_;
  const at::Tensor subject_;
  const Works works_;
  const bool are_ours_;  // of an engine of lockstep's, whose waits may end early and begin again
  // The engine's, as if it had been waited for at once. None on a device: there, waits keep none.
  const Clock::time_point timeout_at_;
  const std::shared_ptr<UnfinishedWorks> unfinished_;

  std::function<at::Tensor()> finish_;
  at::Tensor result_;
  std::exception_ptr error_;
  bool is_over_ = false;  // result_ or error_ is there

  std::shared_ptr<Waiter> waiter_;  // if one was needed
};

// Throws what has failed on a device after the wait for it had returned.
void throw_late_failure(const World& world, UnfinishedWorks& unfinished);

// "Float[3, 4], 48 bytes"
std::string describe_tensor(const at::Tensor& tensor);

}  // namespace lockstep
