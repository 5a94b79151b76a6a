// PowerSGD (Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization", 2019): a gradient that is a matrix is sent as two thin factors.
//
// Vocabulary, for one matrix M of n rows and m columns and factors of r columns. Factors are stored
// by columns, so `left` is [r, n] and `right` is [r, m]:
//   1. M is the gradient plus what earlier steps have left over (error feedback, a rank's own).
//   2. left = M right, with the right factor of the last step (warm start) or a random one; summed
//      over ranks, then made orthonormal.
//   3. right = M^T left, averaged over ranks.
//   4. left right^T is the result, one step of subspace iteration towards the best approximation of
//      the mean of M that has rank r. M minus the result is left over.
// All left factors of a bucket travel in one collective, all right ones in another, and gradients
// that are not worth it (vectors, small matrices) in a third.
//
// Same bits on all ranks: what is done to a factor after its all-reduce is done by low_rank.h, or
// on a device by low_rank_device.h, where the host waits for nothing. Products with M are a rank's
// own, and go into an all-reduce: any library may compute them. A step with inf or NaN, which
// programs throw away (loss scaling does), leaves the state as it was.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <lockstep/error.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "ddp/hooks/comm_hooks.h"
#include "ddp/hooks/low_rank.h"
#include "ddp/hooks/low_rank_device.h"

namespace lockstep {
namespace {

// A gradient that is sent as factors, and what is kept of it from step to step.
struct Matrix {
  std::size_t slot = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  at::Tensor right;   // undefined: begin with a random one
  at::Tensor memory;  // what was left over; undefined: nothing
};

struct BucketState {
  at::ScalarType type = at::kFloat;
  std::vector<std::vector<std::int64_t>> sizes;  // of the gradients
  std::vector<Matrix> matrices;
  std::vector<std::size_t> whole;  // slots of the other gradients
  Random random;                   // for right factors to begin with
};

at::ScalarType type_of_factors(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// The vectors of all matrices, one behind the other in `packed`; `parts` has a view for each.
struct Factors {
  at::Tensor packed;
  std::vector<at::Tensor> parts;
};

Factors make_factors(const BucketState& state, std::int64_t num_vectors,
                     std::int64_t Matrix::*length, const at::TensorOptions& options) {
  std::int64_t total = 0;
  for (const Matrix& matrix : state.matrices) total += num_vectors * matrix.*length;
  Factors factors{.packed = at::empty({total}, options), .parts = {}};
  std::int64_t begin = 0;
  for (const Matrix& matrix : state.matrices) {
    const std::int64_t count = num_vectors * matrix.*length;
    factors.parts.push_back(factors.packed.narrow(0, begin, count).view({num_vectors, -1}));
    begin += count;
  }
  return factors;
}

// One bucket on its way. Memories and factors are changed in finish() only: a backward that ended
// in an error leaves no traces in them.
class Journey {
 public:
  Journey(const PowerSgdOptions& options, GradBucket bucket, std::shared_ptr<BucketState> state,
          HookComm& comm)
      : options_(options),
        bucket_(std::move(bucket)),
        state_(std::move(state)),
        random_(state_->random),
        comm_(comm) {
    const auto options_of_factors = bucket_.flat.options().dtype(type_of_factors(state_->type));
    left_ = make_factors(*state_, options_.rank, &Matrix::num_rows, options_of_factors);
    right_ = make_factors(*state_, options_.rank, &Matrix::num_columns, options_of_factors);
    for (std::size_t i = 0; i < state_->matrices.size(); ++i) {
      const Matrix& matrix = state_->matrices[i];
      inputs_.push_back(input_of(matrix));
      if (!matrix.right.defined()) fill_random_part(right_.parts[i]);
      begins_.push_back(matrix.right.defined() ? matrix.right : right_.parts[i]);
      at::mm_out(left_.parts[i], begins_[i], inputs_[i].t());
      // Kept, where the host will not know whether this step is finite: finish() writes over it.
      if (!begins_[i].is_cpu() && !matrix.right.defined()) begins_[i] = begins_[i].clone();
    }
    left_work_ = comm_.all_reduce(left_.packed);

    std::vector<at::Tensor> pieces;
    for (const std::size_t slot : state_->whole) pieces.push_back(gradient(slot).reshape(-1));
    if (!pieces.empty()) whole_ = at::cat(pieces);
    if (whole_.defined()) finish_whole_ = start_mean(whole_, comm_);
  }

  void finish() {
    left_work_->wait();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor& left = left_.parts[i];
      if (left.is_cpu()) {
        AT_DISPATCH_FLOATING_TYPES(left.scalar_type(), "power_sgd", [&] {
          make_orthonormal(left.mutable_data_ptr<scalar_t>(), left.size(0), left.size(1));
        });
      } else {
        make_orthonormal_on_device(left);
      }
      at::mm_out(right_.parts[i], left, inputs_[i]);
    }
    const auto finish_right = start_mean(right_.packed, comm_);
    finish_whole();  // while the factors travel
    finish_right();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      left_.packed.is_cpu() ? finish_matrix(i) : finish_matrix_on_device(i);
    }
    state_->random = random_;
  }

 private:
  const at::Tensor& gradient(std::size_t slot) const { return bucket_.gradients[slot]; }

  void fill_random_part(const at::Tensor& part) {
    const at::Tensor values = part.is_cpu() ? part : at::empty_like(part, at::device(at::kCPU));
    AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "power_sgd", [&] {
      fill_random(values.mutable_data_ptr<scalar_t>(), values.numel(), random_);
    });
    if (!part.is_cpu()) part.copy_(values, /*non_blocking=*/true);
  }

  // The gradient in the order of its dimensions, whatever its strides, plus what was left over. New
  // memory if there is error feedback: what is then left over takes its place.
  at::Tensor input_of(const Matrix& matrix) const {
    const at::Tensor rows =
        gradient(matrix.slot).reshape({matrix.num_rows, matrix.num_columns}).to(left_.packed);
    if (!options_.error_feedback) return rows;
    return matrix.memory.defined() ? at::add(rows, matrix.memory) : rows.clone();
  }

  void finish_whole() const {
    if (!whole_.defined()) return;
    finish_whole_();
    std::int64_t begin = 0;
    for (const std::size_t slot : state_->whole) {
      const at::Tensor& target = gradient(slot);
      target.copy_(whole_.narrow(0, begin, target.numel()).view(target.sizes()));
      begin += target.numel();
    }
  }

  void finish_matrix(std::size_t i) const {
    Matrix& matrix = state_->matrices[i];
    const at::Tensor& target = gradient(matrix.slot);
    const at::Tensor& left = left_.parts[i];
    const at::Tensor& right = right_.parts[i];
    if (!at::isfinite(right).all().item<bool>()) {
      target.fill_(std::numeric_limits<double>::quiet_NaN());
      return;
    }
    const bool is_in_place = target.is_contiguous() && target.scalar_type() == left.scalar_type();
    const at::Tensor result = is_in_place ? target : at::empty(target.sizes(), left.options());
    AT_DISPATCH_FLOATING_TYPES(left.scalar_type(), "power_sgd", [&] {
      multiply(left.const_data_ptr<scalar_t>(), right.const_data_ptr<scalar_t>(), left.size(0),
               matrix.num_rows, matrix.num_columns, result.mutable_data_ptr<scalar_t>());
    });
    if (!is_in_place) target.copy_(result);
    if (options_.warm_start) matrix.right = right;
    if (options_.error_feedback) {
      // From what was written: what rounding to 16 bits has taken is left over, too.
      inputs_[i].sub_(target.reshape(inputs_[i].sizes()));
      matrix.memory = inputs_[i];
    }
  }

  // As above, but whether all is finite is known to the device alone.
  void finish_matrix_on_device(std::size_t i) const {
    Matrix& matrix = state_->matrices[i];
    const at::Tensor& target = gradient(matrix.slot);
    const at::Tensor& right = right_.parts[i];
    const at::Tensor is_finite = at::isfinite(right).all();
    const at::Tensor result = multiply_on_device(left_.parts[i], right);
    const at::Tensor nan = at::full_like(result, std::numeric_limits<double>::quiet_NaN());
    target.copy_(at::where(is_finite, result, nan).view(target.sizes()));
    if (options_.warm_start) matrix.right = at::where(is_finite, right, begins_[i]);
    if (options_.error_feedback) {
      const at::Tensor left_over = inputs_[i] - target.reshape(inputs_[i].sizes());
      matrix.memory =
          at::where(is_finite, left_over,
                    matrix.memory.defined() ? matrix.memory : at::zeros_like(left_over));
    }
  }

  const PowerSgdOptions options_;
  const GradBucket bucket_;
  const std::shared_ptr<BucketState> state_;
  Random random_;
  HookComm& comm_;
  std::vector<at::Tensor> inputs_;  // M, of each matrix
  std::vector<at::Tensor> begins_;  // the right factors that this step begins with
  Factors left_;
  Factors right_;
  c10::intrusive_ptr<c10d::Work> left_work_;
  at::Tensor whole_;  // the gradients that are sent as they are; undefined if there are none
  std::function<void()> finish_whole_;
};

class PowerSgdHook : public CommHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options) : options_(options) {
    const auto refuse = [](const std::string& message) {
      throw UsageError({.operation = "power_sgd_hook"}, message);
    };
    if (options_.rank < 1) {
      refuse(
          text::format("PowerSgdOptions::rank is {}.\nGive 1 or more: the columns of the factors.",
                       options_.rank));
    }
    if (options_.start_step < 0) {
      refuse(
          text::format("PowerSgdOptions::start_step is {}.\nGive 0 or more: the number of steps "
                       "before gradients are compressed.",
                       options_.start_step));
    }
    if (!(options_.min_compression >= 1) || !std::isfinite(options_.min_compression)) {
      refuse(
          text::format("PowerSgdOptions::min_compression is {}.\nGive 1 or more: below 1, factors "
                       "may be larger than what they stand for.",
                       options_.min_compression));
    }
  }

  std::string text() const override {
    return text::format(
        "power_sgd(rank={}, start_step={}, warm_start={}, error_feedback={}, min_compression={}, "
        "seed={})",
        options_.rank, options_.start_step, options_.warm_start, options_.error_feedback,
        options_.min_compression, options_.seed);
  }

  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    const at::NoGradGuard no_grad;
    if (bucket.index == 0) {
      is_before_start_ = num_steps_ < options_.start_step;
      return [this, rest = start_bucket(std::move(bucket), comm)] {
        rest();
        ++num_steps_;  // not before: a step may be dropped
      };
    }
    return start_bucket(std::move(bucket), comm);
  }

  HookState state() const override {
    if (num_steps_ == 0) return {};
    HookState all = loaded_;
    all[kNumSteps] = at::scalar_tensor(num_steps_, at::kLong);
    for (const auto& [index, state] : states_) {
      std::ostringstream random;
      random << state->random;
      std::string text = random.str();
      const auto length = static_cast<std::int64_t>(text.size());
      all[text::format("{}.random", index)] =
          at::from_blob(text.data(), {length}, at::TensorOptions(at::kByte)).clone();
      for (const Matrix& matrix : state->matrices) {
        const std::string name = text::format("{}.{}", index, matrix.slot);
        if (matrix.right.defined()) all[name + ".right"] = matrix.right;
        if (matrix.memory.defined()) all[name + ".memory"] = matrix.memory;
      }
    }
    return all;
  }

  void load_state(const HookState& state, int epoch) override {
    states_.clear();
    epoch_ = epoch;
    loaded_ = state;
    const auto num_steps = loaded_.extract(kNumSteps);
    num_steps_ = num_steps.empty() ? 0 : num_steps.mapped().item<std::int64_t>();
  }

 private:
  static constexpr const char* kNumSteps = "num_steps";

  std::function<void()> start_bucket(GradBucket bucket, HookComm& comm) {
    if (is_before_start_ || bucket.flat.is_complex()) return start_mean(bucket.flat, comm);
    std::shared_ptr<BucketState> state = state_of(bucket);
    if (state->matrices.empty()) return start_mean(bucket.flat, comm);
    auto journey = std::make_shared<Journey>(options_, std::move(bucket), std::move(state), comm);
    return [journey] {
      const at::NoGradGuard no_grad_later;
      journey->finish();
    };
  }

  std::shared_ptr<BucketState> state_of(const GradBucket& bucket) {
    if (bucket.epoch != epoch_) {
      states_.clear();
      loaded_.clear();
    }
    epoch_ = bucket.epoch;
    std::vector<std::vector<std::int64_t>> sizes;
    for (const at::Tensor& gradient : bucket.gradients) sizes.push_back(gradient.sizes().vec());
    std::shared_ptr<BucketState>& state = states_[bucket.index];
    const at::ScalarType type = bucket.flat.scalar_type();
    if (!state || state->type != type || state->sizes != sizes) {
      state = std::make_shared<BucketState>(
          BucketState{.type = type, .sizes = sizes, .matrices = {}, .whole = {}, .random = {}});
      state->random.seed(options_.seed +
                         0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(bucket.index));
      for (std::size_t slot = 0; slot < sizes.size(); ++slot) {
        if (const auto matrix = as_matrix(slot, bucket.gradients[slot])) {
          state->matrices.push_back(*matrix);
        } else {
          state->whole.push_back(slot);
        }
      }
      take_loaded(bucket, *state);
    }
    return state;
  }

  // What load_state() brought for this bucket. What does not fit is of other options: left out.
  void take_loaded(const GradBucket& bucket, BucketState& state) {
    const auto take = [&](const std::string& name, const std::vector<std::int64_t>& sizes) {
      auto node = loaded_.extract(name);
      const bool fits = !node.empty() && node.mapped().sizes() == at::IntArrayRef(sizes) &&
                        node.mapped().scalar_type() == type_of_factors(state.type);
      return fits ? node.mapped().to(bucket.flat.device()) : at::Tensor();
    };
    const auto random = loaded_.extract(text::format("{}.random", bucket.index));
    if (!random.empty()) {
      const at::Tensor bytes = random.mapped().contiguous();
      std::istringstream(
          std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes())) >>
          state.random;
    }
    for (Matrix& matrix : state.matrices) {
      const std::string name = text::format("{}.{}", bucket.index, matrix.slot);
      matrix.right = take(name + ".right", {options_.rank, matrix.num_columns});
      matrix.memory = take(name + ".memory", {matrix.num_rows, matrix.num_columns});
    }
  }

  std::optional<Matrix> as_matrix(std::size_t slot, const at::Tensor& gradient) const {
    if (gradient.dim() < 2 || gradient.numel() == 0) return std::nullopt;
    const Matrix matrix{.slot = slot,
                        .num_rows = gradient.size(0),
                        .num_columns = gradient.numel() / gradient.size(0),
                        .right = {},
                        .memory = {}};
    const double num_sent =
        static_cast<double>(matrix.num_rows + matrix.num_columns) * options_.rank;
    // With a compression of 1 or more, the factors have fewer vectors than the matrix has rows or
    // columns; otherwise these could not be orthonormal.
    if (num_sent * options_.min_compression >= static_cast<double>(gradient.numel())) {
      return std::nullopt;
    }
    return matrix;
  }

  const PowerSgdOptions options_;
  std::int64_t num_steps_ = 0;
  bool is_before_start_ = false;  // this step
  int epoch_ = 0;
  std::map<int, std::shared_ptr<BucketState>> states_;  // by bucket
  HookState loaded_;                                    // of buckets that have not come since then
};

}  // namespace

std::shared_ptr<CommHook> power_sgd_hook(const PowerSgdOptions& options) {
  return std::make_shared<PowerSgdHook>(options);
}

}  // namespace lockstep
