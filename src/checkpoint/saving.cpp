// Saving: every rank takes its snapshot, ranks agree, each writes its part, the leader commits.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <set>

#include "base/hash.h"
#include "base/log.h"
#include "base/purpose.h"
#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/own_tensors.h"
#include "checkpoint/sharing.h"
#include "checkpoint/tensors.h"
#include "ddp/agreement.h"
#include "ddp/shards.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

// Which tensors the `part`-th of `num_parts` writers has: neighbours, about as many bytes each.
std::vector<NamedTensor> take_part(const std::vector<NamedTensor>& all, int part, int num_parts) {
  double total = 0;
  for (const NamedTensor& one : all) total += static_cast<double>(one.tensor.nbytes());
  std::vector<NamedTensor> mine;
  double before = 0;
  for (const NamedTensor& one : all) {
    // By its middle, so that a large one does not push all others to the next.
    const double middle = before + static_cast<double>(one.tensor.nbytes()) / 2;
    before += static_cast<double>(one.tensor.nbytes());
    const int owner = total == 0 ? 0 : static_cast<int>(middle / total * num_parts);
    if (std::min(owner, num_parts - 1) == part) mine.push_back(one);
  }
  return mine;
}

// Names, types and shapes; ranks that differ in them cannot share the work.
std::string layout_of(const std::vector<NamedTensor>& tensors) {
  Hasher hasher;
  for (const NamedTensor& one : tensors) {
    hasher.add(one.name + text_of(entry_of(one)) +
               (Shards::holder_of(one.tensor) ? " shared" : "") + "\n");
  }
  return hasher.hex();
}

}  // namespace

// What this rank contributes; whatever is wrong with it is thrown.
std::string Checkpointer::Impl::take_snapshot(std::int64_t step, Snapshot& snapshot) {
  wait();
  const ErrorPlace place{.rank = world.global_rank(), .step = step, .operation = "save"};
  if (step < 0) throw UsageError(place, "The step is negative.\nCount steps from 0.");
  if (world.has_logical_ranks() && ddps.empty()) {
    throw UsageError(
        place,
        "There are logical ranks, and no wrapped model was added: their random numbers "
        "would begin again when the run is resumed.\nCall add(ddp).");
  }
  for (const DistributedDataParallel* const ddp : ddps) {
    if (ddp->num_pending() == 0) continue;
    throw UsageError(place,
                     text::format("{} backwards of an accumulation are not yet averaged: their "
                                  "gradients would be lost.\nSave after optimizer.step().",
                                  ddp->num_pending()));
  }
  for (const Part& part : parts) {
    if (!part.is_collective) part.save(snapshot);
  }
  std::set<std::string> names;
  for (const NamedTensor& one : snapshot.tensors) {
    if (names.insert(one.name).second) continue;
    throw UsageError(place, text::format("Two tensors have the name '{}'.\nGive what is added to "
                                         "the Checkpointer names that differ.",
                                         one.name));
  }
  Shards::check_whole(snapshot.tensors, world.global_rank());
  check_sharers(world, snapshot.tensors);
  set_slices_aside(snapshot);
  for (const auto& shards : holders_of(snapshot.tensors)) {
    shards->check_usable();
    if (const std::string change = shards->find_foreign_change(); !change.empty()) {
      throw UsageError(place, change);
    }
  }
  const Json state = {{"version", kStateVersion},
                      {"step", step},
                      {"world_size", world.size()},
                      {"parts", snapshot.values}};
  std::string text = state.dump(1) + "\n";
  refuse_large(text.size());
  return text;
}

// A checkpoint is one run's: each rank writes a part of what all have. Buffers may differ (running
// statistics between two backwards, or with BufferSync::kOff): rank 0's are saved.
void Checkpointer::Impl::agree_on_tensors(Snapshot& snapshot,
                                          const std::vector<std::int64_t>& hashes,
                                          std::int64_t step) const {
  for (const Difference& one : find_differences(world, hashes)) {
    NamedTensor& its = snapshot.tensors[one.index];
    if (!snapshot.buffers.contains(its.name)) {
      throw MismatchError(
          {.rank = world.global_rank(),
           .peer = static_cast<int>(one.ranks.front()),
           .step = step,
           .operation = "save"},
          text::format(
              "{} is not the same on rank {} and on rank {}: a checkpoint would mix them.\n"
              "Keep ranks equal (DistributedDataParallel must live as long as the model is "
              "trained), and leave out of the Checkpointer what is a rank's own.",
              its.name, world.global_rank(0), text::join(one.ranks, ", ")));
    }
    its.tensor = its.tensor.detach().clone(at::MemoryFormat::Contiguous);
    world.broadcast(its.tensor, 0);
  }
}

int Checkpointer::Impl::num_writers() const {
  return options.writers == Writers::kEachRank ? static_cast<int>(group.size()) : 1;
}

// Who writes a tensor has all of it. One after the other, so that nobody has more at a time than
// what it writes. Collective.
void Checkpointer::Impl::gather_slices(Snapshot& snapshot) const {
  if (snapshot.slices.empty()) return;
  const bool is_one_group = group.size() == static_cast<std::size_t>(world.size());
  std::map<std::string, at::Tensor> gathered;
  for (int part = 0; part < num_writers(); ++part) {
    const int its_writer = group[static_cast<std::size_t>(part)];
    for (const NamedTensor& one : take_part(snapshot.tensors, part, num_writers())) {
      const auto slice = snapshot.slices.find(one.name);
      if (slice == snapshot.slices.end()) continue;
      at::Tensor whole = gather_slice(world, slice->second, is_one_group ? its_writer : -1);
      if (its_writer == world.rank()) gathered[one.name] = std::move(whole);
    }
  }
  for (NamedTensor& one : snapshot.tensors) {
    if (const auto found = gathered.find(one.name); found != gathered.end()) {
      one.tensor = found->second;
    }
  }
}

// Every rank comes to the exchange, whatever has happened to it, so that all throw or none does.
Checkpointer::Impl::Saving Checkpointer::Impl::begin(std::int64_t step) {
  settle_if_changed();
  check_same_parts("save");
  Saving saving{.name = {.number = next_number, .step = step}};
  Snapshot snapshot;
  for (const Part& part : parts) {
    if (part.is_collective) part.save(snapshot);
  }
  std::exception_ptr failure;
  std::string layout;
  std::string unfinished;
  std::vector<NamedTensor> own;
  std::vector<std::int64_t> hashes;
  try {
    saving.state = take_snapshot(step, snapshot);
    own = own_tensors(ddps, world.rank());
    if (world.size() > 1) {
      std::vector<NamedTensor> compared = snapshot.tensors;
      for (NamedTensor& one : compared) {
        if (snapshot.slices.contains(one.name)) one.tensor = at::Tensor();
      }
      hashes = hashes_of_mine(world, std::move(compared));
    }
    layout = layout_of(snapshot.tensors);
    if (is_leader()) unfinished = folder->begin();
  } catch (...) {
    failure = std::current_exception();
  }
  const auto drop = [&] {
    if (!unfinished.empty()) folder->abandon(unfinished);
  };
  std::vector<std::string> failures;
  std::vector<Json> all;
  try {
    const Json mine = {{"step", step},
                       {"number", next_number},
                       {"layout", layout},
                       {"unfinished", unfinished},
                       {"failure", failure_text(failure, world.global_rank())}};
    for (const std::string& text : exchange_texts(world, to_text(mine))) {
      all.push_back(Json::parse(text));
      failures.push_back(all.back().at("failure"));
    }
    throw_first_cause(world, failures, {.rank = world.global_rank(), .operation = "save"});
    for (const char* const what : {"step", "number", "layout"}) {
      for (int rank = 1; rank < world.size(); ++rank) {
        const Json& its = all[static_cast<std::size_t>(rank)].at(what);
        if (its == all[0].at(what)) continue;
        throw MismatchError(
            {.rank = world.global_rank(),
             .peer = world.global_rank(rank),
             .step = step,
             .operation = "save"},
            text::format("Ranks save different things: the {} is {} on rank {} and "
                         "{} on rank {}.\nCall save() on all ranks, at the same step.",
                         what, all[0].at(what).dump(), world.global_rank(0), its.dump(),
                         world.global_rank(rank)));
      }
    }
    take_hashes_of_host(world, snapshot.tensors, hashes);
    if (!is_same_everywhere(world, hash_of_all(hashes))) agree_on_tensors(snapshot, hashes, step);
    gather_slices(snapshot);
  } catch (...) {
    drop();
    throw;
  }
  ++next_number;
  saving.unfinished = all[static_cast<std::size_t>(group.front())].at("unfinished");
  saving.key = "checkpoint/" + all[0].at("unfinished").get<std::string>();
  const auto my_place = std::ranges::find(group, world.rank()) - group.begin();
  const int num_parts = num_writers();
  if (const int part = static_cast<int>(my_place); part < num_parts) {
    // A file without tensors helps nobody, and PyTorch takes it for one that is not its own.
    if (auto tensors = take_part(snapshot.tensors, part, num_parts); !tensors.empty()) {
      saving.files.push_back({.name = text::format("tensors-{}-of-{}.safetensors", part, num_parts),
                              .tensors = std::move(tensors)});
    }
  }
  if (!own.empty()) {
    saving.files.push_back(
        {.name = own_file(world.rank(), world.size()), .tensors = std::move(own)});
  }
  return saving;
}

void Checkpointer::Impl::write(const Saving& saving, const Exchange& exchange) const try {
  // As above: every rank takes part in both exchanges.
  Json mine = {{"failure", saving.failure}, {"files", Json::array()}};
  try {
    if (saving.failure.empty()) {
      for (const Saving::File& file : saving.files) {
        const FileRecord record = write_tensors(path + "/" + saving.unfinished, file.name,
                                                file.tensors, FileKind::kOfCheckpoint);
        mine["files"].push_back({record.name, record.bytes, record.hash});
      }
    }
  } catch (const std::exception&) {
    mine["failure"] = failure_text(std::current_exception(), world.global_rank());
  }
  std::vector<std::string> failures;
  Manifest manifest{.step = saving.name.step, .world_size = world.size()};
  const auto all = exchange(to_text(mine));
  for (int rank = 0; rank < world.size(); ++rank) {
    const Json its = Json::parse(all[static_cast<std::size_t>(rank)]);
    failures.push_back(its.at("failure"));
    if (std::ranges::find(group, rank) == group.end()) continue;
    for (const Json& file : its.at("files")) {
      manifest.files.push_back({.name = file[0], .bytes = file[1], .hash = file[2]});
    }
  }
  const bool is_written = std::ranges::all_of(failures, &std::string::empty);
  std::exception_ptr failure;
  if (is_leader()) {
    try {
      if (is_written) {
        manifest.files.push_back(
            write_file(path + "/" + saving.unfinished, "state.json", saving.state));
        folder->commit(saving.unfinished, saving.name, manifest);
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    if (!is_written || failure) folder->abandon(saving.unfinished);
  }
  const auto commits = exchange(failure_text(failure, world.global_rank()));
  throw_first_cause(world, is_written ? commits : failures,
                    {.rank = world.global_rank(), .operation = "save"});
  try {
    if (is_leader()) folder->retain(options.keep_last, options.keep_every);
  } catch (const Error& error) {  // the checkpoint is there; this is tried again with the next
    Log(world.global_rank()).warning("old checkpoints stay: {}", error.message());
  }
} catch (...) {
  if (is_leader()) folder->abandon(saving.unfinished);  // not there if it was committed
  throw;
}

void Checkpointer::Impl::start_writer(Saving saving) {
  const at::NoGradGuard no_grad;
  try {
    copy_tensors(saving);
  } catch (const std::exception&) {  // no memory: all are to know
    saving.failure = failure_text(std::current_exception(), world.global_rank());
  }
  writer = std::thread([this, saving = std::move(saving)] {
    int round = 0;
    try {
      write(saving, [&](const std::string& mine) {
        return exchange_by_store(world, text::format("{}/{}", saving.key, round++), mine,
                                 is_cancelled);
      });
    } catch (...) {
      writer_failure = std::current_exception();
    }
  });
}

void Checkpointer::Impl::copy_tensors(Saving& saving) {
  std::vector<at::Tensor*> tensors;
  for (Saving::File& file : saving.files) {
    for (NamedTensor& one : file.tensors) tensors.push_back(&one.tensor);
  }
  copies.resize(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& tensor = *tensors[i];
    at::Tensor& copy = copies[i];
    const bool is_alike = copy.defined() && copy.sizes() == tensor.sizes() &&
                          copy.scalar_type() == tensor.scalar_type();
    if (!is_alike) {
      copy =
          at::empty(tensor.sizes(),
                    tensor.options().device(at::kCPU).memory_format(at::MemoryFormat::Contiguous));
    }
    copy.copy_(tensor.detach());
    tensor = copy;
  }
}

void Checkpointer::Impl::wait() {
  if (!writer.joinable()) return;
  writer.join();
  if (const auto thrown = std::exchange(writer_failure, nullptr)) std::rethrow_exception(thrown);
}

void Checkpointer::save(std::int64_t step) {
  const PurposeScope purpose(Purpose::kSave);
  const DoingScope doing(*impl_->gauges, Doing::kSaving);
  impl_->write(impl_->begin(step),
               [&](const std::string& mine) { return exchange_texts(impl_->world, mine); });
}

void Checkpointer::save_async(std::int64_t step) {
  const PurposeScope purpose(Purpose::kSave);
  const DoingScope doing(*impl_->gauges, Doing::kSaving);
  impl_->start_writer(impl_->begin(step));
}

void Checkpointer::wait() { impl_->wait(); }

}  // namespace lockstep
