// Reducer: averages gradients across ranks while backward is still running.
//
// Invariant: buckets are posted in plan order, never in ready order, and the last one only when
// backward has ended, so every rank issues the same collectives in the same sequence whatever its
// graph (docs/architecture.md, "Life of a step"). Threading: on_gradient() runs on autograd's
// threads, one for each device, end_backward() on the thread that called backward(); mutex_ guards
// all state.
#pragma once

#include <lockstep/ddp.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/gauges.h"
#include "base/mutex.h"
#include "ddp/bucket.h"
#include "ddp/first_gradients.h"
#include "ddp/hash_log.h"
#include "ddp/model_watch.h"
#include "ddp/ready_order.h"
#include "ddp/shards.h"
#include "ddp/slices.h"
#include "ddp/step_numbers.h"
#include "ddp/step_stats.h"
#include "ddp/streams.h"
#include "ddp/turns.h"
#include "world/unfinished.h"

namespace lockstep {

class Reducer {
 public:
  // Collective. `are_equal`: the replicas are, so that nobody is sent anything.
  Reducer(ModelView model, std::vector<std::string> sparse, World world, DdpOptions options,
          bool are_equal = false);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void backward(const at::Tensor& loss, const at::Tensor& gradient,
                std::optional<bool> retain_graph, bool create_graph);
  NoSync no_sync() { return NoSync(no_sync_depth_); }
  void accumulate(int k);
  void discard();
  void set_weight(double samples);
  Turn play();
  using LogicalState = DistributedDataParallel::LogicalState;
  LogicalState logical_state() const;
  void check_logical_state(const LogicalState& state) const;
  void load_logical_state(const LogicalState& state);
  bool skip(const UnevenOptions& options);
  // Whether its steps are those of several players, ranks or logical ranks.
  bool is_distributed() const { return world_.logical_size() > 1; }
  // Plays out the steps of ranks that have data, of all these models, until all ranks are here.
  static void join(const std::vector<Reducer*>& reducers, const std::function<void()>& step,
                   const UnevenOptions& options);
  void check_replicas();
  bool has_unused_gradients() const LOCKSTEP_EXCLUDES(mutex_);
  std::vector<NamedTensor> full_gradients() const;
  void change_parameters(const std::function<void()>& change);
  int num_pending() const;
  void stop_when(std::function<bool()> is_asked);
  bool must_stop() const;
  DdpStats stats() const;
  HookState hook_state() const;
  void check_hook_state(const HookState& state) const;
  void load_hook_state(const HookState& state);
  // Of the reducer that this one replaces.
  void take_settings_from(Reducer& before);

  // Of an elastic job. `is_asked` is called in every synchronised backward; must_reform() says
  // whether it was true on any rank in the last one. `has_ended` is called at each gradient: a rank
  // is lost, so that the step cannot end.
  void reform_when(std::function<bool()> is_asked, std::function<bool()> has_ended);
  bool must_reform() const;
  // What the reducer of the next generation goes on with.
  struct Settings {
    int accumulate = 1;
    std::function<bool()> is_asked_to_stop = {};
    std::function<bool()> is_asked_to_reform = {};
    std::function<bool()> has_ended = {};
    int epoch = 0;
    bool is_torn = false;
  };
  Settings settings() const;
  std::int64_t num_steps() const;  // synchronised backwards of the run
  void set_num_steps(std::int64_t steps);
  void take(const Settings& settings);
  // A step that is not complete is given up: buffers are those that it began with, gradients are
  // gone. `num_complete`: steps of the run; the backward of the next one may be finished. Not
  // collective.
  // Returns whether anything of that step was done.
  bool give_up(std::int64_t num_complete);
  bool is_to_share() const { return options_.shard != Shard::kNone; }
  // What replicas must have in common, a line each.
  std::vector<std::string> describe() const;

 private:
  // What the backward under way is. kIdle: there is none.
  enum class Phase { kIdle, kLocal, kSynchronised };
  // How far buckets are posted: to the first whose gradients are missing, or that must wait for its
  // place, or to the end.
  enum class Until { kNotReady, kFirstWait, kEnd };

  // The backward under way.
  struct Step {
    Phase phase = Phase::kIdle;
    std::weak_ptr<int> task = {};  // lives as long as autograd's record of the backward
    std::thread::id thread = {};
    int graph = -1;            // autograd's number of it, the same on all threads of a backward
    std::string problem = {};  // of this rank; told to all at the end of backward
    ErrorKind kind_of_problem = ErrorKind::kUsage;
    double weight = 1;                         // of this rank
    double factor = 1;                         // of this rank's gradients before they are averaged
    bool is_own = false;                       // gradients stay each rank's own: the hook says so
    std::optional<World> part = std::nullopt;  // that shares gradients, if the hook names one
    at::Tensor weights = {};  // the sums over ranks, if they go ahead: of weights, of who has one
    c10::intrusive_ptr<c10d::Work> weights_work = {};
    bool is_at_end = false;  // backward has ended
    bool is_all_posted = false;
    bool is_followed = false;    // by another model of the same backward
    bool is_of_join = false;     // begun by join(), not by a backward
    bool ends_turn = false;      // a local backward, the last of its logical rank
    bool waits_no_more = false;  // Shard::kGradients: for a place in the middle of backward
    bool is_broken = false;      // a device's engine did not take all collectives
    StepStats::Clock::time_point wait_began = {};
    std::size_t num_posted = 0;
    std::size_t num_completed = 0;
    std::size_t bytes_exchanged = 0;  // logical ranks: of buckets posted
    std::size_t num_stepped = 0;  // buckets whose parameters are updated (DdpOptions::optimizer)
    c10::intrusive_ptr<c10d::Work> numbers_work = {};  // where they travel on their own
    double scale = 1;  // of the reduced gradients, from the weights of all ranks
  };

  // For errors.
  std::string operation() const {
    return options_.name.empty() ? "backward" : "backward of " + options_.name;
  }
  // The ranks that average the gradients of this step.
  const World& sharers() const LOCKSTEP_REQUIRES(mutex_) {
    return step_.part ? *step_.part : world_;
  }
  bool is_alone() const {
    return world_.size() == 1 && !world_.has_logical_ranks() && !options_.hook &&
           !options_.reduce_type && !options_.check_finite && options_.optimizer == nullptr &&
           !hash_log_;
  }

  // calls.cpp: the rounds of join().
  void enter_join(bool needs_state, const UnevenOptions& options);
  double weight_without_data() const LOCKSTEP_REQUIRES(mutex_);
  void begin_round();
  bool finish_round();     // whether any rank had data
  bool may_go_on() const;  // without data in the last round
  static bool is_followed(std::vector<Reducer*>::const_iterator one,
                          std::vector<Reducer*>::const_iterator end);
  void leave_join();

  // reducer.cpp: while backward runs.
  void add_slots(std::vector<std::string> sparse) LOCKSTEP_REQUIRES(mutex_);
  void on_gradient(std::size_t index);
  void begin_backward(bool is_in_engine) LOCKSTEP_REQUIRES(mutex_);
  void begin_step(Phase phase) LOCKSTEP_REQUIRES(mutex_);
  void lay_out_buckets() LOCKSTEP_REQUIRES(mutex_);
  void end_backward();
  static void finish_all(std::vector<Reducer*> reducers, bool are_followed);
  void abandon() LOCKSTEP_REQUIRES(mutex_);

  // post.cpp: gradients are moved into buckets, and those are sent.
  void send_weight_ahead() LOCKSTEP_REQUIRES(mutex_);
  void take_weights() LOCKSTEP_REQUIRES(mutex_);
  bool move_in(Slot& slot) LOCKSTEP_REQUIRES(mutex_);
  void post_ready(Until until) LOCKSTEP_REQUIRES(mutex_);
  void post(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void check_finite(const Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  static std::string text_of_not_finite(const Slot& slot);
  static c10::intrusive_ptr<c10d::Work> start_mean(const at::Tensor& tensor, const World& world,
                                                   c10d::ReduceOp op = c10d::ReduceOp::AVG);
  c10::intrusive_ptr<c10d::Work> start_mean_of(const Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void poll() LOCKSTEP_REQUIRES(mutex_);

  bool is_dense(const Slot& slot) LOCKSTEP_REQUIRES(mutex_);

  // logical.cpp: the turns of logical ranks.
  void check_logical() LOCKSTEP_REQUIRES(mutex_);
  int pending() const LOCKSTEP_REQUIRES(mutex_) { return turns_.turn() * accumulate_ + num_local_; }
  void drop_old_gradients() LOCKSTEP_REQUIRES(mutex_);
  void check_turn() LOCKSTEP_REQUIRES(mutex_);
  void note_late_turn(const Slot& slot) LOCKSTEP_REQUIRES(mutex_);
  void begin_turn() LOCKSTEP_REQUIRES(mutex_);
  void end_turn() LOCKSTEP_REQUIRES(mutex_);
  void play_without_data() LOCKSTEP_REQUIRES(mutex_);
  void add_turns(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void start_exchange(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void post_exchange(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void finish_exchange(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  int rank_with_data() const LOCKSTEP_REQUIRES(mutex_) {
    return turns_.are_on() ? turns_.mean().holder_of(numbers_.first_active())
                           : numbers_.first_active();
  }
  double total_weight() LOCKSTEP_REQUIRES(mutex_);

  // sharded_post.cpp: DdpOptions::shard.
  bool shares_gradients() const LOCKSTEP_REQUIRES(mutex_) {
    return (shards_ || is_sliced_) && options_.shard == Shard::kGradients;
  }
  Sharing* sharing() const LOCKSTEP_REQUIRES(mutex_) {
    return shards_ ? static_cast<Sharing*>(shards_.get()) : slices_.get();
  }
  void check_shard() LOCKSTEP_REQUIRES(mutex_);
  bool is_too_small_to_share() const LOCKSTEP_REQUIRES(mutex_);
  void share_memory() LOCKSTEP_REQUIRES(mutex_);
  bool has_devices() const LOCKSTEP_REQUIRES(mutex_);
  void cut_slices() LOCKSTEP_REQUIRES(mutex_);
  static void leave_slices(const std::vector<NamedTensor>& parameters);
  std::vector<NamedTensor> trained() const LOCKSTEP_REQUIRES(mutex_);
  void unshare() LOCKSTEP_REQUIRES(mutex_);
  void note_misuse_of_shards() LOCKSTEP_REQUIRES(mutex_);
  bool keep_own(Slot& slot) LOCKSTEP_REQUIRES(mutex_);
  bool has_place(const Bucket& bucket, Until until) LOCKSTEP_REQUIRES(mutex_);
  bool wait_for_place(c10d::Work& before) LOCKSTEP_REQUIRES(mutex_);
  void copy_in(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  c10::intrusive_ptr<c10d::Work> start_shared_mean(const Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void take_out(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  at::Tensor my_part(const at::Tensor& flat) const LOCKSTEP_REQUIRES(mutex_);
  at::Tensor my_means(const Bucket& bucket) const LOCKSTEP_REQUIRES(mutex_) {
    return is_sliced_ ? bucket.flat : my_part(bucket.flat);
  }
  static at::Tensor flat_of(const Slot& slot, const at::Tensor& gradient);
  void hand_out_shared() LOCKSTEP_REQUIRES(mutex_);

  // finish.cpp: when backward has ended. (calls.cpp has what programs call between backwards.)
  void post_rest(bool may_wait) LOCKSTEP_REQUIRES(mutex_);
  void end_of_backward() LOCKSTEP_REQUIRES(mutex_);
  void finish() LOCKSTEP_REQUIRES(mutex_);
  void finish_posted() LOCKSTEP_REQUIRES(mutex_);
  bool is_check_due() const LOCKSTEP_REQUIRES(mutex_);
  void note_step() LOCKSTEP_REQUIRES(mutex_);
  void compare_replicas() LOCKSTEP_REQUIRES(mutex_);
  void end_step() LOCKSTEP_REQUIRES(mutex_);
  void wait_for_all() LOCKSTEP_REQUIRES(mutex_);
  void wait_for(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void write_numbers() LOCKSTEP_REQUIRES(mutex_);
  void add_late() LOCKSTEP_REQUIRES(mutex_);
  void find_scale() LOCKSTEP_REQUIRES(mutex_);
  void scale(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void hand_out(std::size_t index) LOCKSTEP_REQUIRES(mutex_);
  void sync_buffers() LOCKSTEP_REQUIRES(mutex_);
  // `are_apart`: parameters differ between ranks, or what is derived from them does.
  void take_state_from(int root, bool are_apart) LOCKSTEP_REQUIRES(mutex_);
  std::vector<NamedTensor> state() const LOCKSTEP_REQUIRES(mutex_);

  // problems.cpp: what goes wrong.
  void note_problem(const std::string& problem, ErrorKind kind = ErrorKind::kUsage)
      LOCKSTEP_REQUIRES(mutex_);
  void note_failures() LOCKSTEP_REQUIRES(mutex_);
  void note_failure(const UnfinishedWorks::Failure& failure, const std::string& when,
                    const std::string& advice) LOCKSTEP_REQUIRES(mutex_);
  void throw_problems() LOCKSTEP_REQUIRES(mutex_);
  void throw_early_end() LOCKSTEP_REQUIRES(mutex_);
  void throw_if_ended() const LOCKSTEP_REQUIRES(mutex_);
  void order_after_posted() LOCKSTEP_REQUIRES(mutex_);
  void keep_unfinished() LOCKSTEP_REQUIRES(mutex_);
  void drop_step() LOCKSTEP_REQUIRES(mutex_);
  void drop_failed_step(ErrorKind kind) LOCKSTEP_REQUIRES(mutex_);
  void abort_devices() LOCKSTEP_REQUIRES(mutex_);
  std::string text_of(const Bucket& bucket) const LOCKSTEP_REQUIRES(mutex_);
  const char* name_of_reduction() const LOCKSTEP_REQUIRES(mutex_) {
    return is_sliced_ && shares_gradients() ? "reduce_scatter" : "all_reduce";
  }
  // `subject` is what was all-reduced.
  [[noreturn]] void explain(std::exception_ptr error, const std::string& subject)
      LOCKSTEP_REQUIRES(mutex_);

  // step_in_backward.cpp: DdpOptions::optimizer.
  void check_optimizer() LOCKSTEP_REQUIRES(mutex_);
  void note_changed_optimizer() LOCKSTEP_REQUIRES(mutex_);
  std::string find_problem_of_optimizer() const LOCKSTEP_REQUIRES(mutex_);
  void step_in_backward() LOCKSTEP_REQUIRES(mutex_);
  void step_bucket_by_bucket() LOCKSTEP_REQUIRES(mutex_);

  // How many there are in this process.
  class Counted {
   public:
    Counted() { ++num_; }
    ~Counted() { --num_; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    bool is_only_one() const { return num_ == 1; }

   private:
    static inline std::atomic<int> num_ = 0;
  };

  // Constant after construction.
  const Counted counted_;
  const int number_;  // in the order of construction, which is the same on all ranks
  World world_;       // an engine of its own: other collectives do not mix with the reducer's
  DdpOptions options_;
  HookComm hook_comm_;
  // Weights are known to all before a bucket is posted: a hook that keeps what it did not send
  // needs shares of the whole, which do not depend on the units of weights, and so does the range
  // of f16.
  bool weighs_first_ = false;
  // The step's numbers do not travel behind the last bucket, but on their own in main memory: a
  // step that a hook or an optimizer must not see if it is dropped, and one whose buckets the host
  // does not wait for.
  bool are_numbers_apart_ = false;
  std::size_t num_optimized_ = 0;  // parameters of DdpOptions::optimizer
  bool has_buffers_ = false;       // walking a module takes longer than a small step may
  const std::shared_ptr<Gauges> gauges_ = Gauges::of_process();  // for who looks at the job
  // Null: no hashes are asked for.
  std::unique_ptr<HashLog> hash_log_;
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  // What the parameters' hooks call; they stay with the parameters, this goes with the reducer.
  std::shared_ptr<Reducer*> hook_target_ = std::make_shared<Reducer*>(this);

  mutable RecursiveMutex mutex_;  // a comm hook may ask for stats()
  ModelWatch watch_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Slot> slots_ LOCKSTEP_GUARDED_BY(mutex_);
  Buckets buckets_ LOCKSTEP_GUARDED_BY(mutex_);
  std::shared_ptr<Shards> shards_ LOCKSTEP_GUARDED_BY(mutex_);   // null: nothing is shared
  std::shared_ptr<Slices> slices_ LOCKSTEP_GUARDED_BY(mutex_);   // the same, on devices
  bool is_sliced_ LOCKSTEP_GUARDED_BY(mutex_) = false;           // they are there, or being made
  bool reduces_once_ LOCKSTEP_GUARDED_BY(mutex_) = false;        // the engine writes the mean once
  std::int64_t next_long_wait_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // the step of it, for a place
  std::int64_t steps_between_long_waits_ LOCKSTEP_GUARDED_BY(mutex_) = 25;
  Turns turns_ LOCKSTEP_GUARDED_BY(mutex_);
  ReadyOrder order_ LOCKSTEP_GUARDED_BY(mutex_);
  StepNumbers numbers_ LOCKSTEP_GUARDED_BY(mutex_);
  StepStats stats_ LOCKSTEP_GUARDED_BY(mutex_);
  FirstGradients first_gradients_ LOCKSTEP_GUARDED_BY(mutex_);
  // A hook is started while gradients arrive, and ends with backward, on other threads and streams.
  // What it keeps belongs to one.
  OwnStream hook_stream_ LOCKSTEP_GUARDED_BY(mutex_);
  UnfinishedWorks unfinished_ LOCKSTEP_GUARDED_BY(mutex_);
  Step step_ LOCKSTEP_GUARDED_BY(mutex_);
  int epoch_ LOCKSTEP_GUARDED_BY(mutex_) = 0;      // how often buckets were laid out
  double weight_ LOCKSTEP_GUARDED_BY(mutex_) = 1;  // of the next step
  int accumulate_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
  std::int64_t first_step_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // of the run: those before wrapping
  // Local backwards since the last synchronised one.
  int num_local_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::int64_t num_backwards_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool is_joined_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool is_skipping_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // in skip(), not in join()
  bool needs_state_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  UnevenOptions uneven_ LOCKSTEP_GUARDED_BY(mutex_) = {};  // while it has joined
  // Whether another model was finished after this one in the last backward, on any rank.
  std::optional<bool> is_followed_ LOCKSTEP_GUARDED_BY(mutex_);
  double last_weight_ LOCKSTEP_GUARDED_BY(mutex_) = 1;  // of the last step with data
  std::function<bool()> is_asked_to_stop_ LOCKSTEP_GUARDED_BY(mutex_);
  bool must_stop_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // as all ranks agreed in the last step
  std::function<bool()> is_asked_to_reform_ LOCKSTEP_GUARDED_BY(mutex_);
  std::function<bool()> has_ended_ LOCKSTEP_GUARDED_BY(mutex_);
  bool must_reform_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // the same
  bool has_warned_of_graph_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
