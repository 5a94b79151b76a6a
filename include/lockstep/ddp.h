// DistributedDataParallel: START HERE. Wraps a model so that backward() averages gradients over all
// ranks, and replicas that begin equal stay equal.
//
//   auto world = lockstep::World::join();
//   lockstep::DistributedDataParallel ddp(model, world);
//   ...
//   loss.backward();       // .grad is now the mean over all ranks, the same bits on each
//   optimizer.step();
//
// The contract: after every backward() that reached at least one wrapped parameter, outside
// no_sync, .grad of each parameter is the weighted mean over ranks of what the same local backward
// would have left there. Unused parameters, branches that differ between ranks, several forwards or
// backwards and accumulation need no options. A parameter with a gradient on no rank keeps none.
// The model keeps its own forward(). Gradients are views of the engine's memory: they are
// overwritten by the next backward, so clone() what must last longer.
// Threading: one backward at a time per wrapped model.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/comm_hook.h>
#include <lockstep/export.h>
#include <lockstep/world.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace lockstep {

// What happens to buffers (running means and the like) after a synchronised backward.
enum class BufferSync { kFromRank0, kMean, kOff };

// What the ranks of a host have once, in memory that they share, instead of once each; of models on
// devices, what all ranks of the world have once, a slice each (parameters stay whole there). Every
// mode gives the bits of kNone (kGradients on gloo, mpi and nccl: but for rounding).
// docs/memory.md has sizes and rules.
enum class Shard {
  kNone,       // nothing
  kOptimizer,  // parameters and states of optimizers; .grad is each rank's own, as with kNone
  kGradients,  // gradients as well: backward() leaves .grad empty, see full_gradients()
};

struct DdpOptions {
  std::string name = {};  // of the model, for errors of programs with several
  std::size_t bucket_bytes = 25 << 20;
  std::size_t first_bucket_bytes = 1 << 20;  // small, so that communication begins early
  // kFromRank0 keeps what rank 0's data says of running means: see kMean, or SyncBatchNorm.
  BufferSync buffers = BufferSync::kFromRank0;
  int check_every = 100;  // steps between comparisons of the replicas; 0: never
  // NaN or infinity in what a rank contributes is an error, on all ranks, that names the rank and
  // the parameter: in the mean it is everywhere. Costs a pass over the gradients; of gradients on a
  // device, the host waits for every bucket. Not with GradScaler, which expects them.
  bool check_finite = false;
  std::shared_ptr<CommHook> hook = {};
  // at::kFloat: gradients of bf16 and f16 parameters are added up, over backwards and over ranks,
  // and handed out in f32: .grad is an f32 tensor. For optim's master weights. at::kDouble: those
  // of f32, too. Sparse gradients stay as they are.
  std::optional<at::ScalarType> reduce_type = std::nullopt;
  // Steps in backward: the parameters of a bucket are updated when their mean is there, while
  // others still travel. backward() then leaves no gradients, and optimizer.step() is not called.
  // For optimizers that treat each parameter on its own. Requires: it has exactly the parameters
  // that are trained here, and outlives the wrapper. Not with clipping or GradScaler, which look at
  // all gradients before a step. If a rank is lost in the middle, parameters may be half updated:
  // the error says so.
  torch::optim::Optimizer* optimizer = nullptr;
  // If not kNone, parameters are moved, when they are wrapped, to memory that the ranks of a host
  // share. Requires: their optimizer is an optim::Sharded (lockstep/sharded.h), whose step() is
  // called on all ranks after each synchronised backward; nobody else writes to them, but in
  // change_parameters(). On a device parameters stay there, and each rank's are its own.
  Shard shard = Shard::kNone;
  // With fewer bytes of parameters than this the model stays replicas, as with kNone: to share it
  // would save little memory, and each step would take longer.
  std::size_t shard_min_bytes = 4 << 20;
  // Names of parameters whose gradients are sparse, besides those of nn::Embedding and
  // nn::EmbeddingBag with sparse(true), which are found.
  std::vector<std::string> sparse = {};
  // Names of modules, parameters or buffers that stay this rank's own: they are neither averaged
  // nor compared. "encoder" stands for all of encoder.*
  std::vector<std::string> ignored = {};
};

// For join() and skip(): what the names mean is Python's.
struct UnevenOptions {
  // The mean is over all ranks: those out of data count as if their gradients were zero, with the
  // weight of their last step. If false, it is over the ranks that have data.
  bool divide_by_initial_world_size = false;
  // The first rank out of data, while others have some, ends the training: all ranks throw, this
  // one in join(), the others in backward(). The gradients of that step are dropped: of all models
  // that share a loss; with losses of their own, of the first model, and the others' do not come.
  // If that is the very first step, and a later model has a hook or f16 parameters, the first step
  // of the later one is dropped, too, with an error that says so.
  bool throw_on_early_termination = false;
};

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// What the last synchronised backward did. Times are of this rank. Empty in a world of one.
struct DdpStats {
  std::int64_t steps = 0;  // synchronised backwards so far
  int buckets = 0;
  std::int64_t bytes = 0;       // of gradients, in all buckets
  std::int64_t bytes_sent = 0;  // given to the engine in the last step
  double backward_ms = 0;       // from the first gradient to the return of backward()
  double communication_ms = 0;  // from the first bucket posted to the last one done
  double waiting_ms = 0;        // of it, at the end, with nothing left to compute
  double overlap_percent = 0;   // of communication hidden behind backward
  int slowest_rank = -1;        // the one the others waited for: it came last to the end
  std::vector<double> step_ms =
      {};  // by rank: from the end of the last step to the end of backward
};

// Whose turn it is: see DistributedDataParallel::play.
struct Turn {
  int logical_rank = 0;
  bool is_last = true;  // the backward that comes now averages: a step of the optimizer follows
};

class Reducer;
struct ReducerDeleter {
  LOCKSTEP_API void operator()(Reducer* reducer) const;
};

// Gradients stay local while it lives; see DistributedDataParallel::no_sync.
class LOCKSTEP_API NoSync {
 public:
  explicit NoSync(std::shared_ptr<int> depth) : depth_(std::move(depth)) { ++*depth_; }
  ~NoSync() { --*depth_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<int> depth_;
};

class LOCKSTEP_API DistributedDataParallel {
 public:
  // Collective. Compares names, types, shapes, strides and options over ranks, then gives every
  // rank rank 0's parameters and buffers. Throws: UsageError (nothing to train), MismatchError
  // (ranks differ: both sides are shown).
  // The result must live as long as the training: with it the averaging ends.
  [[nodiscard]] DistributedDataParallel(std::shared_ptr<torch::nn::Module> model, World world,
                                        DdpOptions options = {});
  template <typename Contained>
  [[nodiscard]] DistributedDataParallel(const torch::nn::ModuleHolder<Contained>& model,
                                        World world, DdpOptions options = {})
      : DistributedDataParallel(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(world),
                                std::move(options)) {}
  // For a model that is held by value. Requires: it lives longer than this.
  [[nodiscard]] DistributedDataParallel(torch::nn::Module& model, World world,
                                        DdpOptions options = {});
  // For programs without a torch::nn::Module. Tensors that do not require a gradient are only sent.
  [[nodiscard]] DistributedDataParallel(std::vector<NamedTensor> parameters, World world,
                                        DdpOptions options = {},
                                        std::vector<NamedTensor> buffers = {});
  DistributedDataParallel(DistributedDataParallel&&) noexcept = default;
  DistributedDataParallel& operator=(DistributedDataParallel&&) noexcept = default;

  // loss.backward(...), for losses that may reach no parameter on some rank: every rank takes part.
  void backward(const at::Tensor& loss, const at::Tensor& gradient = {},
                std::optional<bool> retain_graph = std::nullopt, bool create_graph = false);

  // Backwards keep their gradients local until the result is gone: `auto guard = ddp.no_sync();`
  [[nodiscard]] NoSync no_sync();
  // From now on every k-th backward averages, the others add up locally: divide each loss by k for
  // a mean over all of them. Counting begins anew: call it at the start of an epoch whose length
  // may be no multiple of k, or discard() what is pending at its end.
  void accumulate(int k);
  // Drops gradients that were added up locally and not averaged yet: .grad of all parameters is
  // empty, and the next backward is the first of its k. Not collective, but all ranks must do it.
  void discard();

  // The means of the last synchronised backward, by name, until the next step(). With
  // Shard::kGradients they are in memory that other ranks use: read them, and clone() what must
  // last; on devices they are gathered, and the call is collective. Empty if there are none.
  std::vector<NamedTensor> full_gradients() const;
  // Writes to parameters by hand where the ranks of a host share them: `change` runs on one rank of
  // each host, without gradients being recorded, while the others wait; it must do the same on
  // each. Without sharding, and on devices, it runs on every rank. Collective. Throws on all ranks
  // of a host what `change` throws on one.
  void change_parameters(const std::function<void()>& change);

  // With logical ranks (JoinOptions::logical_ranks) a step is one backward of each of them: a rank
  // plays its own one after the other, and averages with the others in the last. Called before each
  // forward: random numbers become those of the logical rank in this step, buffers those that the
  // step began with. With accumulate(k) a turn is k backwards. Sampled by a DistributedSampler of
  // the same world, batches come in the order of turns. The weights that result depend on the
  // number of logical ranks, not on that of the ranks (docs/reproducibility.md). Without logical
  // ranks it only says whether the backward that follows averages.
  //
  //   for (auto& batch : *loader) {
  //     const auto turn = ddp.play();
  //     loss_of(model, batch).backward();
  //     if (!turn.is_last) continue;
  //     optimizer.step();
  //     optimizer.zero_grad();
  //   }
  Turn play();
  // Instead of a backward: this rank, or the logical rank whose turn it is, has no data in this
  // step. It counts with weight 0; others may have data. Returns whether a step of the optimizer
  // follows: not after a turn that is not the last, and not if nobody had data. With accumulate(),
  // what a turn has so far counts. join() does it until all are out of data. Collective in the last
  // turn.
  bool skip(const UnevenOptions& options = {});
  // What the bits of a training with logical ranks depend on besides its program and data.
  struct LogicalState {
    int num_ranks = 0;  // logical; 0: the world has none
    std::uint64_t seed = 0;
    int num_threads = 1;        // intra-op, of each rank
    std::string platform = {};  // LibTorch's version, the instruction set, the model of the CPU
    std::int64_t steps = 0;  // synchronised backwards of the run, also those before it was resumed
    bool operator==(const LogicalState&) const = default;
  };
  // A Checkpointer saves and loads it.
  LogicalState logical_state() const;
  // Throws: UsageError if numbers of logical ranks or threads, seeds, or platforms differ from
  // those here (platforms: unless the variable LOCKSTEP_ANY_PLATFORM is 1).
  void check_logical_state(const LogicalState& state) const;
  void load_logical_state(const LogicalState& state);

  // The number of samples behind the gradients of the next synchronised backward, so that ranks
  // with uneven batches have the mean over all samples. Without this call every rank has weight 1.
  // Requires: the loss is a mean over these samples.
  void set_weight(double samples);

  // For a rank that is out of data: takes part in the others' steps, with weight 0, until all
  // ranks are here. `step` is what the program does after backward (optimizer.step()), so that this
  // replica goes on like the others; without it the last rank's parameters and buffers are sent to
  // all at the end, and states of optimizers differ. Returns early if must_stop() becomes true.
  // Throws: UsageError with throw_on_early_termination.
  void join(const std::function<void()>& step = {}, const UnevenOptions& options = {});

  // After parameters were frozen, unfrozen, added or moved: as if the model were wrapped again.
  // Collective: every rank gets rank 0's parameters and buffers. accumulate() and stop_when() stay.
  // Throws: as the constructor; UsageError if gradients are pending.
  void rewrap();

  // Compares all replicas now. Collective.
  // Throws: MismatchError that names the first tensor and the ranks that differ.
  void check_replicas();

  // Backwards whose gradients are still this rank's own, since the last synchronised one. Always 0
  // in a world of one without logical ranks, where nothing is averaged: count steps to know when to
  // call the optimizer.
  int num_pending() const;

  // For stops that all ranks must agree on (Checkpointer::on_signal): `is_asked` is called in every
  // synchronised backward; must_stop() says whether it was true on any rank in the last one.
  void stop_when(std::function<bool()> is_asked);
  bool must_stop() const;

  DdpStats stats() const;

  // What this rank keeps for the comm hook, with the layout of buckets that it belongs to; empty
  // without one. A Checkpointer saves and loads it.
  HookState hook_state() const;
  // Throws: UsageError if it is of another model, or there is no hook.
  void check_hook_state(const HookState& state) const;
  // All ranks, and before the next backward. Throws: as check_hook_state().
  void load_hook_state(const HookState& state);

 private:
  friend LOCKSTEP_API void join(const std::vector<DistributedDataParallel*>& models,
                                const std::function<void()>& step, const UnevenOptions& options);

  // Of an elastic job: in the next generation there is another reducer.
  friend class Elastic;

  // `are_equal`: replicas need not be made equal.
  std::function<std::unique_ptr<Reducer, ReducerDeleter>(bool are_equal)> make_;
  std::unique_ptr<Reducer, ReducerDeleter> reducer_;
};

// As DistributedDataParallel::join, for a program that trains several models: plays out the others'
// steps of all of them, with one synchronised backward of each model in an iteration. The order is
// that of the backwards; models in one loss come in the order in which they were wrapped. `step`
// is called once for an iteration, when all have their gradients. An error is thrown when the
// models that share a loss with the one that has it are finished, as backward() does on the other
// ranks.
LOCKSTEP_API void join(const std::vector<DistributedDataParallel*>& models,
                       const std::function<void()>& step = {}, const UnevenOptions& options = {});

}  // namespace lockstep
