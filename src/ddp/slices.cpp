#include "ddp/slices.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "base/text.h"
#include "ddp/streams.h"
#include "world/exchange.h"
#include "world/packed.h"
#include "world/pending.h"
#include "world/translate.h"

namespace lockstep {
namespace {

at::Tensor flat_view(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

constexpr const char* kTorn =
    "A step has ended in the middle, and the parameters of ranks differ (DdpOptions::shard).\nGo "
    "on "
    "from a checkpoint: load it into this model, wrapped, with its optimizer, or build both anew.";

}  // namespace

std::int64_t SliceLayout::count(int rank, std::size_t slot) const {
  const auto& its = runs[static_cast<std::size_t>(rank)][slot];
  return std::accumulate(its.begin(), its.end(), std::int64_t{0},
                         [](std::int64_t sum, const SliceRun& run) { return sum + run.count; });
}

// What a storage owns: the memory, and whose it is. A state can be put together with those of other
// ranks when its Slices are gone.
struct Slices::Owned {
  at::Tensor memory = {};
  std::weak_ptr<Slices> user = {};
  std::shared_ptr<bool> is_torn = {};
  struct State {
    World ranks;
    std::shared_ptr<const SliceLayout> layout;
    std::size_t slot = 0;
    std::vector<std::int64_t> sizes = {};  // of the parameter
    std::vector<std::int64_t> strides = {};
  };
  std::optional<State> state = {};  // nothing: it is of parameters

  static void release(void* owned) { delete static_cast<Owned*>(owned); }
};

// Engines are given `memory` itself, so that it stays until their streams are done with it.
at::Tensor Slices::owned(const at::Tensor& memory, Owned owner) {
  owner.memory = memory;
  void* const data = memory.mutable_data_ptr();
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), memory.nbytes(),
      at::DataPtr(data, new Owned(std::move(owner)), &Owned::release, memory.device()));
  return at::empty({0}, memory.options()).set_(storage, 0, memory.sizes(), memory.strides());
}

const Slices::Owned* Slices::owner_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& memory = tensor.storage().data_ptr();
  return memory.get_deleter() == &Owned::release ? static_cast<Owned*>(memory.get_context())
                                                 : nullptr;
}

bool Slices::is_placed(const at::Tensor& tensor) { return owner_of(tensor) != nullptr; }

bool Slices::is_slice(const at::Tensor& tensor) {
  const Owned* const owner = owner_of(tensor);
  return owner != nullptr && owner->state;
}

std::shared_ptr<Slices> Slices::holder_of(const at::Tensor& tensor) {
  const Owned* const owner = owner_of(tensor);
  return owner == nullptr ? nullptr : owner->user.lock();
}

// The world may be another one since, of the same ranks.
World Slices::ranks_of(const at::Tensor& slice) {
  const Owned& owner = *owner_of(slice);
  const auto user = owner.user.lock();
  return user ? user->ranks_ : owner.state->ranks;
}

bool Slices::is_torn(const at::Tensor& tensor) {
  const Owned* const owner = owner_of(tensor);
  return owner != nullptr && owner->is_torn && *owner->is_torn;
}

void Slices::throw_torn(int rank) {
  throw UsageError({.rank = rank, .operation = "parameters in slices"}, kTorn);
}

std::vector<std::int64_t> Slices::sizes_of(const at::Tensor& state) {
  return owner_of(state)->state->sizes;
}

std::shared_ptr<Slices> Slices::place(const World& world, const std::vector<NamedTensor>& trained,
                                      std::vector<BucketPlan> plans) {
  // Wrapped again, with nothing changed: the states of optimizers stay.
  auto before = holder_of(trained.front().tensor);
  if (before && !before->is_same(trained, world, plans)) before = nullptr;
  const bool was_torn =
      std::ranges::any_of(trained, [](const NamedTensor& one) { return is_torn(one.tensor); });
  const at::Tensor all =
      world.all_gather(at::tensor(std::vector<std::int64_t>{before ? 1 : 0, was_torn ? 1 : 0}));
  if (all.select(1, 0).all().item<bool>()) {
    before->go_on_in(world);
    before->set_gradients({});
    before->works_.clear();
    return before;
  }
  const std::shared_ptr<Slices> made(new Slices(world, std::move(plans)));
  *made->is_torn_ = all.select(1, 1).any().item<bool>();
  made->move_in(trained);
  return made;
}

bool Slices::is_same(const std::vector<NamedTensor>& trained, const World& world,
                     const std::vector<BucketPlan>& plans) const {
  const auto is_it = [](const NamedTensor& one, const at::Tensor& parameter) {
    return one.tensor.is_same(parameter);
  };
  return std::ranges::equal(trained, parameters_, is_it) && find_foreign_change().empty() &&
         layout_->plans == plans && has_same_members(ranks_, world);
}

// Gaps between parameters are zero.
void Slices::move_in(const std::vector<NamedTensor>& trained) {
  const at::NoGradGuard no_grad;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    layout_->runs.push_back(runs_of_slice(layout_->plans, trained.size(), rank, ranks_.size()));
  }
  const auto key_of = [&](const BucketPlan& plan) {
    const at::Tensor& one = trained[plan.slots.front()].tensor;
    return std::pair(one.scalar_type(), one.device().str());
  };
  std::map<std::pair<at::ScalarType, std::string>, std::int64_t> lengths;
  for (const BucketPlan& plan : layout_->plans) lengths[key_of(plan)] += plan.num_elements;
  std::map<std::pair<at::ScalarType, std::string>, at::Tensor> memory;  // as parameters see it
  for (const BucketPlan& plan : layout_->plans) {
    at::Tensor& its = memory[key_of(plan)];
    if (its.defined()) continue;
    const auto options = trained[plan.slots.front()].tensor.options().requires_grad(false);
    its =
        owned(at::zeros({lengths.at(key_of(plan))}, options),
              {.user = std::static_pointer_cast<Slices>(shared_from_this()), .is_torn = is_torn_});
  }
  places_.resize(trained.size());
  std::map<std::pair<at::ScalarType, std::string>, std::int64_t> used;
  for (const BucketPlan& plan : layout_->plans) {
    const at::Tensor& its = memory.at(key_of(plan));
    std::int64_t& begin = used[key_of(plan)];
    buckets_.push_back(owner_of(its)->memory.narrow(0, begin, plan.num_elements));
    for (std::size_t i = 0; i < plan.slots.size(); ++i) {
      if (plan.firsts[i] == 0) places_[plan.slots[i]] = {its, begin + plan.offsets[i]};
    }
    begin += plan.num_elements;
  }
  for (std::size_t slot = 0; slot < trained.size(); ++slot) {
    at::Tensor parameter = trained[slot].tensor;
    const auto& [its, first] = places_[slot];
    const at::Tensor place =
        at::empty({0}, its.options())
            .set_(its.storage(), first, parameter.sizes(), parameter.strides());
    place.copy_(parameter.detach());
    keep_memory(parameter);
    parameter.set_data(place);
    parameters_.push_back(parameter);
    add_slot(trained[slot].name, parameter);
  }
}

// The current stream has read it; it may go before that is done.
void Slices::keep_memory(const at::Tensor& parameter) {
  const Owned* const owner = owner_of(parameter);
  keep_for_current_stream(owner == nullptr ? parameter : owner->memory);
}

at::Tensor Slices::take_out(const at::Tensor& parameter) {
  if (!is_placed(parameter)) return {};
  const at::Tensor copy = parameter.detach().clone();
  keep_memory(parameter);
  return copy;
}

void Slices::check(const World& world, const NamedTensor& parameter, TakenMemory& taken) {
  std::string reason;
  if (parameter.tensor.is_complex()) reason = "has complex numbers";
  if (!parameter.tensor.is_non_overlapping_and_dense()) reason = "has gaps in its memory";
  if (reason.empty() && taken.take(parameter.tensor)) {
    reason = "shares its memory with another parameter";
  }
  if (reason.empty()) return;
  throw UsageError({.rank = world.global_rank(), .operation = "DistributedDataParallel"},
                   text::format("The parameter {} {}: DdpOptions::shard cannot cut it.\nChange it, "
                                "or use Shard::kNone.",
                                parameter.name, reason));
}

const std::vector<SliceRun>& Slices::runs(std::size_t slot) const {
  return layout_->runs[static_cast<std::size_t>(ranks_.rank())][slot];
}

at::Tensor Slices::state(std::size_t slot, at::ScalarType type) const {
  const at::Tensor& parameter = parameters_[slot];
  const std::int64_t count = layout_->count(ranks_.rank(), slot);
  const at::Tensor memory =
      at::zeros({std::max(count, std::int64_t{1})},  // so that it has a storage
                parameter.options().dtype(type).requires_grad(false));
  return owned(memory, {.user = std::static_pointer_cast<Slices>(
                            std::const_pointer_cast<Sharing>(shared_from_this())),
                        .state = Owned::State{.ranks = ranks_,
                                              .layout = layout_,
                                              .slot = slot,
                                              .sizes = parameter.sizes().vec(),
                                              .strides = parameter.strides().vec()}})
      .narrow(0, 0, count);
}

bool Slices::is_state(const at::Tensor& tensor, std::size_t slot, at::ScalarType type) const {
  const Owned* const owner = owner_of(tensor);
  return owner != nullptr && owner->state && owner->state->layout == layout_ &&
         owner->state->slot == slot && tensor.scalar_type() == type;
}

void Slices::fill(const at::Tensor& state, std::size_t slot, const at::Tensor& from) const {
  if (is_slice(from) && !has_same_members(ranks_of(from), ranks_)) {
    throw UsageError({.rank = ranks_.global_rank(), .operation = "optimizer step"},
                     text::format("Other ranks have parts of what the optimizer keeps of {} "
                                  "(DdpOptions::shard).\nSave a checkpoint in the world that it "
                                  "was trained in, and load it in this one.",
                                  name_of(slot)));
  }
  at::Tensor whole = is_slice(from) ? gather(from, -1) : from.detach();
  const at::Tensor& parameter = parameters_[slot];
  if (whole.strides() != parameter.strides()) {
    whole = at::empty_strided(parameter.sizes(), parameter.strides(), whole.options()).copy_(whole);
  }
  const at::Tensor flat = flat_view(whole);
  std::int64_t at = 0;
  for (const SliceRun& run : runs(slot)) {
    state.narrow(0, at, run.count).copy_(flat.narrow(0, run.first, run.count));
    at += run.count;
  }
}

at::Tensor Slices::put_together(const SliceLayout& layout, std::size_t slot,
                                const at::Tensor& parts, at::IntArrayRef sizes,
                                at::IntArrayRef strides) {
  const at::Tensor whole = at::empty_strided(sizes, strides, parts.options());
  const at::Tensor flat = flat_view(whole);
  for (std::size_t rank = 0; rank < layout.runs.size(); ++rank) {
    std::int64_t at = 0;
    for (const SliceRun& run : layout.runs[rank][slot]) {
      flat.narrow(0, run.first, run.count)
          .copy_(parts[static_cast<std::int64_t>(rank)].narrow(0, at, run.count));
      at += run.count;
    }
  }
  return whole;
}

// All ranks give equally many elements.
at::Tensor Slices::padded(const SliceLayout& layout, std::size_t slot, const at::Tensor& part) {
  std::int64_t longest = 0;
  for (std::size_t rank = 0; rank < layout.runs.size(); ++rank) {
    longest = std::max(longest, layout.count(static_cast<int>(rank), slot));
  }
  const at::Tensor all = at::zeros({longest}, part.options());
  all.narrow(0, 0, part.numel()).copy_(part);
  return all;
}

at::Tensor Slices::gather(const at::Tensor& state, int root) {
  const at::NoGradGuard no_grad;
  const Owned::State& its = *owner_of(state)->state;
  const World ranks = ranks_of(state);
  const at::Tensor mine = padded(*its.layout, its.slot, state.detach().cpu());
  const at::Tensor parts = root < 0 ? ranks.all_gather(mine) : ranks.gather(mine, root);
  if (!parts.defined()) return {};
  return put_together(*its.layout, its.slot, parts, its.sizes, its.strides);
}

std::vector<NamedTensor> Slices::full_gradients() const {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> all;
  for (std::size_t slot = 0; slot < size(); ++slot) {
    const at::Tensor mine = gradient(slot);
    if (!mine.defined()) continue;
    const at::Tensor& parameter = parameters_[slot];
    const at::Tensor parts = ranks_.all_gather(padded(*layout_, slot, mine));
    all.push_back({name_of(slot),
                   put_together(*layout_, slot, parts, parameter.sizes(), parameter.strides())});
  }
  return all;
}

void Slices::begin_update(std::uint64_t hash,
                          const std::function<std::vector<std::string>()>& lines,
                          const std::exception_ptr& failure) {
  ++num_updates_;
  is_writing_ = false;
  agree(hash, lines, failure);
  is_writing_ = true;
}

// What is queued for a lost rank may never end: the engine gives it up.
void Slices::explain(std::exception_ptr error) {
  if (is_writing_) *is_torn_ = true;
  try {
    ranks_.backend()->abort();
  } catch (const std::exception&) {  // NOLINT: the first error is the one to tell
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    throw_error(known.kind(),
                {.rank = ranks_.global_rank(), .peer = known.peer(), .operation = "optimizer step"},
                text::format("{}\n{}", known.message(),
                             is_writing_ ? kTorn : "The parameters are those before this step."));
  }
}

void Slices::end_update(const std::exception_ptr& failure,
                        const std::vector<std::size_t>& written) {
  std::vector<Numbers> all;
  try {
    all = Sharing::gather({failure ? 1 : 0});
  } catch (...) {
    explain(std::current_exception());
  }
  if (std::ranges::any_of(all, [](const Numbers& one) { return one[0] != 0; })) {
    *is_torn_ = true;
    const std::string mine =
        failure ? to_text(cause_of(failure, ranks_.global_rank(), ErrorKind::kUsage)) : "";
    throw_first_cause(ranks_, exchange_texts(ranks_, mine),
                      {.rank = ranks_.global_rank(), .operation = "optimizer step"});
  }
  const auto is_written = [&](std::size_t slot) {
    return std::ranges::find(written, slot) != written.end();
  };
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (std::ranges::none_of(layout_->plans[i].slots, is_written)) continue;
    at::Tensor& whole = buckets_[i];
    const std::int64_t length = whole.numel() / ranks_.size();
    at::Tensor mine = whole.narrow(0, length * ranks_.rank(), length);
    try {
      works_.push_back(ranks_.backend()->_allgather_base(whole, mine));
      works_.back()->wait();
    } catch (...) {
      *is_torn_ = true;
      rethrow_translated(std::current_exception(), ranks_.members(), ranks_.rank(), "all_gather",
                         text::format("bucket {} of parameters, {}", i, describe_tensor(whole)));
    }
  }
  is_writing_ = false;
  std::vector<at::Tensor> updated;
  for (const std::size_t slot : written) updated.push_back(parameters_[slot]);
  mark_written(updated);
}

void Slices::note_loaded(const std::vector<at::Tensor>& parameters,
                         const std::vector<std::size_t>& with_states) {
  bool has_all = true;
  for (std::size_t slot = 0; slot < size(); ++slot) {
    const auto is_it = [&](const at::Tensor& one) { return one.is_same(parameters_[slot]); };
    has_all &= std::ranges::any_of(parameters, is_it);
    if (keeper_of(slot)) has_all &= std::ranges::find(with_states, slot) != with_states.end();
  }
  if (!has_all) return;
  set_gradients({});
  *is_torn_ = false;
}

std::string Slices::find_foreign_change() const {
  if (*is_torn_) return kTorn;
  for (std::size_t slot = 0; slot < size(); ++slot) {
    const auto& [memory, first] = places_[slot];
    if (parameters_[slot].storage().is_alias_of(memory.storage()) &&
        parameters_[slot].storage_offset() == first) {
      continue;
    }
    return text::format(
        "The parameter {} is not where it was when the model was wrapped (DdpOptions::shard): "
        "set_data(), to() or torch::load() have replaced it.\nLoad and move before wrapping, use "
        "load_weights(), or call rewrap() on all ranks.",
        name_of(slot));
  }
  return {};
}

}  // namespace lockstep
