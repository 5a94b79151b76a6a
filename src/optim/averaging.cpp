// The average of weights over steps, and statistics of BatchNorm that fit it.
//
// Weights are written so that autograd does not see it: after apply() they have the bits that they
// had before, so that graphs and accumulated gradients stay valid.

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/averaging.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>
#include <torch/nn/modules/batchnorm.h>

#include <atomic>

#include "base/cause.h"
#include "base/hash.h"
#include "base/text.h"
#include "ddp/shards.h"
#include "ddp/slices.h"
#include "world/each_once.h"
#include "world/exchange.h"
#include "world/host_memory.h"

namespace lockstep {
namespace {

std::atomic<int> next_number = 0;

at::ScalarType type_of_average(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

const std::shared_ptr<torch::nn::Module>& checked(const std::shared_ptr<torch::nn::Module>& model) {
  if (!model) {
    throw UsageError({.operation = "WeightAverage"},
                     "There is no model: the pointer is empty.\nMake the model first.");
  }
  return model;
}

}  // namespace

WeightAverage::WeightAverage(std::shared_ptr<torch::nn::Module> model,
                             const AveragingOptions& options)
    : WeightAverage(each_once(checked(model)->named_parameters()), options,
                    each_once(checked(model)->named_buffers())) {
  model_ = std::move(model);
}

WeightAverage::WeightAverage(std::vector<NamedTensor> parameters, const AveragingOptions& options,
                             std::vector<NamedTensor> buffers)
    : options_(options), number_(next_number++) {
  if (!(options.decay >= 0 && options.decay <= 1)) {
    throw UsageError({.operation = "WeightAverage"},
                     text::format("AveragingOptions::decay is {}.\nGive a number from 0 to 1, such "
                                  "as 0.999.",
                                  options.decay));
  }
  const at::NoGradGuard no_grad;
  for (const NamedTensor& one : buffers) buffers_.push_back(one.tensor);
  if (options.averages_buffers) {
    parameters.insert(parameters.end(), buffers.begin(), buffers.end());
  }
  for (const NamedTensor& one : parameters) {
    sources_.push_back(one.tensor);
    averages_.push_back(
        {one.name, at::empty_like(one.tensor, type_of_average(one.tensor.scalar_type()))});
    averages_.back().tensor.copy_(one.tensor);
  }
}

void WeightAverage::update() {
  const at::NoGradGuard no_grad;
  if (is_applied()) refuse_together();
  const double share = options_.rule == AverageRule::kEqual
                           ? 1 / static_cast<double>(num_updates_ + 1)
                           : 1 - options_.decay;
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> weights;
  std::vector<std::size_t> shared;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (const auto shards = Shards::of(sources_[i]); shards && shards->find(sources_[i])) {
      shared.push_back(i);
      continue;
    }
    at::Tensor& average = averages_[i].tensor;
    if (use_of(average) != nullptr) average = average.clone();  // it was shared until now
    const bool is_mean = average.is_floating_point() || average.is_complex();
    if (num_updates_ == 0 || !is_mean) {
      average.copy_(weights_of(sources_[i]));
      continue;
    }
    averages.push_back(average);
    weights.push_back(weights_of(sources_[i]).to(average.scalar_type()));
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, weights, share);
  if (!shared.empty()) update_shared(shared, share);
  ++num_updates_;
}

// Other ranks wait for this one where they share a model: they are told.
void WeightAverage::refuse_together() const {
  std::shared_ptr<Shards> shards;
  for (const at::Tensor& one : kept_) {
    if (!shards) shards = Shards::holder_of(one);
  }
  try {
    refuse_if_applied("update");
  } catch (...) {
    if (!shards) throw;
    shards->begin_update(
        0, 0, [] { return std::vector<std::string>(); }, std::current_exception());
  }
}

// Of parameters that the ranks of a host share: the averages are theirs together as well.
void WeightAverage::update_shared(const std::vector<std::size_t>& places, double share) {
  const auto shards = Shards::of(sources_[places.front()]);
  std::vector<std::size_t> mine;  // of this model; the others come next
  std::vector<std::size_t> others;
  std::vector<std::pair<std::size_t, TensorPiece>> pieces;
  for (const std::size_t i : places) {
    (Shards::of(sources_[i]) == shards ? mine : others).push_back(i);
  }
  for (const std::size_t i : mine) {
    for (TensorPiece& piece : Shards::cut({sources_[i]})) pieces.emplace_back(i, piece);
  }
  const std::string what =
      text::format("update {} of average {}, share {}{}", num_updates_, number_, share,
                   masters_ == nullptr ? "" : ", of master weights");
  shards->begin_update(pieces.size(), hash_bytes(what.data(), what.size()),
                       [&] { return std::vector<std::string>{what}; });
  const Shards::Writing writing{
      .write =
          [&](int, std::size_t index) {
            const auto& [i, piece] = pieces[index];
            const at::Tensor average = piece.of(averages_[i].tensor);
            const at::Tensor weights = piece.of(weights_of(sources_[i])).to(average.scalar_type());
            if (num_updates_ == 0) {
              average.copy_(weights);
            } else {
              at::_foreach_lerp_({average}, {weights}, share);
            }
          },
      .runs = [&](std::size_t index) -> shm::Journal::Runs {
        const auto& [i, piece] = pieces[index];
        const at::Tensor average = piece.of(averages_[i].tensor);
        return {{static_cast<std::byte*>(average.mutable_data_ptr()), average.nbytes()}};
      }};
  std::exception_ptr failure;
  try {
    for (const std::size_t i : mine) {
      at::Tensor& average = averages_[i].tensor;
      const at::Tensor place = shards->state(text::format("average {}", number_),
                                             shards->slot_of(sources_[i]), average.scalar_type());
      if (average.data_ptr() == place.data_ptr()) continue;
      if (shards->host().rank() == 0) place.copy_(average);
      average = place;
    }
    shards->host().barrier();
    shards->keep_journal(pieces.size(), Shards::kPieceElements * sizeof(double));
    shards->run_update(writing);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    shards->end_update(failure, {});
  } catch (...) {
    // A rank was lost, and the others have done what it had to do.
    if (shards->needs_repair()) shards->repair(writing);
    const bool is_done = shards->is_completed_by_others() && others.empty();
    if (is_done && shards->host().is_elastic()) return;
    if (is_done) ++num_updates_;
    throw;
  }
  if (!others.empty()) update_shared(others, share);
}

at::Tensor WeightAverage::weights_of(const at::Tensor& source) const {
  if (masters_ == nullptr) return source.detach();
  // Nobody but an optimizer writes to shared parameters, so their bits need no look.
  const at::Tensor master =
      Shards::of(source) ? masters_->master_since_write(source) : masters_->master_of(source);
  if (Slices::is_slice(master)) {
    throw UsageError({.operation = "WeightAverage::update"},
                     "Each rank has a part of the master weights (DdpOptions::shard on devices).\n"
                     "Average the parameters: leave out the optimizer, or use Shard::kNone.");
  }
  return master.defined() ? master : source.detach();
}

void WeightAverage::swap() {
  refuse_if_applied("apply");
  if (num_updates_ == 0) {
    throw UsageError({.operation = "WeightAverage::apply"},
                     "Nothing was averaged yet.\nCall update() after optimizer.step().");
  }
  // Other ranks use shared parameters meanwhile: this rank's tensors get other memory instead.
  const auto is_shared = [](const at::Tensor& one) { return use_of(one) != nullptr; };
  std::vector<at::Tensor> kept;  // all of it, before anything is written
  for (const at::Tensor& one : sources_) {
    kept.push_back(is_shared(one) ? one.detach() : one.detach().clone());
  }
  for (const at::Tensor& one : buffers_) kept.push_back(one.detach().clone());
  kept_ = std::move(kept);
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const at::Tensor& average = averages_[i].tensor;
    if (is_shared(sources_[i])) {
      sources_[i].set_data(average.to(sources_[i].scalar_type()));
    } else {
      sources_[i].data().copy_(average);
    }
  }
}

void WeightAverage::restore() {
  const std::vector<at::Tensor> kept = std::move(kept_);
  kept_.clear();
  for (std::size_t i = 0; i < kept.size(); ++i) {
    at::Tensor& target = i < sources_.size() ? sources_[i] : buffers_[i - sources_.size()];
    if (i < sources_.size() && use_of(kept[i]) != nullptr) {
      target.set_data(kept[i]);
    } else {
      target.data().copy_(kept[i]);
    }
  }
}

void WeightAverage::refuse_if_applied(const char* operation) const {
  if (!is_applied()) return;
  throw UsageError({.operation = text::format("WeightAverage::{}", operation)},
                   "The averaged weights are in the model.\nEnd the scope of what apply() returned "
                   "first.");
}

void WeightAverage::check_state(std::int64_t num_updates) const {
  refuse_if_applied("load_state");
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // what a double counts exactly
  if (num_updates >= 0 && num_updates <= kMost) return;
  throw UsageError({.operation = "WeightAverage::load_state"},
                   text::format("{} updates cannot be.\nLoad what was saved.", num_updates));
}

void WeightAverage::load_state(std::int64_t num_updates) {
  check_state(num_updates);
  num_updates_ = num_updates;
}

namespace {

// A BatchNorm layer, of any dimension.
struct NormLayer {
  torch::nn::BatchNormOptions* options;
  std::optional<double> momentum;  // as it was
  at::Tensor mean;
  at::Tensor variance;
  at::Tensor num_batches;
  std::vector<at::Tensor> kept;  // the three, as they were

  void restore() const {
    mean.copy_(kept[0]);
    variance.copy_(kept[1]);
    num_batches.copy_(kept[2]);
  }
};

template <typename Impl>
void add_layer(torch::nn::Module& module, std::vector<NormLayer>& layers) {
  auto* const layer = module.as<Impl>();
  if (!layer || !layer->running_mean.defined()) return;
  layers.push_back({&layer->options,
                    layer->options.momentum(),
                    layer->running_mean,
                    layer->running_var,
                    layer->num_batches_tracked,
                    {layer->running_mean.clone(), layer->running_var.clone(),
                     layer->num_batches_tracked.clone()}});
}

// The mean over the batches of all ranks, in double and in the order of ranks.
void average_over_ranks(const std::vector<NormLayer>& layers, const World& world) {
  std::vector<at::Tensor> sums;
  for (const NormLayer& layer : layers) {
    const at::Tensor count = layer.num_batches.to(at::kCPU, at::kDouble).reshape(1);
    sums.push_back(count);
    sums.push_back(layer.mean.to(at::kCPU, at::kDouble) * count);
    sums.push_back(layer.variance.to(at::kCPU, at::kDouble) * count);
  }
  const at::Tensor all = world.all_reduce(at::cat(sums));
  std::int64_t at = 0;
  const auto next = [&](std::int64_t length) {
    at += length;
    return all.narrow(0, at - length, length);
  };
  for (const NormLayer& layer : layers) {
    const at::Tensor count = next(1);
    if (count.item<double>() == 0) {
      throw UsageError({.rank = world.global_rank(), .operation = "recompute_batch_norm"},
                       "A BatchNorm layer saw no batch, on any rank.\nRun the model in `feed`, on "
                       "at least one batch, with all its layers.");
    }
    layer.mean.copy_(next(layer.mean.numel()) / count);
    layer.variance.copy_(next(layer.variance.numel()) / count);
    layer.num_batches.fill_(count.item<double>());
  }
}

}  // namespace

void recompute_batch_norm(torch::nn::Module& model, const World& world,
                          const std::function<void()>& feed) {
  const at::NoGradGuard no_grad;
  std::vector<NormLayer> layers;
  std::vector<std::pair<torch::nn::Module*, bool>> modes;
  const auto add = [&](torch::nn::Module& module) {
    add_layer<torch::nn::BatchNorm1dImpl>(module, layers);
    add_layer<torch::nn::BatchNorm2dImpl>(module, layers);
    add_layer<torch::nn::BatchNorm3dImpl>(module, layers);
    modes.emplace_back(&module, module.is_training());
  };
  add(model);  // by itself: a model may be held by value
  for (const auto& module : model.modules(/*include_self=*/false)) add(*module);
  if (layers.empty()) return;
  bool is_done = false;
  const auto put_back = c10::make_scope_exit([&] {
    for (const NormLayer& layer : layers) {
      layer.options->momentum(layer.momentum);
      if (!is_done) layer.restore();
    }
    // From the outermost to the innermost: train() of a module reaches all below it.
    for (const auto& [module, is_training] : modes) module->train(is_training);
  });
  for (const NormLayer& layer : layers) {
    layer.mean.zero_();
    layer.variance.fill_(1);
    layer.num_batches.zero_();
    layer.options->momentum(std::nullopt);  // every batch counts the same
  }
  model.train();
  std::string failure;
  try {
    feed();
  } catch (...) {
    failure = to_text(cause_of(std::current_exception(), world.global_rank()));
  }
  throw_first_cause(world, exchange_texts(world, failure),
                    {.rank = world.global_rank(), .operation = "recompute_batch_norm"});
  average_over_ranks(layers, world);
  is_done = true;
}

}  // namespace lockstep
