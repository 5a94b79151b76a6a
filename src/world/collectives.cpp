// The collectives with plain names: each checks its arguments, makes tensors dense for the engine,
// waits, and turns what the engine throws into an error that names operation and rank.

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <functional>

#include "base/cause.h"
#include "base/purpose.h"
#include "base/text.h"
#include "shm/board.h"
#include "world/exchange.h"
#include "world/state.h"
#include "world/translate.h"

namespace lockstep {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

std::string describe_tensor(const at::Tensor& tensor) {
  return text::format("{}[{}], {} bytes", c10::toString(tensor.scalar_type()),
                      text::join(tensor.sizes(), ", "), tensor.nbytes());
}

enum class Use { kRead, kWritten };

void check_dense(const at::Tensor& tensor, Use use, int rank, const char* operation) {
  const bool is_dense = tensor.defined() && tensor.layout() == at::kStrided;
  const bool is_overlapping =
      is_dense && use == Use::kWritten && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
  if (is_dense && !is_overlapping) return;
  throw UsageError(
      {.rank = rank, .operation = operation},
      text::format("{} was given {}.\nGive it a dense tensor of its own memory.", operation,
                   !tensor.defined() ? "an undefined tensor"
                   : is_overlapping  ? "an expanded tensor, whose elements share memory"
                                     : "a sparse tensor"));
}

// Contiguous, and with a pending conjugation or negation carried out.
at::Tensor make_dense(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

// `state`: of the world, which is its own.
template <typename State>
void wait_for(const State& state, const char* operation, const std::string& subject,
              const std::function<Work()>& start) {
  // Here, too, as not all engines look at the board.
  if (const auto& channel = state.context.channel) {
    shm::refuse_on_rank0(channel->board().get(), state.rank, operation);
  }
  try {
    start()->wait();
  } catch (...) {
    rethrow_translated(std::current_exception(), state.members, state.rank, operation, subject);
  }
}

}  // namespace

void World::barrier() const {
  wait_for(*state_, "barrier", "all ranks", [&] { return backend()->barrier(); });
}

at::Tensor World::all_reduce(const at::Tensor& tensor, const ReduceOp& op) const {
  check_dense(tensor, Use::kWritten, rank(), "all_reduce");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense = {make_dense(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  wait_for(*state_, "all_reduce", describe_tensor(tensor),
           [&] { return backend()->allreduce(dense, options); });
  if (dense[0].data_ptr() != tensor.data_ptr()) tensor.copy_(dense[0]);
  return tensor;
}

double World::sum(double value) const {
  return all_reduce(at::scalar_tensor(value, at::kDouble)).item<double>();
}

double World::sum(const at::Tensor& value) const { return sum(value.item<double>()); }

at::Tensor World::broadcast(const at::Tensor& tensor, int root) const {
  check_dense(tensor, Use::kWritten, rank(), "broadcast");
  if (root < 0 || root >= size()) {
    throw UsageError({.rank = rank(), .operation = "broadcast"},
                     text::format("broadcast was given root {} in a world of {}.\n"
                                  "Give a rank from 0 to {}.",
                                  root, size(), size() - 1));
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense = {make_dense(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  wait_for(*state_, "broadcast", describe_tensor(tensor),
           [&] { return backend()->broadcast(dense, options); });
  if (dense[0].data_ptr() != tensor.data_ptr()) tensor.copy_(dense[0]);
  return tensor;
}

at::Tensor World::all_gather(const at::Tensor& tensor) const {
  check_dense(tensor, Use::kRead, rank(), "all_gather");
  const at::NoGradGuard no_grad;
  at::Tensor input = make_dense(tensor).view(-1);  // flat: engines differ about shapes
  at::Tensor output = at::empty({size() * input.numel()}, input.options());
  wait_for(*state_, "all_gather", describe_tensor(tensor),
           [&] { return backend()->_allgather_base(output, input); });
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), size());
  return output.view(sizes);
}

at::Tensor World::reduce_scatter(const at::Tensor& tensor, const ReduceOp& op) const {
  check_dense(tensor, Use::kRead, rank(), "reduce_scatter");
  if (tensor.dim() == 0 || tensor.size(0) != size()) {
    throw UsageError({.rank = rank(), .operation = "reduce_scatter"},
                     text::format("reduce_scatter was given {}, whose first dimension is not the "
                                  "{} ranks of this world.\nGive one part per rank.",
                                  describe_tensor(tensor), size()));
  }
  const at::NoGradGuard no_grad;
  at::Tensor input = make_dense(tensor).view(-1);
  at::Tensor output = at::empty({input.numel() / size()}, input.options());
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  wait_for(*state_, "reduce_scatter", describe_tensor(tensor),
           [&] { return backend()->_reduce_scatter_base(output, input, options); });
  return output.view(tensor.sizes().slice(1));
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
    sent = failure ? kFailure + to_text(cause_of(failure, 0, ErrorKind::kUsage)) : kAnswer + answer;
  }
  const std::string received = share_text(*this, sent, 0);
  if (failure) std::rethrow_exception(failure);
  if (received.front() == kFailure) {
    throw_cause(cause_from(std::string_view(received).substr(1)),
                {.rank = rank(), .peer = 0, .operation = "on_rank0"});
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
