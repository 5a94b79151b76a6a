#include "ddp/sharing.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "ddp/shards.h"
#include "ddp/slices.h"
#include "world/exchange.h"
#include "world/pending.h"
#include "world/translate.h"

namespace lockstep {

std::shared_ptr<Sharing> Sharing::of(const at::Tensor& parameter) {
  // On a device the parameters are whole, and anybody's again.
  if (auto found = Slices::holder_of(parameter)) return found;
  if (!Shards::is_placed(parameter)) return nullptr;
  if (auto found = Shards::holder_of(parameter)) return found;
  throw UsageError({.operation = "optimizer step"},
                   "The DistributedDataParallel that shares this parameter between the ranks of a "
                   "host has gone.\nKeep it as long as the model is trained.");
}

std::optional<std::size_t> Sharing::find(const at::Tensor& parameter) const {
  const auto found = slots_.find(parameter.unsafeGetTensorImpl());
  return found == slots_.end() ? std::nullopt : std::optional(found->second);
}

void Sharing::add_slot(const std::string& name, const at::Tensor& parameter) {
  slots_[parameter.unsafeGetTensorImpl()] = names_.size();
  names_.push_back(name);
}

std::shared_ptr<int> Sharing::keeper_of(std::size_t slot) const {
  const auto found = keepers_.find(slot);
  return found == keepers_.end() ? nullptr : found->second.lock();
}

void Sharing::set_gradients(std::vector<at::Tensor> gradients) {
  gradients_ = std::move(gradients);
  is_used_ = false;
}

void Sharing::drop_gradients(const std::vector<std::size_t>& slots) {
  for (const std::size_t slot : slots) {
    if (!gradients_.empty()) gradients_[slot] = at::Tensor();
  }
  is_used_ = true;
}

std::vector<Sharing::Numbers> Sharing::gather(const Numbers& mine) {
  if (!said_.defined()) {
    said_ = at::empty({static_cast<std::int64_t>(mine.size())}, at::kLong);
    heard_ = at::empty({said_.numel() * ranks_.size()}, at::kLong);
  }
  std::ranges::copy(mine, said_.mutable_data_ptr<std::int64_t>());
  try {
    ranks_.backend()->_allgather_base(heard_, said_)->wait();
  } catch (...) {
    rethrow_translated(std::current_exception(), ranks_.members(), ranks_.rank(), "all_gather",
                       describe_tensor(said_));
  }
  std::vector<Numbers> all(static_cast<std::size_t>(ranks_.size()));
  std::memcpy(all.data(), heard_.const_data_ptr(), heard_.nbytes());
  return all;
}

void Sharing::go_on_in(const World& ranks) {
  ranks_ = ranks;
  for (const Numbers& one : gather({static_cast<std::int64_t>(num_updates_)})) {
    num_updates_ = std::max(num_updates_, static_cast<std::uint64_t>(one[0]));
  }
}

void Sharing::agree(std::uint64_t hash, const std::function<std::vector<std::string>()>& lines,
                    const std::exception_ptr& failure) {
  Cause cause{.kind = ErrorKind::kUsage, .rank = ranks_.global_rank()};
  if (failure) {
    cause = cause_of(failure, ranks_.global_rank(), ErrorKind::kUsage);
  } else {
    cause.message = find_foreign_change();
  }
  const bool is_fine = !failure && cause.message.empty();
  const Numbers mine = {static_cast<std::int64_t>(num_updates_), static_cast<std::int64_t>(hash),
                        is_fine ? 0 : 1};
  std::vector<Numbers> all;
  try {
    all = gather(mine);
  } catch (...) {
    explain(std::current_exception());
  }
  if (std::ranges::any_of(all, [](const Numbers& one) { return one[2] != 0; })) {
    throw_first_cause(ranks_, exchange_texts(ranks_, is_fine ? "" : to_text(cause)),
                      {.rank = ranks_.global_rank(), .operation = "optimizer step"});
  }
  if (std::ranges::any_of(all, [&](const Numbers& one) { return one != mine; })) {
    std::vector<std::string> mine_and_number = lines();
    mine_and_number.push_back(text::format("update {} of the parameters", num_updates_));
    check_same_lines(ranks_, mine_and_number, "optimizer step", "Steps of ranks that share a model",
                     "Call step() on all ranks, with the same options of the optimizer.");
    throw MismatchError({.rank = ranks_.global_rank(), .operation = "optimizer step"},
                        "Steps of ranks that share a model differ.\nCall step() on all ranks, with "
                        "the same optimizer.");
  }
}

bool has_same_members(const World& a, const World& b) {
  return std::ranges::equal(a.members(), b.members(), [](const Member& one, const Member& other) {
    return one.rank == other.rank && one.pid == other.pid && one.start_time == other.start_time;
  });
}

bool TakenMemory::take(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return false;
  const auto* const first = static_cast<const std::byte*>(tensor.const_data_ptr());
  const auto* const end = first + tensor.nbytes();
  const auto next = taken_.lower_bound(first);
  if (next != taken_.end() && next->first < end) return true;
  if (next != taken_.begin() && std::prev(next)->second > first) return true;
  taken_[first] = end;
  return false;
}

at::Tensor shared_gradient_of(const at::Tensor& parameter) {
  const auto sharing = parameter.grad().defined() ? nullptr : Sharing::of(parameter);
  if (!sharing) return {};
  const auto slot = sharing->find(parameter);
  return slot ? sharing->gradient(*slot) : at::Tensor();
}

namespace {

struct SharedModel {
  std::shared_ptr<Sharing> sharing;
  std::vector<at::Tensor> gradients = {};

  bool has_slices() const { return dynamic_cast<const Slices*>(sharing.get()) != nullptr; }
};

// By model, in the order of parameters, which is the same on all ranks.
std::vector<SharedModel> shared_models(const std::vector<at::Tensor>& parameters) {
  std::vector<SharedModel> models;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient = shared_gradient_of(parameter);
    if (!gradient.defined()) continue;
    const auto sharing = Sharing::of(parameter);
    auto found = std::ranges::find(models, sharing, &SharedModel::sharing);
    if (found == models.end()) found = models.insert(models.end(), SharedModel{sharing});
    const auto is_it = [&](const at::Tensor& one) { return one.is_same(gradient); };
    if (std::ranges::none_of(found->gradients, is_it)) found->gradients.push_back(gradient);
  }
  return models;
}

// What this rank changes of gradients.
std::vector<at::Tensor> parts_of(const SharedModel& model) {
  std::vector<at::Tensor> mine;
  if (model.has_slices()) {
    std::ranges::copy_if(model.gradients, std::back_inserter(mine),
                         [](const at::Tensor& one) { return one.numel() > 0; });
    return mine;
  }
  const World& host = model.sharing->ranks();
  const std::vector<TensorPiece> pieces = Shards::cut(model.gradients);
  const auto first_of = [&](int rank) {
    return pieces.size() * static_cast<std::size_t>(rank) / static_cast<std::size_t>(host.size());
  };
  for (std::size_t i = first_of(host.rank()); i < first_of(host.rank() + 1); ++i) {
    mine.push_back(pieces[i].of(pieces[i].whole));
  }
  return mine;
}

// Indexes of gradients whose norms this rank finds out: all of what it has, or some of what the
// host has, about as many bytes as the others.
std::vector<std::size_t> measured_here(const SharedModel& model) {
  const auto& ranks = model.sharing->ranks();
  std::size_t all_bytes = 0;
  for (const at::Tensor& one : model.gradients) all_bytes += one.nbytes();
  std::vector<std::size_t> indexes;
  std::size_t before = 0;
  for (std::size_t i = 0; i < model.gradients.size(); ++i) {
    const auto owner =
        before * static_cast<std::size_t>(ranks.size()) / std::max<std::size_t>(all_bytes, 1);
    before += model.gradients[i].nbytes();
    const bool is_mine = model.has_slices() ? model.gradients[i].numel() > 0
                                            : owner == static_cast<std::size_t>(ranks.rank());
    if (is_mine) indexes.push_back(i);
  }
  return indexes;
}

}  // namespace

double change_shared_gradients(
    const std::vector<at::Tensor>& parameters,
    const std::function<double(const std::vector<at::Tensor>&)>& change) {
  double largest = 0;
  for (const SharedModel& model : shared_models(parameters)) {
    const World& ranks = model.sharing->ranks();
    const std::vector<at::Tensor> mine = parts_of(model);
    if (!model.has_slices()) ranks.barrier();  // a rank may still read them
    const double found = mine.empty() ? 0 : change(mine);
    // When it returns, all ranks have changed theirs.
    largest = std::max(
        largest, ranks.all_reduce(at::tensor(found, at::kDouble), ReduceOp::MAX).item<double>());
  }
  return largest;
}

std::vector<double> norms_of_shared_gradients(
    const std::vector<at::Tensor>& parameters,
    const std::function<std::vector<double>(const std::vector<at::Tensor>&)>& norms_of) {
  std::unordered_map<const c10::TensorImpl*, double> values;  // by gradient
  for (const SharedModel& model : shared_models(parameters)) {
    const std::vector<std::size_t> indexes = measured_here(model);
    std::vector<at::Tensor> mine;
    for (const std::size_t i : indexes) mine.push_back(model.gradients[i]);
    at::Tensor numbers =
        at::zeros({static_cast<std::int64_t>(model.gradients.size())}, at::kDouble);
    auto* const data = numbers.mutable_data_ptr<double>();
    const std::vector<double> found = mine.empty() ? std::vector<double>() : norms_of(mine);
    for (std::size_t i = 0; i < found.size(); ++i) {
      data[indexes[i]] = model.has_slices() ? found[i] * found[i] : found[i];
    }
    model.sharing->ranks().all_reduce(numbers);  // on a host: a sum with zeros, which is exact
    for (std::size_t i = 0; i < model.gradients.size(); ++i) {
      values[model.gradients[i].unsafeGetTensorImpl()] =
          model.has_slices() ? std::sqrt(data[i]) : data[i];
    }
  }
  std::vector<double> all;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient = shared_gradient_of(parameter);
    if (gradient.defined()) all.push_back(values.at(gradient.unsafeGetTensorImpl()));
  }
  return all;
}

bool is_same_where_shared(const std::vector<at::Tensor>& parameters, double number) {
  bool is_same = true;
  for (const SharedModel& model : shared_models(parameters)) {
    is_same &= is_same_everywhere(model.sharing->ranks(), std::bit_cast<std::uint64_t>(number));
  }
  return is_same;
}

}  // namespace lockstep
