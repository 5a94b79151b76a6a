// Saving: every rank takes its snapshot, ranks agree, each writes its part, the leader commits.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/error.h>

#include <algorithm>
#include <random>

#include "base/hash.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/exchange.h"
#include "checkpoint/tensors.h"
#include "ddp/agreement.h"

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
  for (const NamedTensor& one : tensors) hasher.add(one.name + text_of(entry_of(one)) + "\n");
  return hasher.hex();
}

}  // namespace

Checkpointer::Impl::Saving Checkpointer::Impl::begin(std::int64_t step) {
  wait();
  const ErrorPlace place{.rank = world.rank(), .step = step, .operation = "save"};
  if (step < 0) throw UsageError(place, "The step is negative.\nCount steps from 0.");
  if (ddp != nullptr && ddp->num_pending() > 0) {
    throw UsageError(place,
                     fmt::format("{} backwards of an accumulation are not yet averaged: their "
                                 "gradients would be lost.\nSave after optimizer.step().",
                                 ddp->num_pending()));
  }
  Saving saving{.name = {.number = next_number, .step = step}};
  Snapshot snapshot;
  for (const Part& part : parts) part.save(snapshot);
  saving.state = {{"step", step}, {"world_size", world.size()}, {"parts", snapshot.values}};
  std::exception_ptr failure;
  std::string layout;
  try {
    layout = layout_of(snapshot.tensors);
    if (is_leader()) folder->begin(saving.name.number);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  const Json mine = {{"step", step},
                     {"number", next_number},
                     {"layout", layout},
                     {"salt", std::random_device()()},
                     {"failure", failure_text(failure)}};
  std::vector<std::string> failures;
  std::vector<Json> all;
  for (const std::string& text : exchange_texts(world, mine.dump())) {
    all.push_back(Json::parse(text));
    failures.push_back(all.back().at("failure"));
  }
  throw_failure(failures, world, "save");
  for (const char* const what : {"step", "number", "layout"}) {
    for (int rank = 1; rank < world.size(); ++rank) {
      const Json& its = all[static_cast<std::size_t>(rank)].at(what);
      if (its == all[0].at(what)) continue;
      if (is_leader()) folder->abandon(saving.name.number);
      throw MismatchError({.rank = world.rank(), .peer = rank, .step = step, .operation = "save"},
                          fmt::format("Ranks save different things: the {} is {} on rank 0 and {} "
                                      "on rank {}.\nCall save() on all ranks, at the same step.",
                                      what, all[0].at(what).dump(), its.dump(), rank));
    }
  }
  ++next_number;
  saving.key = fmt::format("checkpoint/{}-{}", saving.name.number, all[0].at("salt").dump());
  const auto my_place = std::ranges::find(group, world.rank()) - group.begin();
  saving.num_parts = options.writers == Writers::kEachRank ? static_cast<int>(group.size()) : 1;
  if (my_place < saving.num_parts) {
    saving.part = static_cast<int>(my_place);
    saving.mine = take_part(snapshot.tensors, saving.part, saving.num_parts);
  }
  return saving;
}

void Checkpointer::Impl::write(const Saving& saving, const Exchange& exchange) const {
  // Every rank takes part in both exchanges, whatever happens to it.
  Json mine = Json::object();
  try {
    if (saving.part >= 0) {
      const std::string name =
          fmt::format("tensors-{}-of-{}.safetensors", saving.part, saving.num_parts);
      const FileRecord record = write_tensors(
          fmt::format("{}/.unfinished-{}", path, saving.name.number), name, saving.mine);
      mine["file"] = {record.name, record.bytes, record.hash};
    }
  } catch (const std::exception&) {
    mine["failure"] = failure_text(std::current_exception());
  }
  std::vector<std::string> failures;
  Manifest manifest{.step = saving.name.step, .world_size = world.size()};
  const auto all = exchange(mine.dump());
  for (int rank = 0; rank < world.size(); ++rank) {
    const Json its = Json::parse(all[static_cast<std::size_t>(rank)]);
    failures.push_back(its.value("failure", ""));
    if (its.contains("file") && std::ranges::find(group, rank) != group.end()) {
      manifest.files.push_back(
          {.name = its["file"][0], .bytes = its["file"][1], .hash = its["file"][2]});
    }
  }
  const bool is_written = std::ranges::all_of(failures, &std::string::empty);
  std::exception_ptr failure;
  if (is_leader()) {
    try {
      if (is_written) {
        manifest.files.push_back(write_file(folder->unfinished_path(saving.name.number),
                                            "state.json", saving.state.dump(1) + "\n"));
        folder->commit(saving.name, manifest);
        folder->retain(options.keep_last, options.keep_every);
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    if (!is_written || failure) folder->abandon(saving.name.number);
  }
  const auto commits = exchange(failure_text(failure));
  throw_failure(is_written ? commits : failures, world, "save");
}

void Checkpointer::Impl::start_writer(Saving saving) {
  const at::NoGradGuard no_grad;
  copies.resize(saving.mine.size());
  for (std::size_t i = 0; i < saving.mine.size(); ++i) {
    at::Tensor& tensor = saving.mine[i].tensor;
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
  writer = std::thread([this, saving = std::move(saving)] {
    int round = 0;
    try {
      write(saving, [&](const std::string& mine) {
        return exchange_by_store(world, fmt::format("{}/{}", saving.key, round++), mine,
                                 is_cancelled);
      });
    } catch (...) {
      writer_failure = std::current_exception();
    }
  });
}

void Checkpointer::Impl::wait() {
  if (!writer.joinable()) return;
  writer.join();
  if (const auto thrown = std::exchange(writer_failure, nullptr)) std::rethrow_exception(thrown);
}

void Checkpointer::save(std::int64_t step) {
  impl_->write(impl_->begin(step),
               [&](const std::string& mine) { return exchange_texts(impl_->world, mine); });
}

void Checkpointer::save_async(std::int64_t step) { impl_->start_writer(impl_->begin(step)); }

void Checkpointer::wait() { impl_->wait(); }

}  // namespace lockstep
