// World: the processes that train together, and what each needs to know of the others.
//
// A World is a handle: copies are the same world. It ends when the last copy is gone.
// Threading: collectives are called by one thread at a time, in the same order on all ranks.
// Every wait has a deadline (JoinOptions) and every error names the rank (lockstep/error.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <lockstep/export.h>
#include <lockstep/pending.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

using c10d::ReduceOp;

struct StartedWork;  // src/world/pending.h
class Membership;    // src/world/membership.h
struct NextGeneration;
struct Placement;  // src/world/environment.h

struct JoinOptions {
  // An engine's name, or "auto". The variable LOCKSTEP_ENGINE replaces "auto".
  std::string engine = "auto";
  // How long an operation may wait for another rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // How long to wait until all ranks have come.
  std::chrono::milliseconds join_timeout = std::chrono::minutes(2);
  // Logical ranks, at least as many as ranks: the result of a training depends on their number, not
  // on that of the ranks, which share them out and play them one after the other
  // (DistributedDataParallel::play, docs/reproducibility.md). 0: LOCKSTEP_LOGICAL_RANKS says, or
  // there are none.
  int logical_ranks = 0;
  // With logical ranks: intra-op threads of each rank. LibTorch cuts sums by threads, so they are
  // part of the result. join() sets them (at::set_num_threads), whatever the number of cores is.
  // 0: LOCKSTEP_THREADS says, or 1.
  int threads = 0;
  // For programs that know their place themselves: all three, instead of a launcher's variables.
  std::optional<int> rank = std::nullopt;
  std::optional<int> size = std::nullopt;
  c10::intrusive_ptr<c10d::Store> store = {};
  std::shared_ptr<const void> communicator = {};  // set by join_mpi (lockstep/mpi.h)
};

// Those that one rank plays: first, first + 1, ...
struct LogicalRanks {
  int first = 0;
  int count = 1;
};

// Of numbers that all ranks have together (World::moments).
struct Moments {
  double mean = 0;       // 0 if there is nothing
  double deviation = 0;  // the root of the mean squared distance from the mean
  double weight = 0;     // of all: how many numbers, if they have no weights
};

class LOCKSTEP_API World {
 public:
  // Joins the world that this process was started in: by lockstep, torchrun, mpirun (OpenMPI,
  // MPICH, Intel MPI) or srun; without any of them, a world of one. Returns when all ranks have
  // come. Throws: UsageError (incomplete or wrong variables), MismatchError (ranks disagree, or two
  // processes have one rank), TimeoutError (a rank did not come), PeerLostError, SystemError.
  static World join(const JoinOptions& options = {});

  int rank() const;
  int size() const;
  // Of this rank, or of another rank of this world, in the world that was joined: what errors name.
  // The same as the rank here, but in a part of a world (split).
  int global_rank() const { return global_rank(rank()); }
  int global_rank(int rank) const;
  int local_rank() const;  // among this world's ranks of this host
  int local_size() const;
  // Whether JoinOptions::logical_ranks, or the variable, was given. If not, each rank plays itself.
  bool has_logical_ranks() const;
  int logical_size() const;
  LogicalRanks logical_ranks() const;  // that this rank plays
  // What seed_all (lockstep/seed.h) was given last, in this world or one that is made of it: random
  // numbers of logical ranks depend on it. 0 before.
  std::uint64_t seed() const;
  void set_seed(std::uint64_t seed) const;
  const std::string& host() const;
  const std::vector<Member>& members() const;  // by rank
  // Whether ranks may be lost and replaced (lockstep/elastic.h).
  bool is_elastic() const;
  // In an elastic job: how often its ranks have changed.
  int generation() const;
  // This process replaces a lost rank of an elastic job, and the others have not taken it in yet:
  // it is alone until Elastic::run().
  bool is_waiting() const;

  // Where this rank computes. "auto": the GPU of this rank if every rank of this world sees GPUs of
  // one kind and the engine moves tensors on them, else the CPU; or a name as LibTorch has it:
  // "cpu", "cuda" (this rank's), "cuda:1". Ranks of a host that see the same GPUs have one each, in
  // the order of their local ranks. Not collective: it is known since the join. Throws: UsageError,
  // the same on all ranks, if a rank has no such device, or more ranks than GPUs share them; if a
  // number was given, only on a rank that has none of it.
  at::Device device(const std::string& name = "auto") const;

  // The engine. Its operations are c10d's: asynchronous, on any number of tensors.
  const c10::intrusive_ptr<c10d::Backend>& backend() const;
  // For small values that ranks want to tell each other; keys are this world's own.
  const c10::intrusive_ptr<c10d::Store>& store() const;

  // Another world of the same ranks with an engine of its own: what is called there does not mix
  // with what is called here. Collective. `label` is what errors call it, such as "the metrics".
  World duplicate(const std::string& label = {}) const;

  // Cuts this world into parts: the ranks that give the same color are a world of their own, in the
  // order of their keys, and of their ranks here where keys are equal. A rank without a color
  // belongs to no part, and gets none. Collective, also for those. Errors name ranks by their
  // global_rank(). Throws: UsageError, on all ranks, if one gives a negative color or key.
  std::optional<World> split(std::optional<int> color, int key = 0,
                             const std::string& label = {}) const;

  // Returns when all ranks have called it.
  void barrier() const;

  // The calls below carry no gradients: lockstep/functional.h has those that do. Each has a form
  // that only starts it and returns a handle (lockstep/pending.h). Each is waited for, and only
  // that makes its result visible; until then, leave what it reads and writes alone. Started
  // operations may end in any order, and go on while this process waits in any world (on Gloo:
  // in these calls, not in backward()). Of tensors on GPUs see Pending::wait().

  // Each rank's `tensor` becomes the sum (or average, ...) over all ranks. Returns `tensor`.
  // Tensors may have any strides; they have the same sizes and type on all ranks.
  at::Tensor all_reduce(const at::Tensor& tensor, const ReduceOp& op = ReduceOp::SUM) const;
  // Each rank's `tensor` becomes root's. Returns `tensor`.
  at::Tensor broadcast(const at::Tensor& tensor, int root = 0) const;
  // The tensors of all ranks, stacked in the order of ranks along a new first dimension.
  at::Tensor all_gather(const at::Tensor& tensor) const;
  // The reverse: `tensor` has one part per rank along its first dimension; returns the reduction
  // over ranks of this rank's part.
  at::Tensor reduce_scatter(const at::Tensor& tensor, const ReduceOp& op = ReduceOp::SUM) const;
  Pending barrier_async() const;
  Pending all_reduce_async(const at::Tensor& tensor, const ReduceOp& op = ReduceOp::SUM) const;
  Pending broadcast_async(const at::Tensor& tensor, int root = 0) const;
  Pending all_gather_async(const at::Tensor& tensor) const;
  Pending reduce_scatter_async(const at::Tensor& tensor, const ReduceOp& op = ReduceOp::SUM) const;

  // The next four compare sizes, types and kinds of devices first: where ranks differ, or one gives
  // a wrong tensor, all ranks throw the same and the world stays usable. The started forms of the
  // first three leave that to the engine: shm, hierarchical and mpi find numbers of elements and
  // types that differ, and end.

  // Root gets the tensors of all ranks, stacked as all_gather does; others an undefined tensor.
  at::Tensor gather(const at::Tensor& tensor, int root = 0) const;
  // Each rank's `tensor` becomes its part of root's `parts`, which has one part per rank along its
  // first dimension and is not looked at on other ranks. Returns `tensor`.
  at::Tensor scatter(const at::Tensor& tensor, const at::Tensor& parts, int root = 0) const;
  // `tensor` has one part per rank along its first dimension, and so has the result: part r is what
  // rank r has for this rank.
  at::Tensor all_to_all(const at::Tensor& tensor) const;
  // The tensors of all ranks, in the order of ranks; their first dimensions may differ.
  std::vector<at::Tensor> all_gather_uneven(const at::Tensor& tensor) const;
  Pending gather_async(const at::Tensor& tensor, int root = 0) const;
  Pending scatter_async(const at::Tensor& tensor, const at::Tensor& parts, int root = 0) const;
  Pending all_to_all_async(const at::Tensor& tensor) const;
  // Returns when all ranks have called it, as they must know each other's lengths: see
  // Pending::results(). Throws as all_gather_uneven.
  Pending all_gather_uneven_async(const at::Tensor& tensor) const;

  // A message from one rank to another, which calls recv with a tensor like it: `tensor` becomes
  // what was sent, and is returned. Messages between two ranks with one tag (0 to 32767) arrive in
  // the order sent; of tensors on GPUs all do, whatever their tags, as NCCL has none. send() may
  // return before the message is received. Not for oneself. Throws:
  // UsageError (no such rank or tag); recv MismatchError if sizes, types or kinds of devices
  // differ, and then drops the message. For recv_async a message of another size is the end of the
  // engine.
  void send(const at::Tensor& tensor, int to, int tag = 0) const;
  at::Tensor recv(const at::Tensor& tensor, int from, int tag = 0) const;
  Pending send_async(const at::Tensor& tensor, int to, int tag = 0) const;
  Pending recv_async(const at::Tensor& tensor, int from, int tag = 0) const;

  // The sum, or the mean, of a number of each rank. A tensor has one element.
  double sum(double value) const;
  double mean(double value) const { return sum(value) / size(); }
  double sum(const at::Tensor& value) const;
  double mean(const at::Tensor& value) const { return sum(value) / size(); }

  // Mean and deviation of the elements of all ranks' tensors, which may have any sizes, each
  // counted with its weight; without `weights` each counts once. Computed in f64, the same bits on
  // all ranks. Throws on all ranks: UsageError if weights are negative, not finite, or not as many.
  Moments moments(const at::Tensor& values, const at::Tensor& weights = {}) const;

  // Runs f() on rank 0 only and returns its result on all ranks. If f throws, all ranks throw.
  // The result may be void, a tensor, a std::string, a trivially copyable value or a std::vector of
  // such values. The others wait for f at most JoinOptions::timeout; f itself calls no collective:
  // that is a UsageError.
  template <typename F>
  auto on_rank0(F&& f) const -> std::decay_t<std::invoke_result_t<F>>;

 private:
  struct State;
  struct Derived;
  explicit World(std::shared_ptr<State> state) : state_(std::move(state)) {}
  static std::shared_ptr<State> join_as(const JoinOptions& options, const Placement& placement,
                                        const std::shared_ptr<Membership>& before = {});
  static std::shared_ptr<State> wait_as_newcomer(const JoinOptions& options,
                                                 const Placement& placement);

  // Of an elastic job: all copies of this handle are in the next generation, with other ranks and
  // another engine. Worlds made of it (duplicate, split) stay behind.
  friend class Elastic;
  const std::shared_ptr<Membership>& membership() const;
  void move_to(const NextGeneration& next) const;

  World derive(Derived part) const;
  std::string label_of() const;
  [[noreturn]] void throw_bad_split(int peer, int color, int key) const;

  // `subject` is what errors describe; `finish` makes the result once the works are done.
  using Works = std::vector<StartedWork>;
  Pending start(const char* operation, const at::Tensor& subject,
                const std::function<Works()>& start_works,
                std::function<at::Tensor()> finish) const;

  // While f of on_rank0 runs in this thread: its collectives are refused.
  class LOCKSTEP_API OnRank0 {
   public:
    explicit OnRank0(const World& world);
    ~OnRank0();
    OnRank0(const OnRank0&) = delete;
    OnRank0& operator=(const OnRank0&) = delete;

   private:
    const void* const before_;
  };

  // Brings rank 0's answer to all ranks. On rank 0 `answer` is used; `failure` is what f threw.
  std::string share_from_rank0(std::string answer, std::exception_ptr failure) const;

  std::shared_ptr<State> state_;
};

namespace detail {

// Types whose bytes mean the same in another process, as far as the compiler can tell.
template <typename T>
inline constexpr bool is_plain =
    std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::is_member_pointer_v<T> &&
    !std::is_convertible_v<T, std::string_view>;
template <typename T>
inline constexpr bool can_be_shared =
    is_plain<T> || std::is_void_v<T> || std::is_same_v<T, at::Tensor> ||
    std::is_same_v<T, std::string>;
template <typename T>
inline constexpr bool can_be_shared<std::vector<T>> = is_plain<T> && !std::is_same_v<T, bool>;

LOCKSTEP_API std::string pack(const at::Tensor& tensor);
LOCKSTEP_API at::Tensor unpack_tensor(std::string_view bytes);

inline std::string pack(const std::string& text) { return text; }

template <typename T>
requires std::is_trivially_copyable_v<T> std::string pack(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <typename T>
requires std::is_trivially_copyable_v<T> std::string pack(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
T unpack(std::string_view bytes) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return unpack_tensor(bytes);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return T(bytes);
  } else if constexpr (std::is_trivially_copyable_v<T>) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  } else {
    T values(bytes.size() / sizeof(typename T::value_type));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
}

}  // namespace detail

template <typename F>
auto World::on_rank0(F&& f) const -> std::decay_t<std::invoke_result_t<F>> {
  using Result = std::decay_t<std::invoke_result_t<F>>;
  static_assert(
      detail::can_be_shared<Result>,
      "on_rank0: return a value: a tensor, a std::string, a trivially copyable type that "
      "holds no pointers, or a std::vector of one. What points into rank 0's memory means "
      "nothing to the others.");
  std::string answer;
  std::exception_ptr failure;
  if (rank() == 0) {
    try {
      const OnRank0 here(*this);
      if constexpr (std::is_void_v<Result>) {
        std::forward<F>(f)();
      } else {
        answer = detail::pack(std::forward<F>(f)());
      }
    } catch (...) {
      failure = std::current_exception();
    }
  }
  answer = share_from_rank0(std::move(answer), failure);
  if constexpr (!std::is_void_v<Result>) return detail::unpack<Result>(answer);
}

}  // namespace lockstep
