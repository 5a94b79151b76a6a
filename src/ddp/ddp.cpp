// DistributedDataParallel: from a module, or from named tensors, to a reducer.

#include <lockstep/ddp.h>
#include <lockstep/error.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <unordered_set>

#include "base/purpose.h"
#include "base/text.h"
#include "ddp/reducer.h"
#include "world/each_once.h"

namespace lockstep {
namespace {

// Embeddings that say so have sparse gradients.
std::vector<std::string> sparse_names(const torch::nn::Module& model,
                                      std::vector<std::string> names) {
  std::unordered_set<const c10::TensorImpl*> tables;
  for (const auto& module : model.modules()) {
    if (const auto* one = module->as<torch::nn::EmbeddingImpl>()) {
      if (one->options.sparse()) tables.insert(one->weight.unsafeGetTensorImpl());
    }
    if (const auto* one = module->as<torch::nn::EmbeddingBagImpl>()) {
      if (one->options.sparse()) tables.insert(one->weight.unsafeGetTensorImpl());
    }
  }
  for (const NamedTensor& one : each_once(model.named_parameters())) {
    const bool is_named = std::ranges::find(names, one.name) != names.end();
    if (tables.contains(one.tensor.unsafeGetTensorImpl()) && one.tensor.requires_grad() &&
        !is_named) {
      names.push_back(one.name);
    }
  }
  return names;
}

// Without what is ignored: "encoder" is encoder itself, and all that is in it.
std::vector<NamedTensor> without(std::vector<NamedTensor> tensors,
                                 const std::vector<std::string>& ignored) {
  std::erase_if(tensors, [&](const NamedTensor& one) {
    return std::ranges::any_of(ignored, [&](const std::string& name) {
      return one.name == name || one.name.starts_with(name + ".");
    });
  });
  return tensors;
}

void check_ignored(const ModelView& all, const World& world, const DdpOptions& options) {
  for (const std::string& name : options.ignored) {
    const std::size_t before = all.parameters().size() + all.buffers().size();
    if (without(all.parameters(), {name}).size() + without(all.buffers(), {name}).size() < before) {
      continue;
    }
    throw UsageError({.rank = world.global_rank(), .operation = "DistributedDataParallel"},
                     text::format("DdpOptions::ignored names {}, and the model has nothing of that "
                                  "name.\nUse names of named_modules(), named_parameters() or "
                                  "named_buffers().",
                                  name));
  }
}

ModelView view_of(const ModelView& all, const std::vector<std::string>& ignored) {
  return {.parameters = [all, ignored] { return without(all.parameters(), ignored); },
          .buffers = [all, ignored] { return without(all.buffers(), ignored); }};
}

std::unique_ptr<Reducer, ReducerDeleter> make_reducer(const ModelView& all,
                                                      std::vector<std::string> sparse,
                                                      const World& world, const DdpOptions& options,
                                                      bool are_equal) {
  const PurposeScope purpose(Purpose::kWrap);
  return std::unique_ptr<Reducer, ReducerDeleter>(
      new Reducer(view_of(all, options.ignored), std::move(sparse), world, options, are_equal));
}

}  // namespace

void ReducerDeleter::operator()(Reducer* reducer) const { delete reducer; }

DistributedDataParallel::DistributedDataParallel(std::shared_ptr<torch::nn::Module> model,
                                                 World world, DdpOptions options) {
  if (!model) {
    throw UsageError({.rank = world.global_rank(), .operation = "DistributedDataParallel"},
                     "There is no model: the pointer is empty.\nMake the model first.");
  }
  const ModelView all = {.parameters = [model] { return each_once(model->named_parameters()); },
                         .buffers = [model] { return each_once(model->named_buffers()); }};
  check_ignored(all, world, options);
  make_ = [all, model, world, options](bool are_equal) {
    return make_reducer(all, sparse_names(*model, options.sparse), world, options, are_equal);
  };
  reducer_ = make_(false);
}

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& model, World world,
                                                 DdpOptions options)
    : DistributedDataParallel(
          std::shared_ptr<torch::nn::Module>(&model, [](const torch::nn::Module*) {}),
          std::move(world), std::move(options)) {}

DistributedDataParallel::DistributedDataParallel(std::vector<NamedTensor> parameters, World world,
                                                 DdpOptions options,
                                                 std::vector<NamedTensor> buffers) {
  const ModelView all = {.parameters = [tensors = each_once(parameters)] { return tensors; },
                         .buffers = [tensors = each_once(buffers)] { return tensors; }};
  check_ignored(all, world, options);
  make_ = [all, world, options](bool are_equal) {
    return make_reducer(all, options.sparse, world, options, are_equal);
  };
  reducer_ = make_(false);
}

void DistributedDataParallel::rewrap() {
  if (reducer_->num_pending() > 0) {
    throw UsageError({.operation = "rewrap"},
                     text::format("{} backwards of an accumulation are not yet averaged.\nCall "
                                  "rewrap() after optimizer.step(), or discard() first.",
                                  reducer_->num_pending()));
  }
  if (reducer_->has_unused_gradients()) {
    throw UsageError({.operation = "rewrap"},
                     "The gradients of the last backward() were not used.\nCall rewrap() after "
                     "optimizer.step(), or discard() first.");
  }
  auto next = make_(false);
  next->take_settings_from(*reducer_);
  reducer_ = std::move(next);
}

void DistributedDataParallel::backward(const at::Tensor& loss, const at::Tensor& gradient,
                                       std::optional<bool> retain_graph, bool create_graph) {
  reducer_->backward(loss, gradient, retain_graph, create_graph);
}
NoSync DistributedDataParallel::no_sync() { return reducer_->no_sync(); }
void DistributedDataParallel::accumulate(int k) { reducer_->accumulate(k); }
void DistributedDataParallel::discard() { reducer_->discard(); }
Turn DistributedDataParallel::play() { return reducer_->play(); }
bool DistributedDataParallel::skip(const UnevenOptions& options) {
  return reducer_->is_distributed() && reducer_->skip(options);
}
DistributedDataParallel::LogicalState DistributedDataParallel::logical_state() const {
  return reducer_->logical_state();
}
void DistributedDataParallel::check_logical_state(const LogicalState& state) const {
  reducer_->check_logical_state(state);
}
void DistributedDataParallel::load_logical_state(const LogicalState& state) {
  reducer_->check_logical_state(state);
  reducer_->load_logical_state(state);
}
void DistributedDataParallel::set_weight(double samples) { reducer_->set_weight(samples); }
void DistributedDataParallel::join(const std::function<void()>& step,
                                   const UnevenOptions& options) {
  lockstep::join({this}, step, options);
}
std::vector<NamedTensor> DistributedDataParallel::full_gradients() const {
  return reducer_->full_gradients();
}
void DistributedDataParallel::change_parameters(const std::function<void()>& change) {
  reducer_->change_parameters(change);
}
void DistributedDataParallel::check_replicas() { reducer_->check_replicas(); }
int DistributedDataParallel::num_pending() const { return reducer_->num_pending(); }

void DistributedDataParallel::stop_when(std::function<bool()> is_asked) {
  reducer_->stop_when(std::move(is_asked));
}

bool DistributedDataParallel::must_stop() const { return reducer_->must_stop(); }

DdpStats DistributedDataParallel::stats() const { return reducer_->stats(); }

HookState DistributedDataParallel::hook_state() const { return reducer_->hook_state(); }
void DistributedDataParallel::check_hook_state(const HookState& state) const {
  reducer_->check_hook_state(state);
}
void DistributedDataParallel::load_hook_state(const HookState& state) {
  reducer_->load_hook_state(state);
}

void join(const std::vector<DistributedDataParallel*>& models, const std::function<void()>& step,
          const UnevenOptions& options) {
  std::vector<Reducer*> reducers;
  for (const DistributedDataParallel* const model : models) {
    const bool is_twice =
        model && std::ranges::find(reducers, model->reducer_.get()) != reducers.end();
    if (!model || is_twice) {
      throw UsageError({.operation = "join"},
                       text::format("A model {}.\nGive each wrapped model once.",
                                    is_twice ? "is there twice" : "is a null pointer"));
    }
    if (model->reducer_->is_distributed()) reducers.push_back(model->reducer_.get());
  }
  if (!reducers.empty()) Reducer::join(reducers, step, options);
}

}  // namespace lockstep
