// Communication hooks: how a bucket of gradients becomes its mean over ranks.
//
// Without a hook a bucket is all-reduced as it is. A hook sees each bucket once per step, on all
// ranks in the same order, and leaves the mean in it: cast to fewer bits, factored, or only its
// largest part. Hooks act in synchronised backwards only; under no_sync() nothing reaches them.
// Threading: calls come one at a time, on autograd's threads or the caller's.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/export.h>
#include <lockstep/world.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// One bucket, as a hook sees it. Tensors are views: what is written there is the gradient.
struct GradBucket {
  int index = 0;  // in the order of posting; may change once, after the first step: see epoch
  int epoch = 0;  // grows when the layout of buckets changes: state kept by index is then void
  at::Tensor flat = {};                    // all gradients, one behind the other, padding is zero
  std::vector<at::Tensor> gradients = {};  // of each parameter, in its sizes and strides
  std::vector<std::string> names = {};
};

// The ranks that share the gradients of a step, all or CommHook::part(), for a hook: collectives
// that do not wait, and a count of what they send.
class LOCKSTEP_API HookComm {
 public:
  explicit HookComm(World world) : world_(std::move(world)) {}

  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }

  // Starts the sum over ranks; `tensor` is contiguous and may be used again after wait().
  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& tensor);
  // Starts to bring every rank's `tensor` to all; the result has one row per rank.
  c10::intrusive_ptr<c10d::Work> all_gather(const at::Tensor& tensor, at::Tensor& result);

  // Bytes that this rank has given to collectives so far.
  std::int64_t bytes_sent() const { return bytes_sent_; }

  // Lets the engine do what has become possible of the collectives that were started; called while
  // backward goes on.
  void poll();

 private:
  friend class Reducer;
  using Work = c10::intrusive_ptr<c10d::Work>;
  void use(const World& world) { world_ = world; }
  void end_step();
  // After what has been started: the host in main memory, else the current stream of a device.
  void order_after_started(bool is_on_cpu);
  std::vector<Work> take_works_of_devices();
  Work started(Work work, const at::Tensor& tensor);

  World world_;
  std::int64_t bytes_sent_ = 0;
  std::deque<Work> works_;              // in main memory, that are not known to be done
  std::vector<Work> works_of_devices_;  // of this step
};

// What a hook keeps from step to step on this rank, by names of its own.
using HookState = std::map<std::string, at::Tensor>;

// A hook may keep state from step to step: give each wrapped model one of its own.
class LOCKSTEP_API CommHook {
 public:
  virtual ~CommHook() = default;

  // What all ranks must have alike: the name and the settings. Compared when a model is wrapped.
  virtual std::string text() const = 0;

  // When a model is wrapped, on all ranks, and their texts are alike: for what the hook needs of
  // the model's world. Collective.
  virtual void begin(const World& /*world*/) {}

  // Begins to average the bucket. Returns what is to be done at the end of backward, in the order
  // of buckets: wait, more collectives, and writing the mean into the bucket. On a device both run
  // in one stream, which is the hooks' own, in every step.
  virtual std::function<void()> start(GradBucket bucket, HookComm& comm) = 0;

  // The step has counted: it was not dropped.
  virtual void end_step() {}

  // Whether gradients of the next step are not averaged over all ranks, so that replicas may
  // differ. The same on all ranks.
  virtual bool is_local() const { return false; }
  // Whether that may come to be the case; asked after begin().
  virtual bool may_be_local() const { return is_local(); }
  // The ranks that then share them: a part of the model's world (World::split), with an engine that
  // nobody else uses. Weights are shares of the part, sparse and late gradients are averaged in it,
  // and replicas are compared in it. Nothing: gradients stay each rank's own, get no weights, and
  // replicas are not compared. A parameter with a gradient on any rank of the world still has one
  // on all, zero if its part has none.
  virtual std::optional<World> part() const { return std::nullopt; }

  // For checkpoints. What state() gave comes back, on the same rank, before the first bucket of a
  // resumed run: buckets are laid out as they were, and `epoch` is theirs. In a world of another
  // size every rank gets rank 0's, with the mean over ranks in tensors of floating point.
  virtual HookState state() const { return {}; }
  virtual void load_state(const HookState& /*state*/, int /*epoch*/) {}
};

// Sends gradients in 16 bits: half the bytes of f32. The mean is taken in the engine, which
// accumulates in f32; fp16 divides before it sends, so that sums do not overflow.
LOCKSTEP_API std::shared_ptr<CommHook> bf16_hook();
LOCKSTEP_API std::shared_ptr<CommHook> fp16_hook();

struct PowerSgdOptions {
  int rank = 1;                // columns of the factors
  int start_step = 10;         // plain all-reduce before that
  bool warm_start = true;      // factors begin where the last step's ended
  bool error_feedback = true;  // what was not sent is added to the next step's gradient
  double min_compression = 2;  // matrices that would not get this much smaller are sent whole
  std::uint64_t seed = 0;
};
// PowerSGD (Vogels et al., 2019): matrices are sent as two thin factors.
LOCKSTEP_API std::shared_ptr<CommHook> power_sgd_hook(const PowerSgdOptions& options = {});

struct TopKOptions {
  double fraction = 0.01;  // of a bucket's elements that are sent, at least one
  bool error_feedback = true;
};
// Each rank sends its largest elements only.
LOCKSTEP_API std::shared_ptr<CommHook> top_k_hook(const TopKOptions& options = {});

struct PostLocalSgdOptions {
  std::int64_t start_step = 100;  // gradients are averaged over all ranks before that
  // After that, they are averaged over the ranks of a part. False: each rank keeps its own.
  bool averages_in_part = true;
  // This rank's part of the model's world, from World::split. Nothing: the ranks of its host.
  std::optional<World> part = std::nullopt;
};
// Post-local SGD (Lin et al., 2018): after some steps parts of the world train apart, and a
// PeriodicAverager or HierarchicalAverager (lockstep/averaging.h) averages the weights. Python's
// post_localSGD_hook. If a part has all ranks, as on one host, gradients are averaged as before.
// While parts train apart, join() needs its `step`. Wrapping throws, on all ranks: MismatchError if
// options differ, UsageError if parts do not fit together.
LOCKSTEP_API std::shared_ptr<CommHook> post_local_sgd_hook(const PostLocalSgdOptions& options = {});

}  // namespace lockstep
