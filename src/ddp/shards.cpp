#include "ddp/shards.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/cause.h"
#include "base/log.h"
#include "base/process.h"
#include "base/text.h"
#include "ddp/model_watch.h"
#include "ddp/slices.h"
#include "world/exchange.h"
#include "world/host_memory.h"
#include "world/packed.h"

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
  if (before && !has_same_members(before->ranks_, host)) before = nullptr;
  // A tensor may have been replaced on one rank alone.
  if (world.all_gather(at::tensor(std::vector<std::int64_t>{before ? 1 : 0})).all().item<bool>()) {
    before->go_on_in(host);
    before->note_written();
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

void Shards::check_whole(const std::vector<NamedTensor>& tensors, int rank) {
  for (const NamedTensor& one : tensors) {
    if (is_torn(one.tensor)) throw_torn(rank);
    if (Slices::is_torn(one.tensor)) Slices::throw_torn(rank);
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
  const auto bytes = static_cast<std::int64_t>(shm::Claims::bytes_for(ranks_.size()));
  const at::Tensor memory = allocate_on_host(ranks_, bytes, at::kByte);
  const shm::Claims claims(static_cast<std::byte*>(memory.mutable_data_ptr()), ranks_.rank(),
                           ranks_.size());
  record_ = std::make_shared<Record>(Record{memory, claims});
}

at::Tensor Shards::allocate(std::int64_t num_elements, at::ScalarType type) {
  return allocate_on_host(ranks_, num_elements, type, {weak_from_this(), record_});
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

bool Shards::is_placed(const at::Tensor& tensor) { return use_of(tensor) != nullptr; }

std::shared_ptr<Shards> Shards::holder_of(const at::Tensor& tensor) {
  const MemoryUse* const use = use_of(tensor);
  if (use == nullptr) return nullptr;
  return std::static_pointer_cast<Shards>(std::static_pointer_cast<Sharing>(use->user.lock()));
}

// By its place: parameters that are tied have one owner, whatever their names.
bool Shards::is_mine(const at::Tensor& tensor) const {
  const auto size = static_cast<std::size_t>(ranks_.size());
  const std::size_t at = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  const std::size_t owner = std::min(at * size / tensor.storage().nbytes(), size - 1);
  return owner == static_cast<std::size_t>(ranks_.rank());
}

// Those that are trained come first: states have no room for the others.
void Shards::lay_out(const std::vector<NamedTensor>& trained,
                     const std::vector<NamedTensor>& frozen) {
  std::map<at::ScalarType, std::int64_t> used;
  TakenMemory taken;  // tensors of one storage that do not overlap go to places of their own
  const auto add = [&](const NamedTensor& one, std::vector<Slot>& slots) {
    std::string reason;
    if (!one.tensor.is_cpu()) reason = "is not in main memory";
    if (one.tensor.is_complex()) reason = "has complex numbers";
    if (!one.tensor.is_non_overlapping_and_dense()) reason = "has gaps in its memory";
    if (reason.empty() && taken.take(one.tensor))
      reason = "shares its memory with another parameter";
    if (!reason.empty()) {
      throw UsageError(
          {.rank = ranks_.global_rank(), .operation = "DistributedDataParallel"},
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
  for (const Slot& slot : trained_) add_slot(slot.name, slot.parameter);
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
        } else if (ranks_.rank() == 0) {
          place.copy_(slot.parameter.detach());
        }
      }
    }
    ranks_.barrier();
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

void Shards::begin_update(std::size_t num_pieces, std::uint64_t hash,
                          const std::function<std::vector<std::string>()>& lines,
                          const std::exception_ptr& failure) {
  check_usable();
  ++num_updates_;
  is_completed_ = needs_repair_ = false;
  // Nobody claims: all have ended the last update.
  if (ranks_.rank() == 0) record_->claims.begin(num_updates_, num_pieces);
  num_pieces_ = num_pieces;
  agree(hash, lines, failure);
}

void Shards::keep_journal(std::size_t num_pieces, std::size_t piece_bytes) {
  if (!ranks_.is_elastic()) return;
  const int num_lanes = std::min(at::get_num_threads(), shm::Claims::kLanes);
  shm::Journal::Size size{ranks_.size(), num_lanes, num_pieces, piece_bytes};
  if (journal_) {
    const auto& now = journal_->size();
    if (now.num_pieces >= num_pieces && now.piece_bytes >= piece_bytes &&
        now.num_lanes == num_lanes) {
      return;
    }
    size.num_pieces = std::max(num_pieces, now.num_pieces);
    size.piece_bytes = std::max(piece_bytes, now.piece_bytes);
  }
  journal_memory_ =
      allocate_on_host(ranks_, static_cast<std::int64_t>(shm::Journal::bytes_for(size)), at::kByte);
  journal_.emplace(static_cast<std::byte*>(journal_memory_.mutable_data_ptr()), ranks_.rank(),
                   size);
}

void Shards::run_update(const Writing& writing) {
  if (!record_->claims.start(num_updates_))
    return;  // end_update() finds the rank that is lost, too
  const int num_lanes = std::min(at::get_num_threads(), shm::Claims::kLanes);
  at::parallel_for(0, num_lanes, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;  // end_update() tells autograd
    for (auto lane = static_cast<int>(begin); lane < static_cast<int>(end); ++lane) {
      while (const auto piece = record_->claims.next(num_updates_, lane)) {
        if (journal_) journal_->save(lane, num_updates_, *piece, writing.runs(*piece));
        writing.write(lane, *piece);
        if (journal_) journal_->set_done(lane, num_updates_, *piece);
      }
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
      Log(ranks_.global_rank())
          .warning("the optimizer's step had failed on this rank: {}",
                   cause_of(failure, ranks_.global_rank()).message);
    }
    explain(std::current_exception());
  }
  if (std::ranges::any_of(all, [](const Numbers& one) { return one[0] != 0; })) {
    if (!written.empty() && record_->claims.num_claimed(num_updates_) > 0)
      record_->claims.set_torn();
    const std::string mine =
        failure ? to_text(cause_of(failure, ranks_.global_rank(), ErrorKind::kUsage)) : "";
    throw_first_cause(ranks_, exchange_texts(ranks_, mine),
                      {.rank = ranks_.global_rank(), .operation = "optimizer step"});
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
                {.rank = ranks_.global_rank(), .peer = known.peer(), .operation = "optimizer step"},
                text::format("{}\n{}", known.message(), what_became()));
  } catch (...) {
    what_became();  // the others rely on a decision
    throw;
  }
}

// Who lives finishes what it writes, and takes all pieces that are left.
std::string Shards::what_became() {
  if (record_->claims.give_up(num_updates_)) return "The parameters are those before this step.";
  if (journal_ && is_by_pieces_) return look_into_journal();
  // Claims first: a lane says that it writes before it claims.
  const auto is_complete = [&] {
    const bool are_all_claimed = record_->claims.num_claimed(num_updates_) == num_pieces_;
    bool is_anybody = false;
    for (int rank = 0; rank < ranks_.size(); ++rank) is_anybody |= record_->claims.is_writing(rank);
    return are_all_claimed && !is_anybody && !record_->claims.is_torn();
  };
  const auto is_lost = [&] {
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      const Member& its = ranks_.members()[static_cast<std::size_t>(rank)];
      if (record_->claims.is_writing(rank) &&
          is_ending({.pid = its.pid, .start_time = its.start_time})) {
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

bool Shards::is_lost(int rank) const {
  const Member& its = ranks_.members()[static_cast<std::size_t>(rank)];
  return is_ending({.pid = its.pid, .start_time = its.start_time});
}

bool Shards::is_living_writing() const {
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (record_->claims.is_writing(rank) && !is_lost(rank)) return true;
  }
  return false;
}

// Who lives finishes what it writes, and takes no more.
std::string Shards::look_into_journal() {
  record_->claims.close(num_updates_);
  const auto deadline = std::chrono::steady_clock::now() + kSettle;
  while (is_living_writing()) {
    if (std::chrono::steady_clock::now() > deadline) {
      record_->claims.set_torn();
      return "A rank does not end to write parameters: go on from a checkpoint.";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  is_completed_ = journal_->are_done(num_updates_, num_pieces_);
  needs_repair_ = !is_completed_;
  return is_completed_ ? "The parameters are those after this step."
                       : "A rank was writing parameters: others do it again.";
}

void Shards::repair(const Writing& writing) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto deadline = std::chrono::steady_clock::now() + kSettle;
  while (!journal_->are_done(num_updates_, num_pieces_)) {
    int first = 0;  // that lives: it may die, too
    while (first < ranks_.rank() && is_lost(first)) ++first;
    if (first == ranks_.rank() && !is_living_writing()) {
      for (std::size_t piece = 0; piece < num_pieces_; ++piece) {
        if (journal_->is_done(num_updates_, piece)) continue;
        journal_->repair(
            0, num_updates_, piece, writing.runs(piece), [this](int rank) { return is_lost(rank); },
            [&] { writing.write(0, piece); });
      }
      break;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      record_->claims.set_torn();
      throw TimeoutError(
          {.rank = ranks_.global_rank(),
           .peer = ranks_.global_rank(first),
           .operation = "optimizer step"},
          text::format("Rank {} has not repaired the parameters that a lost rank was "
                       "writing.\nGo on from a checkpoint.",
                       ranks_.global_rank(first)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  needs_repair_ = false;
  is_completed_ = true;
}

void Shards::change_parameters(const std::function<void()>& change) {
  const auto nothing = [] { return std::vector<std::string>{"a change of parameters"}; };
  is_by_pieces_ = false;  // nothing is kept of what it changes
  const auto by_pieces = c10::make_scope_exit([&] { is_by_pieces_ = true; });
  begin_update(1, 0, nothing);
  std::exception_ptr failure;
  if (ranks_.rank() == 0 && record_->claims.start(num_updates_)) {
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
    throw UsageError({.rank = ranks_.global_rank(), .operation = "optimizer step"},
                     "This process was forked from one that trains: the parameters are in use "
                     "there.\nTrain in the process that has wrapped the model.");
  }
  if (record_->claims.is_torn()) throw_torn(ranks_.global_rank());
}

}  // namespace lockstep
