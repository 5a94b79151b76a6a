// How a layer that knows nothing of ranks is made to compute over them: every BatchNorm calls
// LibTorch's operator aten::batch_norm. As long as there are synchronised layers, a kernel stands
// in front of it that looks whether the weights it is given belong to one of them; for all others
// it calls LibTorch's own.

#include <lockstep/sync_batch_norm.h>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/batch_norm_native.h>
#include <lockstep/error.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>

#include <exception>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "base/purpose.h"
#include "base/text.h"
#include "norm/layer.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor synchronised(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                        const std::optional<at::Tensor>& bias,
                        const std::optional<at::Tensor>& running_mean,
                        const std::optional<at::Tensor>& running_var, bool is_training,
                        double momentum, double eps, bool cudnn_enabled);

// The layers that are synchronised in this process, by a tensor that their calls pass.
class Layers {
 public:
  static Layers& of_process() {
    static Layers layers;
    return layers;
  }

  // False if it is there already.
  bool add(const at::Tensor& key, std::shared_ptr<Layer> layer) {
    const MutexLock lock(mutex_);
    if (layers_.contains(key.unsafeGetTensorImpl())) return false;
    if (layers_.empty()) {
      for (const auto dispatch :
           {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
            c10::DispatchKey::AutogradXPU, c10::DispatchKey::AutogradPrivateUse1}) {
        auto& library = libraries_.emplace_back(std::make_unique<torch::Library>(
            torch::Library::IMPL, "aten", dispatch, __FILE__, __LINE__));
        library->impl("batch_norm", torch::CppFunction::makeFromUnboxedFunction(&synchronised));
      }
    }
    layers_[key.unsafeGetTensorImpl()] = std::move(layer);
    return true;
  }

  std::shared_ptr<Layer> remove(const at::Tensor& key) {
    const MutexLock lock(mutex_);
    auto layer = std::move(layers_.extract(key.unsafeGetTensorImpl()).mapped());
    if (layers_.empty()) libraries_.clear();
    return layer;
  }

  // A layer that trains. Without running statistics, one in eval() calls the operator as if it
  // trained.
  std::shared_ptr<Layer> find(const std::optional<at::Tensor>& tensor) {
    if (!tensor || !tensor->defined()) return nullptr;
    const MutexLock lock(mutex_);
    const auto found = layers_.find(tensor->unsafeGetTensorImpl());
    if (found == layers_.end()) return nullptr;
    return found->second->is_training() ? found->second : nullptr;
  }

 private:
  Mutex mutex_;
  std::map<const c10::TensorImpl*, std::shared_ptr<Layer>> layers_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<torch::Library>> libraries_ LOCKSTEP_GUARDED_BY(mutex_);
};

// All dimensions but the channels'.
std::vector<std::int64_t> others(const at::Tensor& input) {
  std::vector<std::int64_t> dims;
  for (std::int64_t dim = 0; dim < input.dim(); ++dim) {
    if (dim != 1) dims.push_back(dim);
  }
  return dims;
}

// As native batch normalisation does: 16-bit values are computed with in f32.
at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

at::Tensor by_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
  sizes[1] = values.numel();
  return values.to(input.scalar_type()).view(sizes);
}

class Function : public torch::autograd::Function<Function> {
 public:
  using Maybe = std::optional<at::Tensor>;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const Maybe& maybe_weight, const Maybe& maybe_bias,
                            const Maybe& maybe_mean, const Maybe& maybe_variance, double momentum,
                            double eps, std::shared_ptr<Layer> layer) {
    const std::shared_ptr<World>& world = layer->world();
    const at::Tensor weight = maybe_weight.value_or(at::Tensor());
    const at::Tensor bias = maybe_bias.value_or(at::Tensor());
    const at::Tensor running_mean = maybe_mean.value_or(at::Tensor());
    const at::Tensor running_var = maybe_variance.value_or(at::Tensor());
    const at::Tensor wide = widened(input);
    const auto dims = others(input);
    const std::int64_t channels = input.size(1);
    const std::int64_t per_channel = input.numel() / std::max<std::int64_t>(channels, 1);
    const auto count = static_cast<double>(per_channel);
    at::Tensor mine = at::zeros({2 * channels}, input.options().dtype(at::kDouble));
    if (count > 0) {
      const auto [variance, mean] = at::var_mean(wide, dims, /*unbiased=*/false);
      mine.narrow(0, 0, channels).copy_(mean);
      mine.narrow(0, channels, channels).copy_(variance.to(at::kDouble) * count);
    }
    const auto [numbers, all] = gather(*layer, layer->tell(count), mine);
    const at::Tensor own_counts = numbers.narrow(1, Layer::kCount, 1);
    const at::Tensor counts = own_counts.to(input.device(), /*non_blocking=*/true);
    const at::Tensor means = all.narrow(1, 0, channels);
    const auto total = own_counts.sum().item<double>();
    if (total < 2) {
      throw UsageError({.rank = world->global_rank(), .operation = "SyncBatchNorm"},
                       text::format("There are {} values for each channel over all ranks, and a "
                                    "variance needs 2.\nUse a larger batch, or eval().",
                                    total));
    }
    const at::Tensor mean = (means * counts).sum(0) / total;
    const at::Tensor squares =
        all.narrow(1, channels, channels).sum(0) + ((means - mean).pow(2) * counts).sum(0);
    const at::Tensor variance = squares / total;
    const at::Tensor scale = (variance + eps).rsqrt();
    if (running_mean.defined()) {
      running_mean.mul_(1 - momentum).add_(mean.to(running_mean.scalar_type()), momentum);
      running_var.mul_(1 - momentum)
          .add_((squares / (total - 1)).to(running_var.scalar_type()), momentum);
    }
    at::Tensor output = (wide - by_channel(mean, wide)) * by_channel(scale, wide);
    context->save_for_backward({input, weight, mean, scale});
    context->saved_data["total"] = total;
    context->saved_data["has_bias"] = bias.defined();
    context->saved_data["bias_type"] =
        static_cast<std::int64_t>(bias.defined() ? bias.scalar_type() : input.scalar_type());
    Worlds::keep(context, world);
    if (weight.defined()) output = output * by_channel(weight, wide);
    if (bias.defined()) output = output + by_channel(bias, wide);
    return output.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const bool makes_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::ScalarType type = saved[0].scalar_type();
    const at::Tensor input = widened(saved[0]);
    const at::Tensor& weight = saved[1];
    const at::Tensor gradient = widened(gradients[0]);
    const auto world = Worlds::of(context);
    const auto dims = others(input);
    const std::int64_t channels = input.size(1);
    const at::Tensor normal = (input - by_channel(saved[2], input)) * by_channel(saved[3], input);
    // This rank's sums are the gradients of its bias and weight; those of all ranks go into the
    // input's.
    const at::Tensor of_bias = gradient.sum(dims);
    const at::Tensor of_weight = (gradient * normal).sum(dims);
    const at::Tensor sums = world->all_reduce(at::cat({of_bias, of_weight}).to(at::kDouble)) /
                            context->saved_data["total"].toDouble();
    at::Tensor of_input = gradient - by_channel(sums.narrow(0, 0, channels), input) -
                          normal * by_channel(sums.narrow(0, channels, channels), input);
    of_input = of_input * by_channel(saved[3], input);
    if (weight.defined()) of_input = of_input * by_channel(weight, input);
    const bool has_bias = context->saved_data["has_bias"].toBool();
    variable_list results = {of_input.to(type),
                             weight.defined() ? of_weight.to(weight.scalar_type()) : at::Tensor(),
                             has_bias ? of_bias.to(bias_type(context)) : at::Tensor()};
    if (makes_graph) results = refuse_twice(std::move(results));
    results.resize(8);
    return results;
  }

 private:
  // The numbers and the statistics of all ranks, with a row for each: in main memory in one
  // message. The host reads the numbers, so they do not go through a device, which it would wait
  // for; and statistics that not all ranks send are not begun there.
  static std::pair<at::Tensor, at::Tensor> gather(const Layer& layer, const at::Tensor& numbers,
                                                  const at::Tensor& statistics) {
    const World& world = *layer.world();
    if (!statistics.is_cpu()) {
      const at::Tensor all_numbers = world.all_gather(numbers);
      layer.check(all_numbers);
      return {all_numbers, world.all_gather(statistics)};
    }
    const at::Tensor all = world.all_gather(at::cat({numbers, statistics}));
    const at::Tensor all_numbers = all.narrow(1, 0, numbers.numel());
    layer.check(all_numbers);
    return {all_numbers, all.narrow(1, numbers.numel(), statistics.numel())};
  }

  static at::ScalarType bias_type(AutogradContext* context) {
    return static_cast<at::ScalarType>(context->saved_data["bias_type"].toInt());
  }

  // Gradients of gradients would lack what other ranks' outputs contribute.
  static variable_list refuse_twice(variable_list results) {
    for (at::Tensor& one : results) {
      if (one.defined()) one.requires_grad_();
    }
    torch::autograd::DelayedError error(
        "SyncBatchNorm has no gradients of gradients: what other ranks contribute would be "
        "missing. Use BatchNorm where they are needed.",
        static_cast<int>(results.size()));
    const at::AutoGradMode grad_mode(true);
    return error(std::move(results));
  }

  // A world on its way from forward to backward, as autograd keeps it.
  struct Worlds : torch::CustomClassHolder {
    explicit Worlds(std::shared_ptr<World> one) : world(std::move(one)) {}
    std::shared_ptr<World> world;

    static void keep(AutogradContext* context, std::shared_ptr<World> world) {
      context->saved_data["world"] =
          c10::IValue::make_capsule(c10::make_intrusive<Worlds>(std::move(world)));
    }
    static std::shared_ptr<World> of(AutogradContext* context) {
      return c10::static_intrusive_pointer_cast<Worlds>(context->saved_data["world"].toCapsule())
          ->world;
    }
  };
};

at::Tensor synchronised(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                        const std::optional<at::Tensor>& bias,
                        const std::optional<at::Tensor>& running_mean,
                        const std::optional<at::Tensor>& running_var, bool is_training,
                        double momentum, double eps, bool cudnn_enabled) {
  std::shared_ptr<Layer> layer;
  if (is_training) {
    layer = Layers::of_process().find(weight);
    if (!layer) layer = Layers::of_process().find(running_mean);
  }
  if (!layer) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, is_training,
                                  momentum, eps, cudnn_enabled);
  }
  // An optional without a tensor in it, and one with an undefined tensor, are the same to callers.
  const auto given = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? tensor : std::nullopt;
  };
  return Function::apply(input, given(weight), given(bias), given(running_mean), given(running_var),
                         momentum, eps, layer);
}

}  // namespace

struct SyncBatchNormState {
  std::vector<at::Tensor> keys;  // alive, so that no other tensor takes their place

  ~SyncBatchNormState() {
    const bool is_unwinding = std::uncaught_exceptions() > 0;
    for (const at::Tensor& key : keys) {
      const auto layer = Layers::of_process().remove(key);
      if (is_unwinding) layer->give_up();
    }
  }
};

SyncBatchNorm::SyncBatchNorm(std::shared_ptr<torch::nn::Module> model, const World& world)
    : state_(std::make_shared<SyncBatchNormState>()) {
  if (!model) {
    throw UsageError({.rank = world.global_rank(), .operation = "SyncBatchNorm"},
                     "There is no model: the pointer is empty.\nMake the model first.");
  }
  if (world.logical_size() > world.size()) {
    throw UsageError(
        {.rank = world.global_rank(), .operation = "SyncBatchNorm"},
        text::format("{} ranks play {} logical ranks in turns, and a forward needs the statistics "
                     "of all of them at once.\nUse as many ranks as logical ranks, or BatchNorm "
                     "without SyncBatchNorm.",
                     world.size(), world.logical_size()));
  }
  if (world.size() == 1) return;
  const PurposeScope purpose(Purpose::kSyncBatchNorm);
  const auto own = std::make_shared<World>(world.duplicate("SyncBatchNorm"));
  const auto names = std::make_shared<std::vector<std::string>>();
  const auto add = [&](const auto& item, const auto& norm) {
    const std::string& name = item.key();
    const at::Tensor& key = norm.weight.defined() ? norm.weight : norm.running_mean;
    if (!key.defined()) {
      throw UsageError(
          {.rank = world.global_rank(), .operation = "SyncBatchNorm"},
          text::format("The layer {} has neither weights nor running statistics, so its "
                       "calls cannot be told from others.\nMake it with affine(true) or "
                       "track_running_stats(true).",
                       name));
    }
    names->push_back(name.empty() ? item.value()->name() : name);
    auto layer = std::make_shared<Layer>(own, item.value(), names, norm.options.num_features(),
                                         norm.num_batches_tracked);
    if (!Layers::of_process().add(key, std::move(layer))) {
      throw UsageError(
          {.rank = world.global_rank(), .operation = "SyncBatchNorm"},
          text::format("The layer {} is synchronised already.\nMake one SyncBatchNorm for "
                       "a model.",
                       name));
    }
    state_->keys.push_back(key);
  };
  for (const auto& item : model->named_modules()) {
    const torch::nn::Module& layer = *item.value();
    if (const auto* one = layer.as<torch::nn::BatchNorm1dImpl>()) {
      add(item, *one);
    } else if (const auto* two = layer.as<torch::nn::BatchNorm2dImpl>()) {
      add(item, *two);
    } else if (const auto* three = layer.as<torch::nn::BatchNorm3dImpl>()) {
      add(item, *three);
    }
  }
}

int SyncBatchNorm::num_layers() const { return static_cast<int>(state_->keys.size()); }

}  // namespace lockstep
