// Reducer: averages gradients across ranks while backward is still running.
//
// Invariant: buckets are posted in plan order, never in ready order, and the last one only when
// backward has ended, so every rank issues the same collectives in the same sequence whatever its
// graph (docs/architecture.md, "Life of a step"). Threading: on_gradient() and end_backward() run
// on the thread of backward; mutex_ guards all state.
#pragma once

#include <lockstep/ddp.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "ddp/bucket.h"
#include "ddp/first_gradients.h"
#include "ddp/model_watch.h"
#include "ddp/ready_order.h"
#include "ddp/step_numbers.h"
#include "ddp/step_stats.h"

namespace lockstep {

class Reducer {
 public:
  // Collective.
  Reducer(ModelView model, std::vector<std::string> sparse, World world, DdpOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void backward(const at::Tensor& loss, const at::Tensor& gradient,
                std::optional<bool> retain_graph, bool create_graph);
  NoSync no_sync() { return NoSync(no_sync_depth_); }
  void accumulate(int k);
  void discard();
  void set_weight(double samples);
  void join(const std::function<void()>& step);
  void check_replicas();
  int num_pending() const;
  void stop_when(std::function<bool()> is_asked);
  bool must_stop() const;
  DdpStats stats() const;
  HookState hook_state() const;
  void check_hook_state(const HookState& state) const;
  void load_hook_state(const HookState& state);
  // Of the reducer that this one replaces.
  void take_settings_from(Reducer& before);

 private:
  // What the backward under way is. kIdle: there is none.
  enum class Phase { kIdle, kLocal, kSynchronised };

  // The backward under way.
  struct Step {
    Phase phase = Phase::kIdle;
    std::weak_ptr<int> task = {};  // lives as long as autograd's record of the backward
    std::thread::id thread = {};
    int graph = -1;            // autograd's number of it, the same on all threads of a backward
    std::string problem = {};  // of this rank; told to all at the end of backward
    double weight = 1;         // of this rank
    double factor = 1;         // of this rank's gradients before they are averaged
    at::Tensor weights = {};   // the sums over ranks, if they go ahead: of weights, of who has one
    c10::intrusive_ptr<c10d::Work> weights_work = {};
    bool is_at_end = false;  // everything is posted
    StepStats::Clock::time_point wait_began = {};
    std::size_t num_posted = 0;
    std::size_t num_completed = 0;
    c10::intrusive_ptr<c10d::Work> numbers_work = {};  // where they travel on their own
    double scale = 1;  // of the reduced gradients, from the weights of all ranks
  };

  // For errors.
  std::string operation() const {
    return options_.name.empty() ? "backward" : "backward of " + options_.name;
  }
  bool is_alone() const { return world_.size() == 1 && !options_.hook && !options_.check_finite; }

  // reducer.cpp: while backward runs.
  void add_slots(std::vector<std::string> sparse) LOCKSTEP_REQUIRES(mutex_);
  void on_gradient(std::size_t index);
  void begin_backward(bool is_in_engine) LOCKSTEP_REQUIRES(mutex_);
  void begin_step(Phase phase) LOCKSTEP_REQUIRES(mutex_);
  void lay_out_buckets() LOCKSTEP_REQUIRES(mutex_);
  void send_weight_ahead() LOCKSTEP_REQUIRES(mutex_);
  void take_weights() LOCKSTEP_REQUIRES(mutex_);
  void end_backward();
  static void finish_all(std::vector<Reducer*> reducers);
  void abandon() LOCKSTEP_REQUIRES(mutex_);
  bool move_in(Slot& slot) LOCKSTEP_REQUIRES(mutex_);
  void check_finite(const Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void post_ready(bool is_end) LOCKSTEP_REQUIRES(mutex_);
  void post(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void poll() LOCKSTEP_REQUIRES(mutex_);
  c10::intrusive_ptr<c10d::Work> start_mean(const at::Tensor& tensor) LOCKSTEP_REQUIRES(mutex_);
  void note_problem(const std::string& problem) LOCKSTEP_REQUIRES(mutex_);

  // finish.cpp: when it has ended. (calls.cpp has what programs call between backwards.)
  void post_rest() LOCKSTEP_REQUIRES(mutex_);
  void finish() LOCKSTEP_REQUIRES(mutex_);
  bool is_check_due() const LOCKSTEP_REQUIRES(mutex_);
  void end_step() LOCKSTEP_REQUIRES(mutex_);
  void drop_step() LOCKSTEP_REQUIRES(mutex_);
  void wait_for_all() LOCKSTEP_REQUIRES(mutex_);
  void write_numbers() LOCKSTEP_REQUIRES(mutex_);
  void throw_problems() LOCKSTEP_REQUIRES(mutex_);
  void add_late() LOCKSTEP_REQUIRES(mutex_);
  void scale_by_weights() LOCKSTEP_REQUIRES(mutex_);
  void hand_out_gradients() LOCKSTEP_REQUIRES(mutex_);
  void sync_buffers() LOCKSTEP_REQUIRES(mutex_);
  void take_state_from(int root) LOCKSTEP_REQUIRES(mutex_);
  std::vector<NamedTensor> state() const LOCKSTEP_REQUIRES(mutex_);
  [[noreturn]] void explain(std::exception_ptr error, const std::string& what)
      LOCKSTEP_REQUIRES(mutex_);
  std::string text_of(const Bucket& bucket) const LOCKSTEP_REQUIRES(mutex_);

  // Constant after construction.
  const int number_;  // in the order of construction, which is the same on all ranks
  World world_;       // an engine of its own: other collectives do not mix with the reducer's
  DdpOptions options_;
  HookComm hook_comm_;
  // Weights are known to all before a bucket is posted: a hook that keeps what it did not send
  // needs shares of the whole, which do not depend on the units of weights, and so does the range
  // of f16.
  bool weighs_first_ = false;
  bool has_buffers_ = false;  // walking a module takes longer than a small step may
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  // What the parameters' hooks call; they stay with the parameters, this goes with the reducer.
  std::shared_ptr<Reducer*> hook_target_ = std::make_shared<Reducer*>(this);

  mutable RecursiveMutex mutex_;  // a comm hook may ask for stats()
  ModelWatch watch_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Slot> slots_ LOCKSTEP_GUARDED_BY(mutex_);
  Buckets buckets_ LOCKSTEP_GUARDED_BY(mutex_);
  ReadyOrder order_ LOCKSTEP_GUARDED_BY(mutex_);
  StepNumbers numbers_ LOCKSTEP_GUARDED_BY(mutex_);
  StepStats stats_ LOCKSTEP_GUARDED_BY(mutex_);
  FirstGradients first_gradients_ LOCKSTEP_GUARDED_BY(mutex_);
  Step step_ LOCKSTEP_GUARDED_BY(mutex_);
  int epoch_ LOCKSTEP_GUARDED_BY(mutex_) = 0;      // how often buckets were laid out
  double weight_ LOCKSTEP_GUARDED_BY(mutex_) = 1;  // of the next step
  int accumulate_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
  // Local backwards since the last synchronised one.
  int num_local_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::int64_t num_backwards_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool is_joined_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool needs_state_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::function<bool()> is_asked_to_stop_ LOCKSTEP_GUARDED_BY(mutex_);
  bool must_stop_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // as all ranks agreed in the last step
  bool has_warned_of_graph_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
