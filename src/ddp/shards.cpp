#include "ddp/shards.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/cause.h"
#include "base/log.h"
#include "base/process.h"
#include "base/text.h"
#include "ddp/model_watch.h"
#include "world/exchange.h"
#include "world/host_memory.h"
#include "world/packed.h"
#include "world/pending.h"
#include "world/translate.h"

namespace lockstep {
namespace {

constexpr std::int64_t kAlign = 64;  // elements between the beginnings of two tensors
constexpr const char* kParameters = "parameters";

// How long to wait for ranks that live and still write after one has failed.
constexpr auto kSettle = std::chrono::seconds(20);

World host_world(const World& world) {
  if (world.local_size() == world.size()) return world;
  const auto& members = world.members();
  const std::string& here = members[static_cast<std::size_t>(world.rank())].host_id;
  int first = 0;
  while (members[static_cast<std::size_t>(first)].host_id != here) ++first;
  return *world.split(first, 0, "the ranks of a host that share a model");
}

}  // namespace

at::Tensor TensorPiece::of(const at::Tensor& tensor) const {
  return tensor.detach().as_strided({count}, {1}, tensor.storage_offset() + first);
}

std::shared_ptr<Shards> Shards::place(const World& world, const std::vector<NamedTensor>& trained,
                                      const std::vector<NamedTensor>& frozen) {
  const World host = host_world(world);
  auto before = find_same(trained, frozen);
  const auto has_member = [](const Member& a, const Member& b) {
    return a.rank == b.rank && a.pid == b.pid && a.start_time == b.start_time;
  };
  if (before && !std::ranges::equal(before->host_.members(), host.members(), has_member)) {
    before = nullptr;
  }
  // A tensor may have been replaced on one rank alone.
  if (world.all_gather(at::tensor(std::vector<std::int64_t>{before ? 1 : 0})).all().item<bool>()) {
    before->go_on_in(host);
    return before;
  }
  const std::shared_ptr<Shards> made(new Shards(host));
  made->process_ = ::getpid();
  do_together(world, "DistributedDataParallel", [&] { made->lay_out(trained, frozen); });
  made->make_record();
  // What is half updated stays so, here and where it was sent to.
  bool was_torn = false;
  for (const auto* const tensors : {&trained, &frozen}) {
    for (const NamedTensor& one : *tensors) was_torn |= is_torn(one.tensor);
  }
  const at::Tensor all = world.all_gather(at::tensor(std::vector<std::int64_t>{was_torn ? 1 : 0}));
  if (all.any().item<bool>()) made->record_->claims.set_torn();
  made->move_in();
  return made;
}

// The engine may be another one: that of before may have failed.
void Shards::go_on_in(const World& host) {
  host_ = host;
  for (const Numbers& one : gather({static_cast<std::int64_t>(num_updates_)})) {
    num_updates_ = std::max(num_updates_, static_cast<std::uint64_t>(one[0]));
  }
  note_written();
}

void Shards::check_whole(const std::vector<NamedTensor>& tensors, int rank) {
  for (const NamedTensor& one : tensors) {
    if (is_torn(one.tensor)) throw_torn(rank);
  }
}

void Shards::throw_torn(int rank) {
  throw UsageError({.rank = rank, .operation = "shared parameters"},
                   "A rank has ended or failed while it wrote the parameters that the ranks of a "
                   "host share: they are half updated.\nGo on from a checkpoint: load it into this "
                   "model, wrapped, with its optimizer, or build both anew.");
}

bool Shards::is_torn(const at::Tensor& tensor) {
  const MemoryUse* const use = use_of(tensor);
  const auto* const record = use == nullptr ? nullptr : static_cast<Record*>(use->record.get());
  return record != nullptr && record->claims.is_torn();
}

void Shards::make_record() {
  const auto bytes = static_cast<std::int64_t>(shm::Claims::bytes_for(host_.size()));
  const at::Tensor memory = allocate_on_host(host_, bytes, at::kByte);
  const shm::Claims claims(static_cast<std::byte*>(memory.mutable_data_ptr()), host_.rank(),
                           host_.size());
  record_ = std::make_shared<Record>(Record{memory, claims});
}

at::Tensor Shards::allocate(std::int64_t num_elements, at::ScalarType type) {
  return allocate_on_host(host_, num_elements, type, {weak_from_this(), record_});
}

// Wrapped again, with nothing changed: the states of optimizers stay where they are.
std::shared_ptr<Shards> Shards::find_same(const std::vector<NamedTensor>& trained,
                                          const std::vector<NamedTensor>& frozen) {
  const auto before = trained.empty() ? nullptr : holder_of(trained.front().tensor);
  if (!before) return nullptr;
  const auto is_same = [&](const std::vector<NamedTensor>& tensors,
                           const std::vector<Slot>& slots) {
    return std::ranges::equal(tensors, slots, [&](const NamedTensor& one, const Slot& slot) {
      return one.tensor.is_same(slot.parameter) && holder_of(one.tensor) == before;
    });
  };
  const bool is_ours = is_same(trained, before->trained_) && is_same(frozen, before->frozen_) &&
                       !before->record_->claims.is_torn();
  return is_ours ? before : nullptr;
}

std::shared_ptr<Shards> Shards::of(const at::Tensor& parameter) {
  if (use_of(parameter) == nullptr) return nullptr;
  if (auto found = holder_of(parameter)) return found;
  throw UsageError({.operation = "optimizer step"},
                   "The DistributedDataParallel that shares this parameter between the ranks of a "
                   "host has gone.\nKeep it as long as the model is trained.");
}

std::optional<std::size_t> Shards::find(const at::Tensor& parameter) const {
  const auto found = slots_.find(parameter.unsafeGetTensorImpl());
  return found == slots_.end() ? std::nullopt : std::optional(found->second);
}

std::shared_ptr<Shards> Shards::holder_of(const at::Tensor& tensor) {
  const MemoryUse* const use = use_of(tensor);
  return use == nullptr ? nullptr : std::static_pointer_cast<Shards>(use->user.lock());
}

// By its place: parameters that are tied have one owner, whatever their names.
bool Shards::is_mine(const at::Tensor& tensor) const {
  const auto size = static_cast<std::size_t>(host_.size());
  const std::size_t at = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  const std::size_t owner = std::min(at * size / tensor.storage().nbytes(), size - 1);
  return owner == static_cast<std::size_t>(host_.rank());
}

// Those that are trained come first: states have no room for the others.
void Shards::lay_out(const std::vector<NamedTensor>& trained,
                     const std::vector<NamedTensor>& frozen) {
  std::map<at::ScalarType, std::int64_t> used;
  std::map<const std::byte*, const std::byte*> taken;  // from, to
  // Tensors of one storage that do not overlap go to places of their own.
  const auto is_taken = [&](const at::Tensor& tensor) {
    if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return false;
    const auto* const first = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto* const end = first + tensor.nbytes();
    const auto next = taken.lower_bound(first);
    if (next != taken.end() && next->first < end) return true;
    if (next != taken.begin() && std::prev(next)->second > first) return true;
    taken[first] = end;
    return false;
  };
  const auto add = [&](const NamedTensor& one, std::vector<Slot>& slots) {
    std::string reason;
    if (!one.tensor.is_cpu()) reason = "is not in main memory";
    if (one.tensor.is_complex()) reason = "has complex numbers";
    if (!one.tensor.is_non_overlapping_and_dense()) reason = "has gaps in its memory";
    if (reason.empty() && is_taken(one.tensor)) reason = "shares its memory with another parameter";
    if (!reason.empty()) {
      throw UsageError(
          {.rank = host_.global_rank(), .operation = "DistributedDataParallel"},
          text::format("The parameter {} {}: DdpOptions::shard cannot move it to shared memory.\n"
                       "Change it, or use Shard::kNone.",
                       one.name, reason));
    }
    Slot slot{.name = one.name,
              .parameter = one.tensor,
              .type = one.tensor.scalar_type(),
              .offset = used[one.tensor.scalar_type()],
              .sizes = one.tensor.sizes().vec(),
              .strides = one.tensor.strides().vec()};
    used[slot.type] += (one.tensor.numel() + kAlign - 1) / kAlign * kAlign;
    slots.push_back(std::move(slot));
  };
  for (const NamedTensor& one : trained) add(one, trained_);
  num_trained_ = used;
  for (const NamedTensor& one : frozen) add(one, frozen_);
  num_all_ = used;
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    slots_[trained_[i].parameter.unsafeGetTensorImpl()] = i;
  }
}

at::Tensor Shards::view(const at::Tensor& memory, const Slot& slot) {
  return at::empty({0}, memory.options())
      .set_(memory.storage(), slot.offset, slot.sizes, slot.strides);
}

// All ranks have the same parameters by now: the first of the host gives its own.
void Shards::move_in() {
  const at::NoGradGuard no_grad;
  for (const auto& [type, count] : num_all_) {
    memory_[{kParameters, type, type}] = allocate(count, type);
  }
  for (const bool is_first : {true, false}) {
    for (std::vector<Slot>* const slots : {&trained_, &frozen_}) {
      for (Slot& slot : *slots) {
        const at::Tensor place = view(memory_.at({kParameters, slot.type, slot.type}), slot);
        if (!is_first) {
          slot.parameter.set_data(place);
        } else if (host_.rank() == 0) {
          place.copy_(slot.parameter.detach());
        }
      }
    }
    host_.barrier();
  }
  ::malloc_trim(0);  // what they were in goes back to the system
  note_written();
}

const at::Tensor& Shards::memory(const Key& key) {
  at::Tensor& found = memory_[key];
  if (!found.defined()) found = allocate(num_trained_.at(std::get<1>(key)), std::get<2>(key));
  return found;
}

at::Tensor Shards::state(const std::string& name, std::size_t slot, at::ScalarType type) {
  return view(memory({name, trained_[slot].type, type}), trained_[slot]);
}

bool Shards::is_state(const at::Tensor& tensor, const std::string& name, std::size_t slot,
                      at::ScalarType type) const {
  const Slot& its = trained_[slot];
  const auto found = memory_.find({name, its.type, type});
  return found != memory_.end() && tensor.defined() &&
         tensor.unsafeGetTensorImpl()->storage().is_alias_of(found->second.storage()) &&
         tensor.storage_offset() == its.offset && tensor.scalar_type() == type &&
         tensor.sizes() == at::IntArrayRef(its.sizes) &&
         tensor.strides() == at::IntArrayRef(its.strides);
}

std::vector<Shards::Numbers> Shards::gather(const Numbers& mine) {
  if (!said_.defined()) {
    said_ = at::empty({static_cast<std::int64_t>(mine.size())}, at::kLong);
    heard_ = at::empty({said_.numel() * host_.size()}, at::kLong);
  }
  std::ranges::copy(mine, said_.mutable_data_ptr<std::int64_t>());
  try {
    host_.backend()->_allgather_base(heard_, said_)->wait();
  } catch (...) {
    rethrow_translated(std::current_exception(), host_.members(), host_.rank(), "all_gather",
                       describe_tensor(said_));
  }
  std::vector<Numbers> all(static_cast<std::size_t>(host_.size()));
  std::memcpy(all.data(), heard_.const_data_ptr(), heard_.nbytes());
  return all;
}

std::int64_t Shards::piece_for(std::int64_t num_elements) {
  constexpr std::int64_t kUnit = 4 << 10;
  return std::clamp((num_elements + kUnit - 1) / kUnit * kUnit, kUnit, kPieceElements);
}

std::vector<TensorPiece> Shards::cut(const std::vector<at::Tensor>& tensors, std::int64_t piece) {
  std::vector<TensorPiece> pieces;
  for (const at::Tensor& one : tensors) {
    for (std::int64_t at = 0; at < one.numel(); at += piece) {
      pieces.push_back({one, at, std::min(piece, one.numel() - at)});
    }
  }
  return pieces;
}

std::shared_ptr<int> Shards::keeper_of(std::size_t slot) const {
  const auto found = keepers_.find(slot);
  return found == keepers_.end() ? nullptr : found->second.lock();
}

void Shards::set_gradients(std::vector<at::Tensor> gradients) {
  gradients_ = std::move(gradients);
  is_used_ = false;
}

void Shards::drop_gradients(const std::vector<std::size_t>& slots) {
  for (const std::size_t slot : slots) {
    if (!gradients_.empty()) gradients_[slot] = at::Tensor();
  }
  is_used_ = true;
}

at::Tensor Shards::gradient_of(const at::Tensor& parameter) {
  const auto shards = parameter.grad().defined() ? nullptr : of(parameter);
  if (!shards) return {};
  const auto slot = shards->find(parameter);
  return slot ? shards->gradient(*slot) : at::Tensor();
}

namespace {

// By model, in the order of parameters, which is the same on all ranks.
std::vector<std::pair<std::shared_ptr<Shards>, std::vector<at::Tensor>>> shared_gradients(
    const std::vector<at::Tensor>& parameters) {
  std::vector<std::pair<std::shared_ptr<Shards>, std::vector<at::Tensor>>> models;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient = Shards::gradient_of(parameter);
    if (!gradient.defined()) continue;
    const auto shards = Shards::of(parameter);
    const auto is_same = [&](const auto& model) { return model.first == shards; };
    auto found = std::ranges::find_if(models, is_same);
    if (found == models.end()) found = models.insert(models.end(), {shards, {}});
    const auto is_it = [&](const at::Tensor& one) { return one.is_same(gradient); };
    if (std::ranges::none_of(found->second, is_it)) found->second.push_back(gradient);
  }
  return models;
}

}  // namespace

double Shards::change_gradients(
    const std::vector<at::Tensor>& parameters,
    const std::function<double(const std::vector<at::Tensor>&)>& change) {
  double largest = 0;
  for (const auto& [shards, gradients] : shared_gradients(parameters)) {
    const World& host = shards->host_;
    const std::vector<TensorPiece> pieces = cut(gradients);
    const auto first_of = [&](int rank) {
      return pieces.size() * static_cast<std::size_t>(rank) / static_cast<std::size_t>(host.size());
    };
    std::vector<at::Tensor> mine;
    for (std::size_t i = first_of(host.rank()); i < first_of(host.rank() + 1); ++i) {
      mine.push_back(pieces[i].of(pieces[i].whole));
    }
    host.barrier();  // a rank may still read them
    const double found = mine.empty() ? 0 : change(mine);
    // When it returns, all ranks have changed theirs.
    largest = std::max(
        largest, host.all_reduce(at::tensor(found, at::kDouble), ReduceOp::MAX).item<double>());
  }
  return largest;
}

bool Shards::is_same_on_hosts(const std::vector<at::Tensor>& parameters, double number) {
  bool is_same = true;
  for (const auto& [shards, gradients] : shared_gradients(parameters)) {
    is_same &= is_same_everywhere(shards->host_, std::bit_cast<std::uint64_t>(number));
  }
  return is_same;
}

std::vector<double> Shards::measure_gradients(
    const std::vector<at::Tensor>& parameters,
    const std::function<std::vector<double>(const std::vector<at::Tensor>&)>& measure) {
  std::unordered_map<const c10::TensorImpl*, double> values;  // by gradient
  for (const auto& [shards, gradients] : shared_gradients(parameters)) {
    const World& host = shards->host_;
    std::size_t all_bytes = 0;
    for (const at::Tensor& one : gradients) all_bytes += one.nbytes();
    std::vector<std::size_t> indexes;
    std::vector<at::Tensor> mine;
    std::size_t before = 0;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const auto owner =
          before * static_cast<std::size_t>(host.size()) / std::max<std::size_t>(all_bytes, 1);
      before += gradients[i].nbytes();
      if (owner != static_cast<std::size_t>(host.rank())) continue;
      indexes.push_back(i);
      mine.push_back(gradients[i]);
    }
    at::Tensor numbers = at::zeros({static_cast<std::int64_t>(gradients.size())}, at::kDouble);
    auto* const data = numbers.mutable_data_ptr<double>();
    const std::vector<double> found = mine.empty() ? std::vector<double>() : measure(mine);
    for (std::size_t i = 0; i < found.size(); ++i) data[indexes[i]] = found[i];
    host.all_reduce(numbers);  // a sum with zeros is exact
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      values[gradients[i].unsafeGetTensorImpl()] = data[i];
    }
  }
  std::vector<double> all;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient = gradient_of(parameter);
    if (gradient.defined()) all.push_back(values.at(gradient.unsafeGetTensorImpl()));
  }
  return all;
}

void Shards::begin_update(std::size_t num_pieces, std::uint64_t hash,
                          const std::function<std::vector<std::string>()>& lines,
                          const std::exception_ptr& failure) {
  check_usable();
  ++num_updates_;
  is_completed_ = false;
  // Nobody claims: all have ended the last update.
  if (host_.rank() == 0) record_->claims.begin(num_updates_, num_pieces);
  num_pieces_ = num_pieces;
  Cause cause{.kind = ErrorKind::kUsage, .rank = host_.global_rank()};
  if (failure) {
    cause = cause_of(failure, host_.global_rank(), ErrorKind::kUsage);
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
    throw_first_cause(host_, exchange_texts(host_, is_fine ? "" : to_text(cause)),
                      {.rank = host_.global_rank(), .operation = "optimizer step"});
  }
  if (std::ranges::any_of(all, [&](const Numbers& one) { return one != mine; })) {
    std::vector<std::string> mine_and_number = lines();
    mine_and_number.push_back(text::format("update {} of the parameters", num_updates_));
    check_same_lines(host_, mine_and_number, "optimizer step", "Steps of the ranks of a host",
                     "Call step() on all ranks, with the same options of the optimizer.");
    throw MismatchError({.rank = host_.global_rank(), .operation = "optimizer step"},
                        "Steps of the ranks of a host differ.\nCall step() on all ranks, with the "
                        "same optimizer.");
  }
}

void Shards::run_update(const std::function<void(int, std::size_t)>& write) {
  if (!record_->claims.start(num_updates_))
    return;  // end_update() finds the rank that is lost, too
  const int num_lanes = std::min(at::get_num_threads(), shm::Claims::kLanes);
  at::parallel_for(0, num_lanes, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;  // end_update() tells autograd
    for (auto lane = static_cast<int>(begin); lane < static_cast<int>(end); ++lane) {
      while (const auto piece = record_->claims.next(num_updates_, lane)) write(lane, *piece);
    }
  });
}

void Shards::end_update(const std::exception_ptr& failure,
                        const std::vector<std::size_t>& written) {
  std::vector<Numbers> all;
  try {
    all = gather({failure ? 1 : 0});
  } catch (...) {
    if (failure) {
      Log(host_.global_rank())
          .warning("the optimizer's step had failed on this rank: {}",
                   cause_of(failure, host_.global_rank()).message);
    }
    explain(std::current_exception());
  }
  if (std::ranges::any_of(all, [](const Numbers& one) { return one[0] != 0; })) {
    if (!written.empty() && record_->claims.num_claimed(num_updates_) > 0)
      record_->claims.set_torn();
    const std::string mine =
        failure ? to_text(cause_of(failure, host_.global_rank(), ErrorKind::kUsage)) : "";
    throw_first_cause(host_, exchange_texts(host_, mine),
                      {.rank = host_.global_rank(), .operation = "optimizer step"});
  }
  note_updated(written);
}

void Shards::note_updated(const std::vector<std::size_t>& written) {
  for (const std::size_t slot : written) {
    mark_written({trained_[slot].parameter});
    trained_[slot].fingerprint = fingerprint_of(trained_[slot].parameter);
  }
}

void Shards::explain(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    throw_error(known.kind(),
                {.rank = host_.global_rank(), .peer = known.peer(), .operation = "optimizer step"},
                text::format("{}\n{}", known.message(), what_became()));
  } catch (...) {
    what_became();  // the others rely on a decision
    throw;
  }
}

// Who lives finishes what it writes, and takes all pieces that are left.
std::string Shards::what_became() {
  if (record_->claims.give_up(num_updates_)) return "The parameters are those before this step.";
  // Claims first: a lane says that it writes before it claims.
  const auto is_complete = [&] {
    const bool are_all_claimed = record_->claims.num_claimed(num_updates_) == num_pieces_;
    bool is_anybody = false;
    for (int rank = 0; rank < host_.size(); ++rank) is_anybody |= record_->claims.is_writing(rank);
    return are_all_claimed && !is_anybody && !record_->claims.is_torn();
  };
  const auto is_lost = [&] {
    for (int rank = 0; rank < host_.size(); ++rank) {
      const Member& its = host_.members()[static_cast<std::size_t>(rank)];
      if (record_->claims.is_writing(rank) &&
          !is_alive({.pid = its.pid, .start_time = its.start_time})) {
        return true;
      }
    }
    return record_->claims.is_torn();
  };
  const auto deadline = std::chrono::steady_clock::now() + kSettle;
  while (!is_complete() && !is_lost() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  is_completed_ = is_complete();
  if (is_completed_) {
    return "The parameters are those after this step: the other ranks have completed it.";
  }
  record_->claims.set_torn();
  return "A rank was writing parameters, and what it wrote is half done: go on from a checkpoint.";
}

void Shards::change_parameters(const std::function<void()>& change) {
  const auto nothing = [] { return std::vector<std::string>{"a change of parameters"}; };
  begin_update(1, 0, nothing);
  std::exception_ptr failure;
  if (host_.rank() == 0 && record_->claims.start(num_updates_)) {
    record_->claims.next(num_updates_, 0);  // who dies now leaves a record
    try {
      const at::NoGradGuard no_grad;
      change();
    } catch (...) {
      failure = std::current_exception();
    }
    record_->claims.next(num_updates_, 0);
  }
  // Also if it failed: what it has left is what all ranks of the host have.
  const auto note = c10::make_scope_exit([&] {
    std::vector<at::Tensor> all;
    for (const std::vector<Slot>* const slots : {&trained_, &frozen_}) {
      for (const Slot& slot : *slots) all.push_back(slot.parameter);
    }
    mark_written(all);
    note_written();
  });
  end_update(failure, {});
}

void Shards::note_written() {
  for (std::vector<Slot>* const slots : {&trained_, &frozen_}) {
    for (Slot& slot : *slots) slot.fingerprint = fingerprint_of(slot.parameter);
  }
}

void Shards::note_loaded(const std::vector<at::Tensor>& tensors, bool were_torn) {
  note_written();
  std::unordered_set<const void*> loaded;
  for (const at::Tensor& one : tensors) loaded.insert(one.const_data_ptr());
  bool has_all = true;
  for (const auto& [key, memory] : memory_) {
    const bool is_parameters = std::get<0>(key) == kParameters;
    for (const std::vector<Slot>* const slots : {&trained_, &frozen_}) {
      for (std::size_t i = 0; i < slots->size(); ++i) {
        const Slot& slot = (*slots)[i];
        if (slot.type != std::get<1>(key) || slot.parameter.numel() == 0) continue;
        if (!is_parameters && (slots == &frozen_ || !keeper_of(i))) continue;
        const auto* const first = static_cast<const std::byte*>(memory.const_data_ptr());
        const std::size_t offset =
            static_cast<std::size_t>(slot.offset) * c10::elementSize(std::get<2>(key));
        has_all &= loaded.contains(first + offset);
      }
    }
  }
  if (has_all) set_gradients({});  // of a step that was not done
  record_->claims.set_torn(were_torn && !has_all);
}

std::string Shards::find_foreign_change() const {
  for (const std::vector<Slot>* const slots : {&trained_, &frozen_}) {
    for (const Slot& slot : *slots) {
      if (!is_at_place(slot)) {
        return text::format(
            "The parameter {} is not in the memory that the ranks of a host share any more: "
            "set_data(), to() or torch::load() have replaced it.\nLoad and move before wrapping, "
            "use load_weights(), or call rewrap() on all ranks.",
            slot.name);
      }
      if (fingerprint_of(slot.parameter) != slot.fingerprint) {
        return text::format(
            "The parameter {} was changed by something else than an optim::Sharded, and the ranks "
            "of a host share it.\nGive the model to optim::Sharded<...>, and write to parameters "
            "in change_parameters() only.",
            slot.name);
      }
    }
  }
  return {};
}

bool Shards::is_at_place(const Slot& slot) const {
  const at::Tensor& memory = memory_.at({kParameters, slot.type, slot.type});
  return slot.parameter.storage().is_alias_of(memory.storage()) &&
         slot.parameter.storage_offset() == slot.offset;
}

void Shards::check_usable() const {
  if (::getpid() != process_) {
    throw UsageError({.rank = host_.global_rank(), .operation = "optimizer step"},
                     "This process was forked from one that trains: the parameters are in use "
                     "there.\nTrain in the process that has wrapped the model.");
  }
  if (record_->claims.is_torn()) throw_torn(host_.global_rank());
}

}  // namespace lockstep
