// Gauges: what a rank is doing, in memory that its launcher reads: its step, how long that took,
// for whom it waits.
//
// The rank writes a few words in each step; nothing runs in it when somebody looks, so a rank that
// hangs, or is dead, is seen as well. Times are of the steady clock, which all processes of a host
// share. Threading: relaxed stores from any thread; each word is right by itself, several together
// may be of two moments.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/posix.h"

namespace lockstep {

inline constexpr const char* kGaugesVariable = "LOCKSTEP_GAUGES";  // where a rank finds its own

enum class Doing : std::int32_t {
  kStarting,     // it has not joined a world yet
  kComputing,    // between two backwards: forward, optimizer, whatever the program does
  kBackward,     //
  kWaiting,      // at the end of backward, for the gradients of others
  kLoading,      // for the next batch
  kSaving,       // a checkpoint
  kReForming,    // ranks of an elastic job have changed
  kWaitsToJoin,  // a replacement that the others have not taken in yet
};
const char* to_text(Doing doing);

// As one process has read them.
struct GaugeValues {
  std::uint32_t version = 0;
  Doing doing = Doing::kStarting;
  std::int32_t rank = -1;  // -1: it has not joined a world
  std::int32_t size = 0;
  std::int32_t generation = 0;
  // The wait under way, if it is longer than a moment.
  std::int32_t wait_what = 0;  // 0: none; kWaitsForMessage, or 1 + collective::Kind
  std::int32_t wait_for = -1;  // the first rank that has not come; -1: not known
  std::int32_t stepper = 0;    // which wrapped model counts steps: 1 + its number
  std::int64_t wait_since_ns = 0;
  std::int64_t steps = 0;          // synchronised backwards that are complete, of the run
  std::int64_t step_ended_ns = 0;  // the last one; 0: none has
  std::int64_t step_ns = 0;        // from the end of the one before
  std::int64_t stepping_ns = 0;    // the sum of these, in this process
  std::int64_t waited_ns = 0;      // of that, at the end of backward for the others
  std::int64_t bytes = 0;          // of gradients that were averaged, in this process
  std::int64_t samples = 0;        // that loaders have handed out, in this process
  std::int64_t loss_step = -1;     // -1: there is no loss
  double loss = 0;                 // as files and bars of lockstep/metrics.h were given it last
};
inline constexpr std::int32_t kWaitsForMessage = -1;

class Gauges {
 public:
  // Of this process, if a launcher wants to see them; else memory that nobody reads.
  static std::shared_ptr<Gauges> of_process();

  Gauges() = default;
  Gauges(const Gauges&) = delete;
  Gauges& operator=(const Gauges&) = delete;

  void set_place(int rank, int size, int generation);
  void set(Doing doing) { store(values_->doing, doing); }
  Doing doing() const { return load(values_->doing); }
  void begin_wait(std::int32_t what, std::int32_t for_rank,
                  std::chrono::steady_clock::time_point since);
  void end_wait() { store(values_->wait_what, 0); }
  // Where several models are trained, the first one counts. False: another one does.
  bool take_steps(int model);
  void leave_steps(int model);
  void end_step(std::int64_t steps, std::chrono::steady_clock::time_point now,
                std::chrono::nanoseconds waited, std::int64_t bytes);
  void add_samples(std::int64_t count) { store(values_->samples, load(values_->samples) + count); }
  void set_loss(std::int64_t step, double loss);

 private:
  explicit Gauges(GaugeValues* shared) : values_(shared) {}
  template <typename T>
  static void store(T& word, std::type_identity_t<T> value) {
    std::atomic_ref(word).store(value, std::memory_order_relaxed);
  }

  template <typename T>
  static T load(T& word) {
    return std::atomic_ref(word).load(std::memory_order_relaxed);
  }

  GaugeValues own_ = {};
  GaugeValues* const values_ = &own_;
};

// While this lives, the rank does that.
class DoingScope {
 public:
  DoingScope(Gauges& gauges, Doing doing) : gauges_(gauges), before_(gauges.doing()) {
    gauges_.set(doing);
  }
  ~DoingScope() { gauges_.set(before_); }
  DoingScope(const DoingScope&) = delete;
  DoingScope& operator=(const DoingScope&) = delete;

 private:
  Gauges& gauges_;
  const Doing before_;
};

// A wait, from show() on.
class GaugeWait {
 public:
  explicit GaugeWait(Gauges* gauges) : gauges_(gauges) {}  // null: nothing is shown
  ~GaugeWait() {
    if (is_shown_) gauges_->end_wait();
  }
  GaugeWait(const GaugeWait&) = delete;
  GaugeWait& operator=(const GaugeWait&) = delete;
  void show(std::int32_t what, std::int32_t for_rank, std::chrono::steady_clock::time_point since) {
    if (gauges_ == nullptr) return;
    gauges_->begin_wait(what, for_rank, since);
    is_shown_ = true;
  }

 private:
  Gauges* const gauges_;
  bool is_shown_ = false;
};

// The launcher's side. Throws SystemError.
Fd make_gauges();
std::string gauges_address(int fd);  // for kGaugesVariable
// Nothing if the rank has another version of lockstep, or has not begun to write.
std::optional<GaugeValues> read_gauges(int fd);

}  // namespace lockstep
