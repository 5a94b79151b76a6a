#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/sampler.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "data/orders.h"
#include "data/permutation.h"

namespace lockstep {
namespace {

void check_place(int rank, int num_ranks) {
  if (num_ranks >= 1 && rank >= 0 && rank < num_ranks) return;
  throw UsageError({.operation = "sampler"},
                   text::format("Rank {} of {} was given.\nRanks are 0 to the number of ranks - 1.",
                                rank, num_ranks));
}

std::int64_t int_in(torch::serialize::InputArchive& archive, const std::string& name) {
  at::Tensor value;
  archive.read(name, value);
  return value.item<std::int64_t>();
}

void write_int(torch::serialize::OutputArchive& archive, const std::string& name,
               std::int64_t value) {
  archive.write(name, at::tensor(value, at::TensorOptions(at::kLong)));
}

}  // namespace

struct DistributedSampler::State {
  State() = default;
  State(const State& its, bool are_whole) LOCKSTEP_REQUIRES(its.mutex)
      : ranks(its.ranks),
        global_rank(its.global_rank),
        num_ranks(its.num_ranks),
        options(its.options),
        lengths(its.lengths),
        num_samples(its.num_samples),
        begin(its.begin),
        is_whole(are_whole),
        order(its.order) {}

  LogicalRanks ranks;   // whose samples these are, in turns; changed by move_to() alone
  int global_rank = 0;  // what errors call it; the same
  // Constant after construction.
  std::int64_t num_ranks = 1;
  SamplerOptions options;  // without the lengths, which copies share
  std::shared_ptr<const std::vector<std::int64_t>> lengths;

  Mutex mutex;
  std::int64_t num_samples LOCKSTEP_GUARDED_BY(mutex) = 0;
  SamplerState begin LOCKSTEP_GUARDED_BY(mutex);      // of what is left of the epoch
  std::int64_t drawn LOCKSTEP_GUARDED_BY(mutex) = 0;  // by this rank, since then
  // In a round each of the ranks has its turn.
  std::int64_t before LOCKSTEP_GUARDED_BY(mutex) = 0;   // drawn by each of them, in earlier rounds
  int turn LOCKSTEP_GUARDED_BY(mutex) = 0;              // whose it is
  std::int64_t in_turn LOCKSTEP_GUARDED_BY(mutex) = 0;  // drawn in it so far
  int num_batches LOCKSTEP_GUARDED_BY(mutex) = 0;       // the same in batches
  bool is_over LOCKSTEP_GUARDED_BY(mutex) = false;      // the rest is too little for a round
  bool is_whole LOCKSTEP_GUARDED_BY(mutex) = false;     // of a loader that drops short batches
  std::int64_t pass LOCKSTEP_GUARDED_BY(mutex) = 0;     // how often `begin` was set
  // The whole order, for kAsPython and kByLength. Shared, not changed.
  std::shared_ptr<const std::vector<std::int64_t>> order LOCKSTEP_GUARDED_BY(mutex);

  std::int64_t count() const LOCKSTEP_REQUIRES(mutex) {  // of each rank, in what is left
    return share_of(num_samples - begin.consumed);
  }
  std::int64_t share_of(std::int64_t samples) const {
    return options.drop_last ? samples / num_ranks : (samples + num_ranks - 1) / num_ranks;
  }

  void check_size(std::int64_t samples) const {
    if (options.order == SampleOrder::kByLength &&
        (options.bucket_size < 1 || lengths->size() != static_cast<std::size_t>(samples))) {
      throw UsageError(
          {.rank = global_rank, .operation = "DistributedSampler"},
          text::format(
              "There are {} lengths for {} samples, and buckets of {}.\nGive the length of "
              "each sample, and a bucket_size from 1.",
              lengths->size(), samples, options.bucket_size));
    }
    if (samples > 0 && (!options.drop_last || samples >= num_ranks)) return;
    throw UsageError(
        {.rank = global_rank, .operation = "DistributedSampler"},
        samples == 0
            ? std::string("The data set has no samples.\nCheck where it is read from.")
            : text::format("The data set has {} samples for {} ranks, and with drop_last none is "
                           "left.\nUse fewer ranks, or drop_last = false.",
                           samples, num_ranks));
  }

  void prepare() LOCKSTEP_REQUIRES(mutex) {
    order.reset();
    const auto epoch = static_cast<std::uint64_t>(begin.epoch);
    if (options.order == SampleOrder::kAsPython) {
      order = std::make_shared<const std::vector<std::int64_t>>(
          order_as_python(num_samples, begin.seed + epoch));
    } else if (options.order == SampleOrder::kByLength) {
      order = std::make_shared<const std::vector<std::int64_t>>(
          order_by_length(*lengths, options.bucket_size, begin.seed, epoch));
    }
  }

  void load(const SamplerState& its) LOCKSTEP_REQUIRES(mutex) {
    if (its.epoch < 0 || its.consumed < 0 || its.consumed > num_samples) {
      throw UsageError(
          {.rank = global_rank, .operation = "DistributedSampler"},
          text::format(
              "The state says epoch {} with {} samples consumed, but the data set has {}.\n"
              "Resume with the data set that the run began with.",
              its.epoch, its.consumed, num_samples));
    }
    if (its.kind != SamplerKind::kSamples) {
      throw UsageError(
          {.rank = global_rank, .operation = "DistributedSampler"},
          text::format("The state is that of a loader {}.\nResume with the kind of "
                       "loader that the run began with.",
                       its.kind == SamplerKind::kRecords ? "which reads shards in order"
                                                         : "for evaluation"));
    }
    begin = {.seed = its.seed, .epoch = its.epoch, .consumed = its.consumed};
    begin_pass();
    prepare();
  }

  void begin_pass() LOCKSTEP_REQUIRES(mutex) {
    drawn = before = in_turn = 0;
    turn = num_batches = 0;
    is_over = false;
    ++pass;
  }

  // What each of the ranks must have left for a round. One without all its batches is not begun:
  // its gradients could not be averaged.
  bool is_round(std::int64_t left, std::size_t batch_size, bool are_whole) const {
    const auto others = static_cast<std::uint64_t>(options.batches_per_turn - 1);
    const std::uint64_t needed = others * batch_size + (are_whole ? batch_size : 1);
    return left > 0 && static_cast<std::uint64_t>(left) >= needed;
  }

  // Counts a batch; the turn may be over with it, and the round.
  void count_batch(std::int64_t samples) LOCKSTEP_REQUIRES(mutex) {
    drawn += samples;
    in_turn += samples;
    if (++num_batches < options.batches_per_turn && before + in_turn < count()) return;
    if (++turn == ranks.count) {
      turn = 0;
      before += in_turn;
    }
    in_turn = 0;
    num_batches = 0;
  }
};

DistributedSampler::DistributedSampler(std::size_t num_samples, const World& world,
                                       const SamplerOptions& options)
    : DistributedSampler(num_samples, world.logical_ranks(), world.logical_size(), options,
                         world.global_rank()) {}

DistributedSampler::DistributedSampler(std::size_t num_samples, int rank, int num_ranks,
                                       const SamplerOptions& options)
    : DistributedSampler(num_samples, {.first = rank, .count = 1}, num_ranks, options, rank) {}

DistributedSampler::DistributedSampler(std::size_t num_samples, LogicalRanks ranks, int num_ranks,
                                       const SamplerOptions& options, int global_rank)
    : state_(std::make_shared<State>()) {
  check_place(ranks.first, num_ranks);
  if (options.batches_per_turn < 1) {
    throw UsageError({.rank = global_rank, .operation = "DistributedSampler"},
                     text::format("SamplerOptions::batches_per_turn is {}.\nGive 1 or more.",
                                  options.batches_per_turn));
  }
  state_->ranks = ranks;
  state_->global_rank = global_rank;
  state_->num_ranks = num_ranks;
  state_->options = options;
  state_->lengths =
      std::make_shared<const std::vector<std::int64_t>>(std::exchange(state_->options.lengths, {}));
  state_->num_samples = static_cast<std::int64_t>(num_samples);
  state_->begin.seed = options.seed;
  state_->check_size(state_->num_samples);
  state_->prepare();
}

void DistributedSampler::reset(std::optional<std::size_t> num_samples) {
  const MutexLock lock(state_->mutex);
  if (num_samples) {
    state_->check_size(static_cast<std::int64_t>(*num_samples));
    state_->num_samples = static_cast<std::int64_t>(*num_samples);
  }
  if (state_->drawn > 0 || state_->count() <= 0 || state_->is_over) {  // begun, or over
    ++state_->begin.epoch;
    state_->begin.consumed = 0;
  }
  state_->begin_pass();
  state_->begin.consumed = std::min(state_->begin.consumed, state_->num_samples);
  state_->prepare();
}

std::pair<DistributedSampler, std::int64_t> DistributedSampler::begin_pass(std::size_t batch_size,
                                                                           bool is_whole) {
  reset();
  const auto has_round = [&] {
    const MutexLock lock(state_->mutex);
    const bool has = state_->is_round(state_->count(), batch_size, is_whole);
    state_->is_over = !has;
    return has;
  };
  if (!has_round()) reset();  // what is left of this epoch would be left out
  DistributedSampler own(*this);
  const MutexLock lock(state_->mutex);
  own.state_ = std::make_shared<State>(*state_, is_whole);
  return {std::move(own), state_->pass};
}

void DistributedSampler::use(std::size_t samples, std::int64_t pass) {
  const MutexLock lock(state_->mutex);
  if (pass == state_->pass) state_->drawn += static_cast<std::int64_t>(samples);
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  if (batch_size == 0) {
    throw UsageError({.rank = state_->global_rank, .operation = "DistributedSampler"},
                     "A batch of 0 samples was asked for.\nGive a batch size of at least 1.");
  }
  State& state = *state_;
  const MutexLock lock(state.mutex);
  const std::int64_t drawn = state.before + state.in_turn;
  const std::int64_t left = state.count() - drawn;
  const bool is_new_round = state.turn == 0 && state.num_batches == 0;
  if (left <= 0 || (is_new_round && !state.is_round(left, batch_size, state.is_whole))) {
    state.is_over = true;
    return std::nullopt;
  }
  const auto take = static_cast<std::int64_t>(
      std::min<std::uint64_t>(batch_size, static_cast<std::uint64_t>(left)));
  std::vector<std::size_t> indices(static_cast<std::size_t>(take));
  const Permutation permutation(static_cast<std::uint64_t>(state.num_samples), state.begin.seed,
                                static_cast<std::uint64_t>(state.begin.epoch));
  std::int64_t position =
      state.begin.consumed + drawn * state.num_ranks + state.ranks.first + state.turn;
  for (std::size_t& index : indices) {
    const std::int64_t at = position < state.num_samples ? position : position % state.num_samples;
    switch (state.options.order) {
      case SampleOrder::kShuffled:
        index = permutation(static_cast<std::uint64_t>(at));
        break;
      case SampleOrder::kAsPython:
      case SampleOrder::kByLength:
        index = static_cast<std::size_t>((*state.order)[static_cast<std::size_t>(at)]);
        break;
      case SampleOrder::kSequential:
        index = static_cast<std::size_t>(at);
    }
    position += state.num_ranks;
  }
  state.count_batch(take);
  return indices;
}

std::size_t DistributedSampler::num_samples() const {
  const MutexLock lock(state_->mutex);
  return static_cast<std::size_t>(state_->num_samples);
}

std::int64_t DistributedSampler::epoch() const {
  const MutexLock lock(state_->mutex);
  return state_->begin.epoch;
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  const MutexLock lock(state_->mutex);
  state_->load({.seed = state_->begin.seed, .epoch = epoch, .consumed = 0});
}

std::size_t DistributedSampler::samples_per_rank() const {
  const MutexLock lock(state_->mutex);
  return static_cast<std::size_t>(state_->count());
}

std::size_t DistributedSampler::samples_per_epoch() const {
  const MutexLock lock(state_->mutex);
  return static_cast<std::size_t>(state_->share_of(state_->num_samples));
}

SamplerState DistributedSampler::state(std::optional<std::size_t> used) const {
  const MutexLock lock(state_->mutex);
  const std::int64_t mine = used ? static_cast<std::int64_t>(*used) : state_->drawn;
  const std::int64_t most = state_->count() * state_->ranks.count;
  if (mine > most) {
    throw UsageError(
        {.rank = state_->global_rank, .operation = "DistributedSampler"},
        text::format("{} samples were said to be used, but this rank has {} in what is left of the "
                     "epoch.\nCount the samples since the last reset() or begin().",
                     mine, most));
  }
  SamplerState result = state_->begin;
  const std::int64_t of_each = mine / state_->ranks.count;  // between two rounds
  result.consumed = std::min(result.consumed + of_each * state_->num_ranks, state_->num_samples);
  return result;
}

void DistributedSampler::load_state(const SamplerState& state) {
  const MutexLock lock(state_->mutex);
  state_->load(state);
}

void DistributedSampler::move_to(const World& world, const SamplerState& state) {
  const MutexLock lock(state_->mutex);
  if (world.logical_size() != state_->num_ranks) {
    throw UsageError({.rank = world.global_rank(), .operation = "DistributedSampler"},
                     text::format("The sampler deals out to {} logical ranks, the world has {}.\n"
                                  "Make the sampler with the world.",
                                  state_->num_ranks, world.logical_size()));
  }
  state_->ranks = world.logical_ranks();
  state_->global_rank = world.global_rank();
  state_->load(state);
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const SamplerState now = state();
  write_int(archive, "seed", static_cast<std::int64_t>(now.seed));
  write_int(archive, "epoch", now.epoch);
  write_int(archive, "consumed", now.consumed);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  load_state({.seed = static_cast<std::uint64_t>(int_in(archive, "seed")),
              .epoch = int_in(archive, "epoch"),
              .consumed = int_in(archive, "consumed")});
}

EvalSampler::EvalSampler(std::size_t num_samples, const World& world)
    : EvalSampler(num_samples, world.rank(), world.size()) {}

EvalSampler::EvalSampler(std::size_t num_samples, int rank, int num_ranks)
    : num_samples_(num_samples),
      rank_(static_cast<std::size_t>(rank)),
      num_ranks_(static_cast<std::size_t>(num_ranks)),
      next_(rank_) {
  check_place(rank, num_ranks);
}

void EvalSampler::reset(std::optional<std::size_t> num_samples) {
  if (num_samples) num_samples_ = *num_samples;
  next_ = rank_;
}

std::optional<std::vector<std::size_t>> EvalSampler::next(std::size_t batch_size) {
  std::vector<std::size_t> indices;
  for (; next_ < num_samples_ && indices.size() < batch_size; next_ += num_ranks_) {
    indices.push_back(next_);
  }
  if (indices.empty()) return std::nullopt;
  return indices;
}

void EvalSampler::save(torch::serialize::OutputArchive& archive) const {
  write_int(archive, "next", static_cast<std::int64_t>(next_));
}

void EvalSampler::load(torch::serialize::InputArchive& archive) {
  next_ = static_cast<std::size_t>(int_in(archive, "next"));
}

}  // namespace lockstep
