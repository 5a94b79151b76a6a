// Reducer: averages gradients across ranks while backward is still running.
//
// Invariant: buckets are posted in plan order, never in ready order, and the last one only when
// backward has ended, so every rank issues the same collectives in the same sequence whatever its
// graph (docs/architecture.md, "Life of a step"). Threading: on_gradient() and end_backward() run
// on the thread of backward; mutex_ guards all state.
#pragma once

#include <lockstep/ddp.h>

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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

  void backward(const at::Tensor& loss);
  NoSync no_sync() { return NoSync(no_sync_depth_); }
  void accumulate(int k);
  void set_weight(double samples);
  void join(const std::function<void()>& step);
  void check_replicas();
  int num_pending() const;
  void stop_when(std::function<bool()> is_asked);
  bool must_stop() const;
  DdpStats stats() const;

 private:
  // What the backward under way is. kIdle: there is none.
  enum class Phase { kIdle, kLocal, kSynchronised };

  // The backward under way.
  struct Step {
    Phase phase = Phase::kIdle;
    std::weak_ptr<int> task = {};  // lives as long as autograd's record of the backward
    std::thread::id thread = {};
    std::string problem = {};  // of this rank; told to all at the end of backward
    std::size_t num_posted = 0;
    std::size_t num_completed = 0;
    c10::intrusive_ptr<c10d::Work> numbers_work = {};  // where they travel on their own
    double scale = 1;  // of the reduced gradients, from the weights of all ranks
  };

  bool is_alone() const { return world_.size() == 1 && !options_.hook; }

  // reducer.cpp: while backward runs.
  void add_slots(std::vector<std::string> sparse);
  void on_gradient(std::size_t index);
  void begin_backward(bool is_in_engine);
  void begin_step(Phase phase);
  void lay_out_buckets();
  void end_backward();
  void abandon();
  bool move_in(Slot& slot);
  void post_ready(bool is_end);
  void post(Bucket& bucket);
  void poll();
  c10::intrusive_ptr<c10d::Work> start_mean(const at::Tensor& tensor);
  void note_problem(const std::string& problem);

  // finish.cpp: when it has ended.
  void finish();
  void end_step();
  void drop_step();
  void wait_for_all();
  void write_numbers();
  void throw_problems();
  void add_late();
  void scale_by_weights();
  void hand_out_gradients();
  void sync_buffers();
  void take_state_from(int root);
  std::vector<NamedTensor> state() const;
  [[noreturn]] void explain(std::exception_ptr error, const std::string& what);
  std::string text_of(const Bucket& bucket) const;

  // Constant after construction.
  World world_;  // an engine of its own: other collectives do not mix with the reducer's
  DdpOptions options_;
  HookComm hook_comm_;
  bool has_buffers_ = false;  // walking a module takes longer than a small step may
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  // What the parameters' hooks call; they stay with the parameters, this goes with the reducer.
  std::shared_ptr<Reducer*> hook_target_ = std::make_shared<Reducer*>(this);

  // Guarded by mutex_.
  mutable std::recursive_mutex mutex_;  // a comm hook may ask for stats()
  ModelWatch watch_;
  std::vector<Slot> slots_;
  Buckets buckets_;
  ReadyOrder order_;
  StepNumbers numbers_;
  StepStats stats_;
  FirstGradients first_gradients_;
  Step step_;
  int epoch_ = 0;  // how often buckets were laid out
  double weight_ = 1;
  int accumulate_ = 1;
  int num_local_ = 0;  // local backwards since the last synchronised one
  std::int64_t num_backwards_ = 0;
  bool is_joined_ = false;
  bool needs_state_ = false;
  std::function<bool()> is_asked_to_stop_;
  bool must_stop_ = false;  // as all ranks agreed in the last step
  bool has_warned_of_graph_ = false;
};

}  // namespace lockstep
