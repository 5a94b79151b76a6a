// DistributedDataParallel: from a module, or from named tensors, to a reducer.

#include <lockstep/ddp.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <unordered_set>

#include "ddp/reducer.h"

namespace lockstep {
namespace {

// Tied parameters count once, under the first of their names.
template <typename Dict>
std::vector<NamedTensor> each_once(const Dict& named) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& one : named) {
    if (one.value().defined() && seen.insert(one.value().unsafeGetTensorImpl()).second) {
      tensors.push_back({one.key(), one.value()});
    }
  }
  return tensors;
}

std::vector<NamedTensor> each_once(const std::vector<NamedTensor>& named) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const NamedTensor& one : named) {
    if (one.tensor.defined() && seen.insert(one.tensor.unsafeGetTensorImpl()).second) {
      tensors.push_back(one);
    }
  }
  return tensors;
}

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

ModelView view_of(std::shared_ptr<torch::nn::Module> model) {
  return {.parameters = [model] { return each_once(model->named_parameters()); },
          .buffers = [model] { return each_once(model->named_buffers()); }};
}

}  // namespace

void ReducerDeleter::operator()(Reducer* reducer) const { delete reducer; }

DistributedDataParallel::DistributedDataParallel(std::shared_ptr<torch::nn::Module> model,
                                                 World world, DdpOptions options) {
  if (!model) {
    throw UsageError({.rank = world.rank(), .operation = "DistributedDataParallel"},
                     "There is no model: the pointer is empty.\nMake the model first.");
  }
  std::vector<std::string> sparse = sparse_names(*model, options.sparse);
  reducer_.reset(new Reducer(view_of(std::move(model)), std::move(sparse), std::move(world),
                             std::move(options)));
}

DistributedDataParallel::DistributedDataParallel(std::vector<NamedTensor> parameters, World world,
                                                 DdpOptions options,
                                                 std::vector<NamedTensor> buffers) {
  std::vector<std::string> sparse = options.sparse;
  ModelView view = {.parameters = [tensors = each_once(parameters)] { return tensors; },
                    .buffers = [tensors = each_once(buffers)] { return tensors; }};
  reducer_.reset(
      new Reducer(std::move(view), std::move(sparse), std::move(world), std::move(options)));
}

void DistributedDataParallel::backward(const at::Tensor& loss) { reducer_->backward(loss); }
NoSync DistributedDataParallel::no_sync() { return reducer_->no_sync(); }
void DistributedDataParallel::accumulate(int k) { reducer_->accumulate(k); }
void DistributedDataParallel::set_weight(double samples) { reducer_->set_weight(samples); }
void DistributedDataParallel::join(const std::function<void()>& step) { reducer_->join(step); }
void DistributedDataParallel::check_replicas() { reducer_->check_replicas(); }
int DistributedDataParallel::num_pending() const { return reducer_->num_pending(); }

void DistributedDataParallel::stop_when(std::function<bool()> is_asked) {
  reducer_->stop_when(std::move(is_asked));
}

bool DistributedDataParallel::must_stop() const { return reducer_->must_stop(); }

DdpStats DistributedDataParallel::stats() const { return reducer_->stats(); }

}  // namespace lockstep
