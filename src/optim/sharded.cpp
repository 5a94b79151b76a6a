// The step of optim::Sharded. What an optimizer does to a tensor, it does to each piece of it: an
// optimizer of the same type is given one piece after the other, as its parameter. In the memory of
// a host ranks share out the pieces; on devices each has its slices.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>
#include <lockstep/sharded.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "base/hash.h"
#include "base/text.h"
#include "optim/kinds.h"
#include "optim/sharded_parts.h"
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
  explicit Impl(Make make) : make_(make) {}

  const std::shared_ptr<int>& token() const { return token_; }

  // Slices of a wrapper that has gone are not put together here: other ranks may not be in this
  // step.
  template <typename Kind>
  static void refuse_slices(Optimizer& optimizer, const at::Tensor& parameter, int rank) {
    const auto* const masters = dynamic_cast<const MasterWeights*>(&optimizer);
    bool has_slices =
        masters != nullptr && Slices::is_slice(masters->master_since_write(parameter));
    if (auto* const state = state_of<Kind>(optimizer, parameter)) {
      Kind::tensors(*state, [&](const char*, const at::Tensor& held) {
        has_slices |= Slices::is_slice(held);
      });
    }
    if (!has_slices) return;
    throw UsageError(
        {.rank = rank, .operation = "optimizer step"},
        "The optimizer has a part of what it keeps: the model was wrapped with "
        "DdpOptions::shard on a device, and is not any more.\nSave a checkpoint before "
        "the wrapper ends, and load it afterwards.");
  }

  // Of a parameter that was shared until now: others may still use these.
  template <typename Kind>
  static void keep_own_states(Optimizer& optimizer, const at::Tensor& parameter) {
    auto* const state = state_of<Kind>(optimizer, parameter);
    if (state == nullptr) return;
    refuse_slices<Kind>(optimizer, parameter, -1);
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
    if (model.slices) {
      step_slices<Kind>(optimizer, model);
    } else {
      step_shards<Kind>(optimizer, model);
    }
  }

 private:
  template <typename Kind>
  void step_slices(Optimizer& optimizer, Model& model) {
    model.slices->begin_update(
        hash_of<Kind>(optimizer, model), [&] { return describe<Kind>(optimizer, model); },
        model.failure);
    std::exception_ptr failure;
    try {
      place_states<Kind>(optimizer, model);
      for (const Piece& piece : slices_of(model)) update<Kind>(optimizer, lanes_.front(), piece);
    } catch (...) {
      failure = std::current_exception();
      lanes_.clear();
    }
    const std::vector<std::size_t> written = slots_of(model);
    model.slices->end_update(failure, written);
    model.slices->drop_gradients(written);
    take_states<Kind>(optimizer, model);
  }

  template <typename Kind>
  void step_shards(Optimizer& optimizer, Model& model) {
    const std::vector<Piece> pieces = cut_pieces(model);
    const auto lines = [&] { return describe<Kind>(optimizer, model); };
    const std::vector<std::size_t> written = slots_of(model);
    const Shards::Writing writing{
        .write =
            [&](int lane, std::size_t piece) {
              update<Kind>(optimizer, lanes_.at(static_cast<std::size_t>(lane)), pieces[piece]);
            },
        .runs = [&](std::size_t piece) { return runs_of(pieces[piece]); }};
    try {
      model.shards->begin_update(pieces.size(), hash_of<Kind>(optimizer, model), lines,
                                 model.failure);
      std::exception_ptr failure;
      try {
        place_states<Kind>(optimizer, model);
        if (model.shards->host().is_elastic()) {
          model.shards->keep_journal(pieces.size(), bytes_of_largest(pieces));
        }
        model.shards->run_update(writing);
      } catch (...) {
        failure = std::current_exception();
        lanes_.clear();  // what they are about to update is not known
      }
      model.shards->end_update(failure, written);
    } catch (...) {
      if (model.shards->needs_repair()) {
        if (lanes_.empty()) prepare<Kind>(optimizer, model);
        place_states<Kind>(optimizer, model);
        model.shards->repair(writing);
      }
      if (model.shards->is_completed_by_others()) {
        complete<Kind>(optimizer, model, written);
        // The step counts. That a rank is lost shows in the next collective.
        if (model.shards->host().is_elastic() && !model.shards->is_torn()) return;
      }
      throw;
    }
    model.shards->drop_gradients(written);
    take_states<Kind>(optimizer, model);
  }

  // All memory that an update of the piece writes, in an order that is the same on all ranks.
  static shm::Journal::Runs runs_of(const Piece& piece) {
    shm::Journal::Runs runs;
    const auto add = [&](const at::Tensor& one) {
      runs.push_back({static_cast<std::byte*>(one.mutable_data_ptr()), one.nbytes()});
    };
    for (const Part& part : piece) {
      add(part.of(part.use->parameter));
      for (const auto& [_, state] : part.use->states) add(part.of_state(state));
    }
    return runs;
  }
  static std::size_t bytes_of_largest(const std::vector<Piece>& pieces) {
    std::size_t largest = 0;
    for (const Piece& piece : pieces) {
      std::size_t bytes = 0;
      for (const shm::Journal::Run& run : runs_of(piece)) bytes += run.bytes;
      largest = std::max(largest, bytes);
    }
    return largest;
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
    const int rank = model.sharing->ranks().global_rank();
    if (model.sharing->are_local()) {
      throw UsageError({.rank = rank, .operation = "optimizer step"},
                       "The last backward() was local (no_sync() or accumulate()), and ranks "
                       "share the parameters.\nStep only after a synchronised backward.");
    }
    const auto num_lanes = model.slices ? 1 : static_cast<std::size_t>(at::get_num_threads());
    if (lanes_.size() < num_lanes) lanes_.resize(num_lanes);
    const auto* const masters = dynamic_cast<const MasterWeights*>(&optimizer);
    for (Use& use : model.uses) {
      const bool is_16_bit = use.parameter.element_size() == 2;
      use.has_master = masters != nullptr && masters->uses_master_weights() && is_16_bit;
      if (!model.slices) refuse_slices<Kind>(optimizer, use.parameter, rank);
      // States from before the model was wrapped again.
      if (use.has_master && Shards::is_torn(master_of(optimizer, use))) {
        Shards::throw_torn(rank);
      }
      if (auto* const state = state_of<Kind>(optimizer, use.parameter)) {
        Kind::tensors(*state, [&](const char*, const at::Tensor& held) {
          if (Shards::is_torn(held)) Shards::throw_torn(rank);
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
        if (!use.is_slice_alone) use.gradient = laid_out_as(use.parameter, use.gradient);
        continue;
      }
      const std::string reason = why_not_sparse<Kind>(optimizer, use);
      if (reason.empty()) continue;
      throw UsageError({.rank = rank, .operation = "optimizer step"},
                       text::format("The gradient of {} is sparse, and {}.\nUse "
                                    "torch::optim::SGD without momentum and weight decay for it, "
                                    "or torch::optim::Adagrad.",
                                    model.sharing->name_of(use.slot), reason));
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

  // Whether a state is where the ranks of the host share it, or this rank's slice.
  static bool is_placed(const Model& model, const Use& use, const std::string& name,
                        const at::Tensor& held) {
    const at::ScalarType type = type_of_states(use);
    return model.slices ? model.slices->is_state(held, use.slot, type)
                        : model.shards->is_state(held, name, use.slot, type);
  }
  static at::Tensor make_state(const Model& model, const Use& use, const std::string& name) {
    const at::ScalarType type = type_of_states(use);
    return model.slices ? model.slices->state(use.slot, type)
                        : model.shards->state(name, use.slot, type);
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
        const bool is_there = is_placed(model, use, key, held);
        const int where = is_there ? 3 : Slices::is_slice(held) ? 2 : 1;
        numbers.push_back(held.defined() ? where : 0);
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

  // All that a step keeps is in shared memory, or in slices: what is not yet (it was loaded, or the
  // optimizer was made with it) is moved there, a part by each rank.
  template <typename Kind>
  static void place_states(Optimizer& optimizer, Model& model) {
    std::vector<Move> moves;
    for (Use& use : model.uses) {
      if (use.has_master) {
        const at::Tensor held = master_of(optimizer, use);
        const bool is_there = is_placed(model, use, kMaster, held);
        use.states[kMaster] = is_there ? held : make_state(model, use, kMaster);
        if (!is_there) {
          moves.push_back({use.slot, use.states[kMaster], held.defined() ? held : use.parameter});
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
        use.states[name] = is_there ? held : make_state(model, use, name);
        if (held.defined() && !is_there) moves.push_back({use.slot, use.states[name], held});
      }
    }
    if (moves.empty()) return;
    if (model.slices) {
      for (const Move& move : moves) model.slices->fill(move.to, move.slot, move.from);
      return;
    }
    const World& host = model.shards->host();
    for (std::size_t i = 0; i < moves.size(); ++i) {
      const auto rank = static_cast<std::size_t>(host.rank());
      if (i % static_cast<std::size_t>(host.size()) == rank) {
        moves[i].to.copy_(moves[i].from.detach());
      }
    }
    host.barrier();
  }
  struct Move {
    std::size_t slot = 0;
    at::Tensor to;
    at::Tensor from;
  };

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
    proxy.mutable_grad() = part.of_gradient();
    if (use.has_master) {
      auto& masters = dynamic_cast<MasterWeights&>(inner);
      masters.use_master_weights();
      masters.set_master(proxy, part.of_state(use.states.at(kMaster)));
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
      tensor = is_kept ? part.of_state(found->second) : at::Tensor();
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
      const at::Tensor place = part.of_state(part.use->states.at(kMaster));
      if (!is_in(master, place)) place.copy_(master);
    }
    auto* const after = state_of<Kind>(inner, proxy);
    if (after == nullptr) return;
    Kind::tensors(*after, [&](const char* key, const at::Tensor& made) {
      const auto found = part.use->states.find(key);
      if (found == part.use->states.end() || !made.defined()) return;
      const at::Tensor place = part.of_state(found->second);
      if (!is_in(made, place)) place.copy_(made);
    });
  }

  // The optimizer's own state is what T's would be after this step.
  template <typename Kind>
  void take_states(Optimizer& optimizer, Model& model) const {
    for (const Use& use : model.uses) {
      model.sharing->set_keeper(use.slot, token_);
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
  std::vector<Model> models = find_models(optimizer, impl_->token(), &has_others);
  for (Model& model : models) {
    with_kind(optimizer, [&](auto kind) { impl_->step<decltype(kind)>(optimizer, model); });
  }
  if (!has_others) return loss;
  // A parameter without a gradient is left alone.
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      if (Sharing::of(parameter)) {
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
