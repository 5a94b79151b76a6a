// The collectives with plain names: each checks its arguments, makes tensors dense for the engine,
// waits, and turns what the engine throws into an error that names operation and rank.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <functional>

#include "base/cause.h"
#include "base/posix.h"
#include "base/purpose.h"
#include "base/text.h"
#include "shm/board.h"
#include "world/arguments.h"
#include "world/exchange.h"
#include "world/pending.h"
#include "world/state.h"
#include "world/translate.h"

namespace lockstep {

Pending World::start(const char* operation, const at::Tensor& subject,
                     const std::function<Works()>& start_works,
                     std::function<at::Tensor()> finish) const {
  // Here, too, as not all engines look at the board.
  if (const auto& channel = state_->context.channel) {
    shm::refuse_on_rank0(channel->board().get(), global_rank(), operation);
  }
  throw_late_failure(*this, *state_->unfinished);
  std::optional<NoSigpipe> no_sigpipe;
  if (state_->traits.writes_to_sockets) no_sigpipe.emplace();
  try {
    return Pending(std::make_shared<Pending::State>(
        *this, Pending::State::Call{operation, subject, start_works(), std::move(finish)},
        state_->context.timeout, state_->unfinished));
  } catch (...) {
    rethrow_translated(std::current_exception(), members(), rank(), operation,
                       describe_tensor(subject));
  }
}

Pending World::barrier_async() const {
  return start("barrier", {}, [&] { return Works{{backend()->barrier()}}; }, {});
}

void World::barrier() const { barrier_async().wait(); }

Pending World::all_reduce_async(const at::Tensor& tensor, const ReduceOp& op) const {
  check_dense(*this, "all_reduce", tensor, Use::kWritten);
  std::vector<at::Tensor> dense = {make_dense(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return start(
      "all_reduce", tensor,
      [&] {
        return Works{{backend()->allreduce(dense, options), tensor.device().type()}};
      },
      write_back(tensor, dense[0]));
}

at::Tensor World::all_reduce(const at::Tensor& tensor, const ReduceOp& op) const {
  return all_reduce_async(tensor, op).result();
}

double World::sum(double value) const {
  return all_reduce(at::scalar_tensor(value, at::kDouble)).item<double>();
}

double World::sum(const at::Tensor& value) const { return sum(value.item<double>()); }

Pending World::broadcast_async(const at::Tensor& tensor, int root) const {
  check_dense(*this, "broadcast", tensor, Use::kWritten);
  check_root(*this, "broadcast", root);
  std::vector<at::Tensor> dense = {make_dense(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return start(
      "broadcast", tensor,
      [&] {
        return Works{{backend()->broadcast(dense, options), tensor.device().type()}};
      },
      write_back(tensor, dense[0]));
}

at::Tensor World::broadcast(const at::Tensor& tensor, int root) const {
  return broadcast_async(tensor, root).result();
}

Pending World::all_gather_async(const at::Tensor& tensor) const {
  check_dense(*this, "all_gather", tensor, Use::kRead);
  at::Tensor input = make_dense(tensor).view(-1);  // flat: engines differ about shapes
  // What is returned is no view: one that was made here could not be changed in place later.
  const at::Tensor output = at::empty(stacked(*this, tensor), input.options());
  at::Tensor flat = output.view(-1);
  return start(
      "all_gather", tensor,
      [&] {
        return Works{{backend()->_allgather_base(flat, input), tensor.device().type()}};
      },
      [output] { return output; });
}

at::Tensor World::all_gather(const at::Tensor& tensor) const {
  return all_gather_async(tensor).result();
}

Pending World::reduce_scatter_async(const at::Tensor& tensor, const ReduceOp& op) const {
  check_dense(*this, "reduce_scatter", tensor, Use::kRead);
  check_parts(*this, "reduce_scatter", tensor);
  at::Tensor input = make_dense(tensor).view(-1);
  const at::Tensor output = at::empty(tensor.sizes().slice(1), input.options());
  at::Tensor flat = output.view(-1);
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return start(
      "reduce_scatter", tensor,
      [&] {
        return Works{
            {backend()->_reduce_scatter_base(flat, input, options), tensor.device().type()}};
      },
      [output] { return output; });
}

at::Tensor World::reduce_scatter(const at::Tensor& tensor, const ReduceOp& op) const {
  return reduce_scatter_async(tensor, op).result();
}

World::OnRank0::OnRank0(const World& world)
    : before_(shm::set_on_rank0(
          world.state_->context.channel ? world.state_->context.channel->board().get() : nullptr)) {
}

World::OnRank0::~OnRank0() { shm::set_on_rank0(static_cast<const shm::Board*>(before_)); }

// Rank 0's answer, or its failure as a Cause, behind one character that says which.
std::string World::share_from_rank0(std::string answer, std::exception_ptr failure) const {
  const PurposeScope purpose(Purpose::kOnRank0);
  constexpr char kAnswer = 'a';
  constexpr char kFailure = 'f';
  std::string sent;
  if (rank() == 0) {
    sent = failure ? kFailure + to_text(cause_of(failure, global_rank(), ErrorKind::kUsage))
                   : kAnswer + answer;
  }
  const std::string received = share_text(*this, sent, 0);
  if (failure) std::rethrow_exception(failure);
  if (received.front() == kFailure) {
    throw_cause(cause_from(std::string_view(received).substr(1)),
                {.rank = global_rank(), .peer = global_rank(0), .operation = "on_rank0"});
  }
  return received.substr(1);
}

namespace detail {

// The type, the number of dimensions and the sizes, as 64-bit numbers; then the elements.
std::string pack(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  std::vector<std::int64_t> header = {static_cast<std::int64_t>(dense.scalar_type()), dense.dim()};
  header.insert(header.end(), dense.sizes().begin(), dense.sizes().end());
  return pack(header) +
         std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
}

at::Tensor unpack_tensor(std::string_view bytes) {
  const auto number = [&](std::size_t index) {
    return unpack<std::int64_t>(bytes.substr(index * sizeof(std::int64_t), sizeof(std::int64_t)));
  };
  const auto num_dims = static_cast<std::size_t>(number(1));
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < num_dims; ++i) sizes.push_back(number(2 + i));
  at::Tensor tensor = at::empty(sizes, static_cast<at::ScalarType>(number(0)));
  bytes.remove_prefix((2 + num_dims) * sizeof(std::int64_t));
  if (tensor.numel() > 0) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), tensor.nbytes());
  return tensor;
}

}  // namespace detail
}  // namespace lockstep
