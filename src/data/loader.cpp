#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <lockstep/error.h>
#include <lockstep/loader.h>

#include <chrono>
#include <limits>
#include <tuple>
#include <utility>

#include "base/gauges.h"
#include "base/log.h"
#include "base/text.h"
#include "data/preparer.h"
#include "data/stream.h"

namespace lockstep {
namespace {

constexpr int kMaxEmptyEpochs = 1000;

}  // namespace

// The program's sampler knows of what was handed out only. For each epoch a Preparer gets a sampler
// or a stream of its own, from which its workers draw ahead.
struct LoaderBase::Impl {
  using Sampler = std::variant<DistributedSampler, EvalSampler, StreamSampler>;
  using Ahead = std::variant<DistributedSampler, EvalSampler, RecordStream>;

  // Constant after construction.
  const detail::LoaderSource source;
  const LoaderOptions options;
  const bool is_to_device;

  Sampler sampler;
  std::int64_t pass = 0;     // of a DistributedSampler, that workers draw for
  SamplerState place = {};   // of a stream, which has no sampler that knows it
  bool is_place_new = true;  // nothing was handed out since it was set
  int num_empty = 0;         // epochs of a stream, one after the other
  double waited_ms = 0;
  const std::shared_ptr<Gauges> gauges = Gauges::of_process();  // for who looks at the job
  std::unique_ptr<Preparer> preparer;                           // of the epoch that has begun

  Impl(detail::LoaderSource its_source, Sampler its_sampler, const LoaderOptions& its_options)
      : source(std::move(its_source)),
        options(its_options),
        is_to_device(its_options.device && !its_options.device->is_cpu()),
        sampler(std::move(its_sampler)) {
    if (const auto* const stream = std::get_if<StreamSampler>(&sampler)) {
      place.kind = SamplerKind::kRecords;
      place.num_shards = static_cast<std::int64_t>(source.num_shards);
      place.seed = stream->options().seed;
      if (stream->options().by == ShardBy::kShard) place.num_ranks = stream->num_ranks();
    }
  }

  void begin() {
    preparer.reset();
    Epoch epoch;
    auto ahead = std::make_shared<Ahead>(begin_pass(epoch));
    waited_ms = 0;
    preparer = std::make_unique<Preparer>(
        options.threads, options.ahead, [this, ahead, epoch] { return draw(*ahead, epoch); },
        [this](detail::Draw draw) { return make(std::move(draw)); });
  }

  Ahead begin_pass(Epoch& epoch) {
    if (auto* const shared = std::get_if<DistributedSampler>(&sampler)) {
      auto [own, its_pass] = shared->begin_pass(options.batch_size, options.drop_last);
      pass = its_pass;
      epoch = {.number = own.epoch(), .seed = own.state().seed};
      return std::move(own);
    }
    if (auto* const eval = std::get_if<EvalSampler>(&sampler)) {
      EvalSampler own = *eval;
      own.reset();
      return own;
    }
    if (!is_place_new) move_to(place.epoch + 1);
    epoch = {.number = place.epoch, .seed = place.seed};
    return RecordStream(source, std::get<StreamSampler>(sampler), epoch, place.consumed,
                        options.batch_size, options.threads);
  }

  void move_to(std::int64_t epoch) {
    place.epoch = epoch;
    place.last_consumed = std::exchange(place.consumed, 0);
    is_place_new = true;
  }

  // On a worker, in its turn.
  std::optional<detail::Draw> draw(Ahead& ahead, const Epoch& epoch) const {
    std::optional<detail::Draw> result;
    if (auto* const stream = std::get_if<RecordStream>(&ahead)) {
      result = stream->next();
    } else {
      auto* const training = std::get_if<DistributedSampler>(&ahead);
      auto indices = training != nullptr ? training->next(options.batch_size)
                                         : std::get<EvalSampler>(ahead).next(options.batch_size);
      if (indices) result = detail::Draw{.info = {.indices = std::move(*indices), .epoch = epoch}};
    }
    const bool is_short = result && result->info.indices.size() < options.batch_size;
    if (is_short && options.drop_last) return std::nullopt;
    return result;
  }

  // On a worker.
  std::shared_ptr<void> make(detail::Draw draw) const {
    std::shared_ptr<void> batch = source.make(std::move(draw));
    if (is_to_device && at::isAccelerator(options.device->type())) {
      source.each_tensor(batch.get(), [](at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.device().is_cpu()) return;
        try {
          tensor = tensor.pin_memory();
        } catch (const c10::Error&) {
          // The device has no pinned memory: then the copy waits, and is right all the same.
        }
      });
    }
    return batch;
  }

  // A bad batch counts, too: a resume goes on behind it.
  void count(std::size_t num_samples) {
    if (auto* const training = std::get_if<DistributedSampler>(&sampler)) {
      training->use(num_samples, pass);
    } else if (const auto* const stream = std::get_if<StreamSampler>(&sampler)) {
      place.consumed += static_cast<std::int64_t>(num_samples) * stream->num_ranks();
      is_place_new = false;
    }
  }

  void end_stream() {
    preparer.reset();
    const auto* const stream = std::get_if<StreamSampler>(&sampler);
    if (stream == nullptr) return;
    num_empty = place.consumed == 0 ? num_empty + 1 : 0;
    if (num_empty > 0) check_empty(*stream);
    move_to(place.epoch + 1);
  }

  // Where ranks may have different numbers of records, others may go on: an epoch without any is
  // nothing but short. Dealt out record by record, no rank has more than the first.
  void check_empty(const StreamSampler& stream) const {
    const bool are_all_empty =
        stream.options().by == ShardBy::kRecord && (stream.options().is_even || stream.rank() == 0);
    if (are_all_empty) {
      throw UsageError(
          {.rank = stream.rank(), .operation = "Loader"},
          text::format("An epoch has no batch: the {} shards do not hold a record, or, with "
                       "drop_last, a batch for each rank.\nUse more data, fewer ranks or smaller "
                       "batches.",
                       source.num_shards));
    }
    if (num_empty == 1) {
      Log(stream.rank())
          .warning(
              "an epoch has no batch for this rank. If the others have none either, look at the {} "
              "shards, and at drop_last.",
              source.num_shards);
    }
    // A program that waits for other ranks in each epoch does not come so far.
    if (num_empty < kMaxEmptyEpochs) return;
    throw UsageError(
        {.rank = stream.rank(), .operation = "Loader"},
        text::format("{} epochs in a row have no batch for this rank.\nUse shards with more "
                     "records, fewer ranks or smaller batches, or ShardBy::kRecord.",
                     num_empty));
  }

  void load_stream(const SamplerState& state) {
    const auto& stream = std::get<StreamSampler>(sampler);
    const ErrorPlace where{.rank = stream.rank(), .operation = "Loader"};
    const bool has_next = state.epoch < std::numeric_limits<std::int64_t>::max();
    if (state.epoch < 0 || state.consumed < 0 || !has_next) {
      throw UsageError(where, text::format("The state says epoch {} with {} records consumed.\n"
                                           "Give a state that a loader has saved.",
                                           state.epoch, state.consumed));
    }
    if (state.kind != SamplerKind::kRecords) {
      throw UsageError(where,
                       "The state is that of a sampler, this loader reads shards in order.\nResume "
                       "with the kind of loader that the run began with.");
    }
    if (state.consumed > 0 && state.num_ranks != place.num_ranks) {
      const auto name = [](std::int64_t ranks) {
        return ranks == 0 ? std::string("is for any number of ranks")
                          : text::format("reads each shard on one of {} ranks", ranks);
      };
      throw UsageError(where,
                       text::format("The state in the middle of an epoch {}, this loader {}.\nUse "
                                    "as many ranks and the same ShardBy as before, or resume "
                                    "between epochs.",
                                    name(state.num_ranks), name(place.num_ranks)));
    }
    if (state.consumed > 0 && state.num_shards != place.num_shards) {
      throw UsageError(where,
                       text::format("The state in the middle of an epoch is of {} shards, this "
                                    "loader has {}.\nResume with the same shards, or between "
                                    "epochs.",
                                    state.num_shards, place.num_shards));
    }
    place.seed = state.seed;
    place.epoch = state.epoch;
    place.consumed = state.consumed;
    place.last_consumed = state.last_consumed;
    is_place_new = true;
  }
};

namespace {

[[noreturn]] void refuse_loader(const std::string& message) {
  throw UsageError({.operation = "Loader"}, message);
}

void check_loader(const detail::LoaderSource& source, const LoaderOptions& options) {
  if (!source.make) {
    refuse_loader("There is no data set: the pointer is empty.\nMake it first.");
  }
  if (options.batch_size < 1 || options.threads < 0 || options.ahead < 1) {
    refuse_loader(
        text::format("The options are batch_size {}, threads {}, ahead {}.\nGive a batch size and "
                     "ahead from 1, threads from 0.",
                     options.batch_size, options.threads, options.ahead));
  }
  if (!options.device || options.device->is_cpu()) return;
  if (!source.each_tensor) {
    refuse_loader(
        text::format("Batches are to go to {}, but the loader does not know their tensors.\nGive "
                     "their type a member each_tensor(visit), or copy them yourself.",
                     options.device->str()));
  }
  try {
    at::empty({1}, at::TensorOptions().device(*options.device));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    refuse_loader(
        text::format("Batches are to go to {}, which cannot be used here: {}\nGive a "
                     "device that this process sees.",
                     options.device->str(), text.substr(0, text.find('\n'))));
  }
}

void check_size(std::size_t num_sampled, std::size_t size) {
  if (num_sampled == size) return;
  refuse_loader(
      text::format("The sampler draws from {} samples, the data set has {}.\nMake the "
                   "sampler with the data set's size.",
                   num_sampled, size));
}

}  // namespace

LoaderBase::LoaderBase(detail::LoaderSource source, IndexSampler sampler,
                       const LoaderOptions& options) {
  check_loader(source, options);
  check_size(std::visit([](const auto& one) { return one.num_samples(); }, sampler), *source.size);
  const auto* const training = std::get_if<DistributedSampler>(&sampler);
  if (training != nullptr && options.batch_size > training->samples_per_epoch()) {
    refuse_loader(
        text::format("A batch has {} samples, but this rank has only {} in an epoch.\nUse "
                     "smaller batches or fewer ranks.",
                     options.batch_size, training->samples_per_epoch()));
  }
  impl_ = std::make_unique<Impl>(
      std::move(source),
      std::visit([](auto& one) { return Impl::Sampler(std::move(one)); }, sampler), options);
}

LoaderBase::LoaderBase(detail::LoaderSource source, const StreamSampler& sampler,
                       const LoaderOptions& options) {
  check_loader(source, options);
  const bool is_by_shard = sampler.options().by == ShardBy::kShard;
  const auto least = static_cast<std::size_t>(is_by_shard ? sampler.num_ranks() : 1);
  if (source.num_shards < least) {
    refuse_loader(
        text::format("There are {} shards for {} ranks, each of which is to read its "
                     "own.\nMake more shards, or use ShardBy::kRecord.",
                     source.num_shards, sampler.num_ranks()));
  }
  impl_ = std::make_unique<Impl>(std::move(source), sampler, options);
}

LoaderBase::~LoaderBase() = default;
LoaderBase::LoaderBase(LoaderBase&&) noexcept = default;
LoaderBase& LoaderBase::operator=(LoaderBase&&) noexcept = default;

void LoaderBase::begin_epoch() { impl_->begin(); }

std::shared_ptr<void> LoaderBase::next_batch() {
  if (!impl_->preparer) impl_->begin();
  const auto start = std::chrono::steady_clock::now();
  auto prepared = [&] {
    const DoingScope doing(*impl_->gauges, Doing::kLoading);
    return impl_->preparer->take();
  }();
  impl_->waited_ms +=
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  if (!prepared) {
    impl_->end_stream();
    return nullptr;
  }
  impl_->count(prepared->num_samples);
  impl_->gauges->add_samples(static_cast<std::int64_t>(prepared->num_samples));
  if (const auto* const error = std::get_if<std::exception_ptr>(&prepared->result)) {
    if (!prepared->is_drawn) {
      impl_->preparer.reset();
      impl_->is_place_new = true;  // to be tried again from here
    }
    std::rethrow_exception(*error);
  }
  auto batch = std::get<std::shared_ptr<void>>(std::move(prepared->result));
  if (impl_->is_to_device) {
    impl_->source.each_tensor(batch.get(), [device = *impl_->options.device](at::Tensor& tensor) {
      if (tensor.defined()) tensor = tensor.to(device, /*non_blocking=*/tensor.is_pinned());
    });
  }
  return batch;
}

SamplerState LoaderBase::state() const {
  if (std::holds_alternative<StreamSampler>(impl_->sampler)) return impl_->place;
  const auto* const sampler = std::get_if<DistributedSampler>(&impl_->sampler);
  return sampler == nullptr ? SamplerState{.kind = SamplerKind::kEvaluation} : sampler->state();
}

void LoaderBase::load_state(const SamplerState& state) {
  if (std::holds_alternative<StreamSampler>(impl_->sampler)) impl_->load_stream(state);
  auto* const sampler = std::get_if<DistributedSampler>(&impl_->sampler);
  if (sampler != nullptr) sampler->load_state(state);
  // Version 0.1 gave loaders with an EvalSampler the state of a run that has not begun.
  if (std::holds_alternative<EvalSampler>(impl_->sampler) &&
      state.kind != SamplerKind::kEvaluation && state != SamplerState{}) {
    refuse_loader(
        "The state is that of a training, this loader is for evaluation.\nResume with the kind of "
        "loader that the run began with.");
  }
  impl_->preparer.reset();
}

void LoaderBase::move_to(const World& world, const SamplerState& state) {
  auto* const sampler = std::get_if<DistributedSampler>(&impl_->sampler);
  if (sampler == nullptr) {
    refuse_loader(
        "The ranks have changed, and the loader has no DistributedSampler, which can deal out its "
        "samples anew.\nUse one, or leave the loader out of the Checkpointer.");
  }
  impl_->preparer.reset();
  sampler->move_to(world, state);
}

double LoaderBase::waiting_ms() const { return impl_->waited_ms; }

}  // namespace lockstep
