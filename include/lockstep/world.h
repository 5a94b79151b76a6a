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

#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

using c10d::ReduceOp;

struct JoinOptions {
  // An engine's name, or "auto". The variable LOCKSTEP_ENGINE replaces "auto".
  std::string engine = "auto";
  // How long an operation may wait for another rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // How long to wait until all ranks have come.
  std::chrono::milliseconds join_timeout = std::chrono::minutes(2);
  // For programs that know their place themselves: all three, instead of a launcher's variables.
  std::optional<int> rank = std::nullopt;
  std::optional<int> size = std::nullopt;
  c10::intrusive_ptr<c10d::Store> store = {};
  std::shared_ptr<const void> communicator = {};  // set by join_mpi (lockstep/mpi.h)
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
  int local_rank() const;  // among the ranks of this host
  int local_size() const;
  const std::string& host() const;
  const std::vector<Member>& members() const;  // by rank

  // The engine. Its operations are c10d's: asynchronous, on any number of tensors.
  const c10::intrusive_ptr<c10d::Backend>& backend() const;
  // For small values that ranks want to tell each other; keys are this world's own.
  const c10::intrusive_ptr<c10d::Store>& store() const;

  // Another world of the same ranks with an engine of its own: what is called there does not mix
  // with what is called here. Collective. `label` is what errors call it, such as "the metrics".
  World duplicate(const std::string& label = {}) const;

  // Returns when all ranks have called it.
  void barrier() const;

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

  // The sum, or the mean, of a number of each rank. A tensor has one element.
  double sum(double value) const;
  double mean(double value) const { return sum(value) / size(); }
  double sum(const at::Tensor& value) const;
  double mean(const at::Tensor& value) const { return sum(value) / size(); }

  // Runs f() on rank 0 only and returns its result on all ranks. If f throws, all ranks throw.
  // The result may be void, a tensor, a std::string, a trivially copyable value or a std::vector of
  // such values. The others wait for f at most JoinOptions::timeout; f itself calls no collective:
  // that is a UsageError.
  template <typename F>
  auto on_rank0(F&& f) const -> std::decay_t<std::invoke_result_t<F>>;

 private:
  struct State;
  explicit World(std::shared_ptr<const State> state) : state_(std::move(state)) {}

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

  std::shared_ptr<const State> state_;
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
