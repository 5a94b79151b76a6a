// Reducer: averages gradients across ranks while backward is still running.
//
// Invariant: buckets are posted in plan order, never in ready order, and the last one only when
// backward has ended, so every rank issues the same collectives in the same sequence whatever its
// graph (docs/architecture.md, "Life of a step"). Threading: on_gradient() and end_backward() run
// on the thread of backward; mutex_ guards all state.
#pragma once

#include <lockstep/ddp.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ddp/bucket.h"

namespace lockstep {

// What a model is made of, asked again when it matters: programs change their models.
struct ModelView {
  std::function<std::vector<NamedTensor>()> parameters;  // each tensor once
  std::function<std::vector<NamedTensor>()> buffers;
};

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
  using Clock = std::chrono::steady_clock;

  // What the backward under way is. kIdle: there is none.
  enum class Phase { kIdle, kLocal, kSynchronised };

  // Numbers that travel with the last bucket; after the reduction, more than 0 if any rank gave 1.
  // Then follow, by rank, whether it has data and its step's time, and, by slot, who has a
  // gradient.
  enum Control : std::int64_t {
    kProblem,
    kWeighted,
    kLate,
    kNeedsState,
    kStop,
    kDiffers,
    kNumFlags
  };
  std::int64_t active_at(int rank) const { return kNumFlags + rank; }
  std::int64_t time_at(int rank) const { return kNumFlags + world_.size() + rank; }
  std::int64_t present_at(std::size_t slot) const {
    return kNumFlags + 2 * world_.size() + static_cast<std::int64_t>(slot);
  }
  std::int64_t num_control() const { return present_at(slots_.size()); }

  bool is_alone() const { return world_.size() == 1 && !options_.hook; }

  // reducer.cpp: while backward runs.
  void add_slots(std::vector<std::string> sparse);
  void on_gradient(std::size_t index);
  void begin_backward(bool is_in_engine);
  void end_backward();
  void abandon();
  void start_step();
  bool move_in(Slot& slot);
  void post_ready(bool is_end);
  void post(Bucket& bucket);
  void poll();
  c10::intrusive_ptr<c10d::Work> start_mean(const at::Tensor& tensor);
  void note_problem(const std::string& problem);

  // changes.cpp: whether the model is still the one that was wrapped.
  static std::uint64_t fingerprint_of(const at::Tensor& tensor);
  std::string find_change();
  std::string find_addition();

  // finish.cpp: when it has ended.
  void finish();
  void wait_for_all();
  void write_control();
  void read_control();
  void throw_problems();
  void add_late();
  void scale_by_weights();
  void look_at_first_gradients();
  void reduce_sparse(std::size_t index);
  void hand_out_gradients();
  void sync_buffers();
  void learn_order();
  void take_state_from(int root);
  std::vector<NamedTensor> state() const;
  void write_stats(Clock::time_point finish_began, Clock::time_point all_done);
  [[noreturn]] void explain(std::exception_ptr error, const std::string& what);
  std::string text_of(const Bucket& bucket) const;
  void reset();

  // Constant after construction.
  World world_;  // an engine of its own: other collectives do not mix with the reducer's
  DdpOptions options_;
  ModelView model_;
  HookComm hook_comm_;
  std::vector<NamedTensor> frozen_;  // parameters that required no gradient
  bool has_buffers_ = false;         // walking a module takes longer than a small step may
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  // What the parameters' hooks call; they stay with the parameters, this goes with the reducer.
  std::shared_ptr<Reducer*> hook_target_ = std::make_shared<Reducer*>(this);

  // Guarded by mutex_.
  mutable std::recursive_mutex mutex_;  // a comm hook may ask for stats()
  std::vector<Slot> slots_;
  Buckets buckets_;
  Phase phase_ = Phase::kIdle;
  std::weak_ptr<int> task_;  // lives as long as autograd's record of the backward under way
  std::thread::id thread_;
  std::string problem_;  // of this rank; told to all at the end of backward
  std::size_t num_posted_ = 0;
  std::size_t num_completed_ = 0;
  c10::intrusive_ptr<c10d::Work> control_work_;
  std::vector<float> control_;  // as written, then as reduced
  double weight_ = 1;
  double scale_ = 1;  // of the reduced gradients, from the weights of all ranks
  int accumulate_ = 1;
  int num_local_ = 0;  // local backwards since the last synchronised one
  std::int64_t num_backwards_ = 0;
  bool is_joined_ = false;
  bool needs_state_ = false;
  std::function<bool()> is_asked_to_stop_;
  bool must_stop_ = false;      // as all ranks agreed in the last step
  at::Tensor first_gradients_;  // this rank's own, of the first bucket of the first step
  bool differs_ = true;         // whether they were other than the mean
  int num_active_ = 0;
  int first_active_ = 0;
  std::vector<std::size_t> ready_order_;  // of the first step
  std::vector<std::size_t> next_order_;   // agreed, to be used from the next backward on
  bool has_learnt_order_ = false;
  int epoch_ = 0;
  bool has_warned_of_graph_ = false;
  DdpStats stats_;
  std::int64_t bytes_sent_ = 0;
  Clock::time_point last_end_ = Clock::now();
  Clock::time_point backward_began_;
  std::optional<Clock::time_point> first_posted_;
};

}  // namespace lockstep
