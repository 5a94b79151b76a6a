// The step of optim::Sharded. What an optimizer does to a tensor, it does to each piece of it: an
// optimizer of the same type, with one parameter, is given one piece after the other.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>
#include <lockstep/sharded.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>

#include "base/hash.h"
#include "base/text.h"
#include "ddp/shards.h"
#include "optim/kinds.h"
#include "world/host_memory.h"

namespace lockstep::optim::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

constexpr const char* kMaster = Shards::kMaster;

// As the parameter lies, so that a piece of it is one run of memory.
at::Tensor laid_out_as(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.strides() == parameter.strides()) return gradient;
  return at::empty_like(parameter.detach(), parameter.options().dtype(gradient.scalar_type()))
      .copy_(gradient);
}

bool is_in(const at::Tensor& held, const at::Tensor& place) {
  return held.defined() && held.data_ptr() == place.data_ptr() &&
         held.strides() == place.strides() && held.scalar_type() == place.scalar_type();
}

}  // namespace

class ShardedStep::Impl {
 public:
  // A parameter that is updated in this step.
  struct Use {
    at::Tensor parameter;
    at::Tensor gradient = {};
    std::size_t group = 0;
    std::size_t slot = 0;
    bool is_sparse = false;
    bool has_master = false;                        // an f32 copy is what is updated
    std::map<std::string, at::Tensor> states = {};  // whole, in shared memory
  };

  // Those of one model that is shared.
  struct Model {
    std::shared_ptr<Shards> shards;
    std::vector<Use> uses = {};
    std::vector<std::size_t> seen = {};  // slots, with or without a gradient
    std::exception_ptr failure = {};     // why this rank cannot step
  };

  struct Part {
    const Use* use = nullptr;
    TensorPiece tensor;  // of the parameter; all of it if the gradient is sparse

    at::Tensor of(const at::Tensor& whole) const {
      return use->is_sparse ? whole.detach() : tensor.of(whole);
    }
  };
  // What one rank updates at once: a part of a large tensor, or small ones of a group together.
  using Piece = std::vector<Part>;

  // A thread's own optimizer for each group, with as many parameters as a piece has needed.
  class Lane {
   public:
    // An optimizer keeps the master weights of a parameter: those without have one of their own.
    void make_inner(Make make, const Use& use, const torch::optim::OptimizerOptions& options) {
      auto& found = inner_[{use.group, use.has_master}];
      if (!found) found = make(at::empty({0}).set_requires_grad(true), options);
    }
    Optimizer& inner(const Use& use) const { return *inner_.at({use.group, use.has_master}); }
    static at::Tensor& proxy(Optimizer& inner, std::size_t index) {
      auto& all = inner.param_groups()[0].params();
      while (all.size() <= index) all.push_back(at::empty({0}).set_requires_grad(true));
      return all[index];
    }

   private:
    std::map<std::pair<std::size_t, bool>, std::unique_ptr<Optimizer>> inner_;
  };

  explicit Impl(Make make) : make_(make) {}

  // In the order of parameters, which is the same on all ranks.
  std::vector<Model> find_models(Optimizer& optimizer, bool* has_others) {
    std::vector<Model> models;
    for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
      for (const at::Tensor& parameter : optimizer.param_groups()[group].params()) {
        const auto shards = Shards::of(parameter);
        *has_others |= !shards;
        if (!shards) continue;
        auto found = std::ranges::find(models, shards, &Model::shards);
        if (found == models.end()) found = models.insert(models.end(), Model{.shards = shards});
        const auto slot = shards->find(parameter);
        if (!slot) continue;  // it is frozen
        Use use{.parameter = parameter, .group = group, .slot = *slot};
        const auto keeper = shards->keeper_of(*slot);
        if ((keeper && keeper != token_) ||
            std::ranges::find(found->seen, *slot) != found->seen.end()) {
          found->failure = std::make_exception_ptr(UsageError(
              {.rank = shards->host().global_rank(), .operation = "optimizer step"},
              text::format("The parameter {} is in two optimizers, or twice in one, and the ranks "
                           "of a host share what an optimizer keeps of it.\nGive it to one.",
                           shards->name_of(*slot))));
          continue;
        }
        found->seen.push_back(*slot);
        use.gradient = parameter.grad().defined() ? parameter.grad() : shards->gradient(use.slot);
        if (!use.gradient.defined()) continue;
        use.is_sparse = use.gradient.layout() != at::kStrided;
        found->uses.push_back(std::move(use));
      }
    }
    return models;
  }

  // Of a parameter that was shared until now: others may still use these.
  template <typename Kind>
  static void keep_own_states(Optimizer& optimizer, const at::Tensor& parameter) {
    auto* const state = state_of<Kind>(optimizer, parameter);
    if (state == nullptr) return;
    Kind::tensors(*state, [](const char*, at::Tensor& held) {
      if (use_of(held) != nullptr) held = held.clone();
    });
  }

  template <typename Kind>
  void step(Optimizer& optimizer, Model& model) {
    // What cannot be done is found out before anything is written, and all ranks are told.
    try {
      prepare<Kind>(optimizer, model);
    } catch (...) {
      if (!model.failure) model.failure = std::current_exception();
    }
    const std::vector<Piece> pieces = cut(model);
    const auto lines = [&] { return describe<Kind>(optimizer, model); };
    std::vector<std::size_t> written;
    for (const Use& use : model.uses) written.push_back(use.slot);
    try {
      model.shards->begin_update(pieces.size(), hash_of<Kind>(optimizer, model), lines,
                                 model.failure);
      std::exception_ptr failure;
      try {
        place_states<Kind>(optimizer, model);
        model.shards->run_update([&](int lane, std::size_t piece) {
          update<Kind>(optimizer, lanes_[static_cast<std::size_t>(lane)], pieces[piece]);
        });
      } catch (...) {
        failure = std::current_exception();
        lanes_.clear();  // what they are about to update is not known
      }
      model.shards->end_update(failure, written);
    } catch (...) {
      if (model.shards->is_completed_by_others()) complete<Kind>(optimizer, model, written);
      throw;
    }
    model.shards->drop_gradients(written);
    take_states<Kind>(optimizer, model);
  }

 private:
  // The same on all ranks, and one or more for each: large tensors are cut, small ones are put
  // together.
  static std::vector<Piece> cut(const Model& model) {
    std::int64_t all = 0;
    for (const Use& use : model.uses) all += use.parameter.numel();
    const std::int64_t enough = Shards::piece_for(all / model.shards->host().size());
    std::vector<Piece> pieces;
    std::int64_t last = 0;  // elements of the last piece
    const auto add = [&](const Use& use, TensorPiece tensor) {
      const bool fits = !pieces.empty() && last + tensor.count <= enough && !use.is_sparse &&
                        !pieces.back().front().use->is_sparse &&
                        pieces.back().front().use->group == use.group &&
                        pieces.back().front().use->has_master == use.has_master;
      if (!fits) pieces.emplace_back();
      last = (fits ? last : 0) + tensor.count;
      pieces.back().push_back({&use, std::move(tensor)});
    };
    for (const Use& use : model.uses) {
      if (use.is_sparse) {
        add(use, {use.parameter, 0, use.parameter.numel()});
        continue;
      }
      for (TensorPiece& one : Shards::cut({use.parameter}, enough)) add(use, std::move(one));
    }
    return pieces;
  }

  template <typename Kind>
  static const typename Kind::Options& options_of(Optimizer& optimizer, const Use& use) {
    return static_cast<const typename Kind::Options&>(
        optimizer.param_groups()[use.group].options());
  }

  template <typename Kind>
  static typename Kind::State* state_of(Optimizer& optimizer, const at::Tensor& parameter) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    return found == optimizer.state().end() ? nullptr
                                            : static_cast<typename Kind::State*>(&*found->second);
  }

  template <typename Kind>
  void prepare(Optimizer& optimizer, Model& model) {
    if (model.shards->are_local()) {
      throw UsageError({.rank = model.shards->host().global_rank(), .operation = "optimizer step"},
                       "The last backward() was local (no_sync() or accumulate()), and the ranks "
                       "of a host share the parameters.\nStep only after a synchronised backward.");
    }
    lanes_.resize(static_cast<std::size_t>(at::get_num_threads()));
    const auto* const masters = dynamic_cast<const MasterWeights*>(&optimizer);
    for (Use& use : model.uses) {
      const bool is_16_bit = use.parameter.element_size() == 2;
      use.has_master = masters != nullptr && masters->uses_master_weights() && is_16_bit;
      // States from before the model was wrapped again.
      if (use.has_master && Shards::is_torn(master_of(optimizer, use))) {
        Shards::throw_torn(model.shards->host().global_rank());
      }
      if (auto* const state = state_of<Kind>(optimizer, use.parameter)) {
        Kind::tensors(*state, [&](const char*, const at::Tensor& held) {
          if (Shards::is_torn(held)) Shards::throw_torn(model.shards->host().global_rank());
        });
      }
      // With the options that the optimizer was made with: it took them.
      for (Lane& lane : lanes_) lane.make_inner(make_, use, optimizer.defaults());
      if constexpr (std::is_same_v<Kind, AdagradKind>) {
        if (state_of<Kind>(optimizer, use.parameter) == nullptr) {
          optimizer.state()[use.parameter.unsafeGetTensorImpl()] =
              Kind::first_state(options_of<Kind>(optimizer, use), use.parameter);
        }
      }
      if (!use.is_sparse) {
        use.gradient = laid_out_as(use.parameter, use.gradient);
        continue;
      }
      const std::string reason = why_not_sparse<Kind>(optimizer, use);
      if (reason.empty()) continue;
      throw UsageError({.rank = model.shards->host().global_rank(), .operation = "optimizer step"},
                       text::format("The gradient of {} is sparse, and {}.\nUse "
                                    "torch::optim::SGD without momentum and weight decay for it, "
                                    "or torch::optim::Adagrad.",
                                    model.shards->name_of(use.slot), reason));
    }
  }

  // Found out before anything is written.
  template <typename Kind>
  static std::string why_not_sparse(Optimizer& optimizer, const Use& use) {
    if constexpr (std::is_same_v<Kind, SgdKind> || std::is_same_v<Kind, AdagradKind>) {
      const auto& options = options_of<Kind>(optimizer, use);
      if (options.weight_decay() != 0) return "weight decay reaches all its elements";
      if (std::is_same_v<Kind, AdagradKind>) return {};
      if (dynamic_cast<const MasterWeights*>(&optimizer) != nullptr) {
        return "lockstep::optim::SGD takes dense ones";
      }
      if (Kind::used(options).empty()) return {};
      return "SGD with momentum keeps a sparse momentum, which ranks cannot share";
    } else {
      return text::format("{} takes dense ones", Kind::kName);
    }
  }

  static at::Tensor master_of(Optimizer& optimizer, const Use& use) {
    return dynamic_cast<MasterWeights&>(optimizer).master_since_write(use.parameter);
  }

  // Whether a state is where the ranks of the host share it.
  static bool is_placed(const Model& model, const Use& use, const std::string& name,
                        const at::Tensor& held) {
    return model.shards->is_state(held, name, use.slot, type_of_states(use));
  }
  static at::ScalarType type_of_states(const Use& use) {
    return use.has_master ? at::kFloat : use.parameter.scalar_type();
  }

  // What all ranks of a host must have in common.
  template <typename Kind>
  static std::uint64_t hash_of(Optimizer& optimizer, const Model& model) {
    std::vector<double> numbers;  // exact: they count less than 2^53
    const auto add = [&](const char*, const auto& value) {
      numbers.push_back(static_cast<double>(value));
    };
    for (auto& group : optimizer.param_groups()) {
      Kind::options(static_cast<typename Kind::Options&>(group.options()), add);
    }
    for (const Use& use : model.uses) {
      for (const std::size_t one :
           {use.slot, use.group, std::size_t{use.is_sparse}, std::size_t{use.has_master}}) {
        add("", one);
      }
      if (use.has_master) add("", is_placed(model, use, kMaster, master_of(optimizer, use)));
      auto* const state = state_of<Kind>(optimizer, use.parameter);
      if (state == nullptr) continue;
      Kind::numbers(*state, add);
      Kind::tensors(*state, [&](const char* key, const at::Tensor& held) {
        numbers.push_back(!held.defined() ? 0 : is_placed(model, use, key, held) ? 2 : 1);
      });
    }
    return hash_bytes(numbers.data(), numbers.size() * sizeof(double),
                      hash_bytes(Kind::kName, std::string_view(Kind::kName).size()));
  }

  // The same for a person.
  template <typename Kind>
  static std::vector<std::string> describe(Optimizer& optimizer, const Model& model) {
    std::vector<std::string> lines = {Kind::kName};
    for (auto& group : optimizer.param_groups()) {
      std::string line = text::format("group {}:", lines.size() - 1);
      Kind::options(
          static_cast<typename Kind::Options&>(group.options()),
          [&](const char* key, const auto& value) { line += text::format(" {} {}", key, value); });
      lines.push_back(std::move(line));
    }
    for (const Use& use : model.uses) {
      std::string line =
          text::format("parameter {} of group {}{}{}", use.slot, use.group,
                       use.is_sparse ? ", sparse" : "", use.has_master ? ", master weights" : "");
      if (use.has_master && !is_placed(model, use, kMaster, master_of(optimizer, use))) {
        line += " of its own";
      }
      if (auto* const state = state_of<Kind>(optimizer, use.parameter)) {
        Kind::numbers(*state, [&](const char* key, const auto& value) {
          line += text::format(", {} {}", key, value);
        });
        Kind::tensors(*state, [&](const char* key, const at::Tensor& held) {
          if (!held.defined()) return;
          line +=
              text::format(", {}{}", key, is_placed(model, use, key, held) ? "" : " of its own");
        });
      }
      lines.push_back(std::move(line));
    }
    return lines;
  }

  // All that a step keeps is in shared memory: what is not yet (it was loaded, or the optimizer was
  // made with it) is moved there, a part by each rank.
  template <typename Kind>
  static void place_states(Optimizer& optimizer, Model& model) {
    std::vector<std::pair<at::Tensor, at::Tensor>> moves;
    for (Use& use : model.uses) {
      const at::ScalarType type = type_of_states(use);
      if (use.has_master) {
        const at::Tensor held = master_of(optimizer, use);
        const bool is_there = is_placed(model, use, kMaster, held);
        use.states[kMaster] = is_there ? held : model.shards->state(kMaster, use.slot, type);
        if (!is_there) {
          moves.emplace_back(use.states[kMaster], held.defined() ? held : use.parameter);
        }
      }
      auto* const state = state_of<Kind>(optimizer, use.parameter);
      for (const std::string& name : Kind::used(options_of<Kind>(optimizer, use))) {
        at::Tensor held;
        if (state != nullptr) {
          Kind::tensors(*state, [&](const char* key, const at::Tensor& one) {
            if (name == key) held = one;
          });
        }
        const bool is_there = is_placed(model, use, name, held);
        use.states[name] = is_there ? held : model.shards->state(name, use.slot, type);
        if (held.defined() && !is_there) {
          moves.emplace_back(use.states[name], laid_out_as(use.parameter, held));
        }
      }
    }
    if (moves.empty()) return;
    const World& host = model.shards->host();
    for (std::size_t i = 0; i < moves.size(); ++i) {
      const auto rank = static_cast<std::size_t>(host.rank());
      if (i % static_cast<std::size_t>(host.size()) == rank) {
        moves[i].first.copy_(moves[i].second.detach());
      }
    }
    host.barrier();
  }

  template <typename Kind>
  void update(Optimizer& optimizer, Lane& lane, const Piece& piece) const {
    const auto& options = options_of<Kind>(optimizer, *piece.front().use);
    Optimizer& inner = lane.inner(*piece.front().use);
    static_cast<typename Kind::Options&>(inner.param_groups()[0].options()) = options;
    for (std::size_t i = 0; i < piece.size(); ++i) {
      give<Kind>(optimizer, inner, Lane::proxy(inner, i), piece[i]);
    }
    inner.step();
    for (std::size_t i = 0; i < piece.size(); ++i) {
      take<Kind>(inner, Lane::proxy(inner, i), piece[i]);
    }
  }

  // Makes `proxy` a parameter of `inner` that is the part, with all that belongs to it.
  template <typename Kind>
  static void give(Optimizer& optimizer, Optimizer& inner, at::Tensor& proxy, const Part& part) {
    const Use& use = *part.use;
    proxy.set_data(part.of(use.parameter));
    proxy.mutable_grad() = use.is_sparse ? use.gradient : part.of(use.gradient);
    if (use.has_master) {
      auto& masters = dynamic_cast<MasterWeights&>(inner);
      masters.use_master_weights();
      masters.set_master(proxy, part.of(use.states.at(kMaster)));
    }
    const auto* const state = state_of<Kind>(optimizer, use.parameter);
    if (state == nullptr) {
      inner.state().erase(proxy.unsafeGetTensorImpl());
      return;
    }
    auto copy = std::make_unique<typename Kind::State>(*state);
    Kind::tensors(*copy, [&](const char* key, at::Tensor& tensor) {
      const auto found = use.states.find(key);
      const bool is_kept = tensor.defined() && found != use.states.end();
      tensor = is_kept ? part.of(found->second) : at::Tensor();
    });
    inner.state()[proxy.unsafeGetTensorImpl()] = std::move(copy);
  }

  // A rank is lost, and the others have completed the step: so has this one. All states are in
  // shared memory then, or nobody could have.
  template <typename Kind>
  void complete(Optimizer& optimizer, Model& model, const std::vector<std::size_t>& written) {
    try {
      model.shards->note_updated(written);
      model.shards->drop_gradients(written);
      place_states<Kind>(optimizer, model);
      take_states<Kind>(optimizer, model);
    } catch (const std::exception&) {
      model.shards->set_torn(true);
    }
  }

  // What was updated in place is there; states that the step has made go where they belong.
  template <typename Kind>
  static void take(Optimizer& inner, at::Tensor& proxy, const Part& part) {
    proxy.mutable_grad() = at::Tensor();
    if (part.use->has_master) {  // it was made anew if the parameter was written meanwhile
      const at::Tensor master = dynamic_cast<MasterWeights&>(inner).master_since_write(proxy);
      const at::Tensor place = part.of(part.use->states.at(kMaster));
      if (!is_in(master, place)) place.copy_(master);
    }
    auto* const after = state_of<Kind>(inner, proxy);
    if (after == nullptr) return;
    Kind::tensors(*after, [&](const char* key, const at::Tensor& made) {
      const auto found = part.use->states.find(key);
      if (found == part.use->states.end() || !made.defined()) return;
      const at::Tensor place = part.of(found->second);
      if (!is_in(made, place)) place.copy_(made);
    });
  }

  // The optimizer's own state is what T's would be after this step.
  template <typename Kind>
  void take_states(Optimizer& optimizer, Model& model) const {
    for (const Use& use : model.uses) {
      model.shards->set_keeper(use.slot, token_);
      if (use.has_master) {
        dynamic_cast<MasterWeights&>(optimizer).set_master(use.parameter, use.states.at(kMaster));
      }
      auto* state = state_of<Kind>(optimizer, use.parameter);
      if (state == nullptr) {
        if (Kind::used(options_of<Kind>(optimizer, use)).empty()) continue;
        auto made = std::make_unique<typename Kind::State>();
        Kind::numbers(*made, [](const char*, auto& value) { value = 0; });
        state = made.get();
        optimizer.state()[use.parameter.unsafeGetTensorImpl()] = std::move(made);
      }
      Kind::numbers(*state, [](const char*, auto& value) { ++value; });  // of steps
      Kind::tensors(*state, [&](const char* key, at::Tensor& tensor) {
        if (const auto found = use.states.find(key); found != use.states.end()) {
          tensor = found->second;
        }
      });
    }
  }

  Make make_;
  std::shared_ptr<int> token_ = std::make_shared<int>(0);  // tells it from other optimizers
  std::vector<Lane> lanes_;
};

ShardedStep::ShardedStep(Make make) : impl_(std::make_unique<Impl>(make)) {}
ShardedStep::~ShardedStep() = default;

at::Tensor ShardedStep::run(Optimizer& optimizer, const Optimizer::LossClosure& closure,
                            const std::function<void()>& plain) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  bool has_others = false;
  std::vector<Impl::Model> models = impl_->find_models(optimizer, &has_others);
  for (Impl::Model& model : models) {
    with_kind(optimizer, [&](auto kind) { impl_->step<decltype(kind)>(optimizer, model); });
  }
  if (!has_others) return loss;
  // A parameter without a gradient is left alone.
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      if (use_of(parameter) != nullptr) {
        kept.emplace_back(parameter, std::exchange(parameter.mutable_grad(), at::Tensor()));
      } else if (parameter.grad().defined()) {
        with_kind(optimizer,
                  [&](auto kind) { Impl::keep_own_states<decltype(kind)>(optimizer, parameter); });
      }
    }
  }
  const auto give_back = c10::make_scope_exit([&] {
    for (auto& [parameter, gradient] : kept) parameter.mutable_grad() = gradient;
  });
  plain();
  return loss;
}

}  // namespace lockstep::optim::detail
