#include "elastic/shared_state.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "base/text.h"
#include "world/exchange.h"
#include "world/packed.h"

namespace lockstep {
namespace {

constexpr int kNumNumbers = 2;

std::vector<StateReport> gather(const World& world, const StateReport& mine) {
  at::Tensor numbers = at::empty({kNumNumbers}, at::kLong);
  auto* const at = numbers.mutable_data_ptr<std::int64_t>();
  at[0] = mine.steps;
  at[1] = mine.is_whole ? 1 : 0;
  const at::Tensor all = world.all_gather(numbers);
  std::vector<StateReport> reports;
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto* const its = all.const_data_ptr<std::int64_t>() + rank * kNumNumbers;
    reports.push_back({.steps = its[0], .is_whole = its[1] != 0});
  }
  return reports;
}

// What a source sends, and what a rank that is behind fills: the same names in the same order.
struct Contents {
  std::vector<NamedTensor> tensors;
  std::vector<Wish> wishes;
};

Contents contents_of_source(const std::vector<Part>& parts, Json& values) {
  Snapshot snapshot;
  for (const Part& part : parts) {
    if (part.travels && !part.marks.mark) part.save(snapshot);
  }
  values = std::move(snapshot.values);
  return {.tensors = std::move(snapshot.tensors), .wishes = {}};
}

Contents contents_wanted(const std::vector<Part>& parts, const Json& values,
                         const std::vector<std::string>& names, int rank) {
  Contents contents;
  std::map<std::string, at::Tensor> wanted;
  std::vector<std::string> differences;
  for (const Part& part : parts) {
    if (!part.travels || part.marks.mark) continue;
    Wish wish = part.load(part.has_values ? values.at(part.name) : Json());
    for (const NamedTensor& one : wish.tensors) wanted[one.name] = one.tensor;
    differences.insert(differences.end(), wish.differences.begin(), wish.differences.end());
    contents.wishes.push_back(std::move(wish));
  }
  for (const std::string& name : names) {
    const auto found = wanted.find(name);
    if (found == wanted.end()) {
      differences.push_back(name + ": not here");
      continue;
    }
    contents.tensors.push_back({name, found->second});
  }
  if (differences.empty()) return contents;
  throw MismatchError({.rank = rank, .operation = "elastic"},
                      text::format("This process cannot take over the state of the others:\n  {}\n"
                                   "Start the same program with the same options.",
                                   text::join(differences, "\n  ")));
}

// Tensors from here on travel from where they are to where they belong; smaller ones are packed.
constexpr std::size_t kLargeBytes = 64 << 10;
constexpr std::int64_t kPieceBytes = 4 << 20;

// Sends pieces of the state to the ranks that are behind: by the sources in turns, so that all of
// them hash, and the network of all hosts that have the state is used.
class Transfer {
 public:
  Transfer(const World& world, const std::vector<int>& sources)
      : world_(world),
        sources_(sources),
        is_source_(std::ranges::find(sources, world.rank()) != sources.end()),
        hashes_(at::zeros({world.size()}, at::kLong)) {}

  // Returns the bytes of all.
  std::int64_t send(const std::vector<NamedTensor>& tensors) {
    std::vector<at::Tensor> small;
    std::int64_t bytes = 0;
    for (const NamedTensor& one : tensors) {
      bytes += static_cast<std::int64_t>(one.tensor.nbytes());
      if (one.tensor.nbytes() < kLargeBytes || !one.tensor.is_non_overlapping_and_dense()) {
        small.push_back(one.tensor);
        continue;
      }
      // Strides are the same on all ranks, so the order of memory is, too.
      const at::Tensor memory =
          one.tensor.detach().as_strided({one.tensor.numel()}, {1}).view(at::kByte);
      for (std::int64_t at = 0; at < memory.numel(); at += kPieceBytes) {
        send_piece(memory.narrow(0, at, std::min(kPieceBytes, memory.numel() - at)));
      }
    }
    move_packed(small, [&](const at::Tensor& packed) { send_piece(packed.view(at::kByte)); });
    return bytes;
  }

  // Whether all that are behind have got what was sent. Collective, with the same answer on all.
  bool has_arrived() const {
    const at::Tensor all = world_.all_gather(hashes_);
    for (const int source : sources_) {
      const at::Tensor sent = all[source][source];
      for (int rank = 0; rank < world_.size(); ++rank) {
        const bool is_behind = std::ranges::find(sources_, rank) == sources_.end();
        if (is_behind && !all[rank][source].equal(sent)) return false;
      }
    }
    return true;
  }

 private:
  void send_piece(const at::Tensor& piece) {
    const int source = sources_[turn_++ % sources_.size()];
    const bool is_spare = is_source_ && source != world_.rank();
    at::Tensor place = piece;
    if (is_spare) {  // it has this, and throws away what it gets
      if (!scratch_.defined() || scratch_.numel() < piece.numel()) {
        scratch_ = at::empty({std::max(kPieceBytes, piece.numel())}, at::kByte);
      }
      place = scratch_.narrow(0, 0, piece.numel());
    }
    world_.broadcast(place, source);
    if (is_spare) return;
    auto* const hash = hashes_.mutable_data_ptr<std::int64_t>() + source;
    *hash = static_cast<std::int64_t>(
        hash_bytes(place.const_data_ptr(), place.nbytes(), static_cast<std::uint64_t>(*hash)));
  }

  const World& world_;
  const std::vector<int>& sources_;
  const bool is_source_;
  at::Tensor hashes_;  // of what each source has sent, by rank
  at::Tensor scratch_;
  std::size_t turn_ = 0;
};

}  // namespace

StateShared share_state(const World& world, const std::vector<Part>& parts, const StateReport& mine,
                        const std::vector<std::int64_t>& counts, bool& is_filled) {
  const at::NoGradGuard no_grad;
  const std::vector<StateReport> reports = gather(world, mine);
  StateShared shared{.counts = counts};
  std::int64_t newest = -1;
  for (const StateReport& one : reports) {
    if (one.is_whole) newest = std::max(newest, one.steps);
    if (one.steps < 0) ++shared.num_newcomers;
  }
  const ErrorPlace place{.rank = world.global_rank(), .operation = "elastic"};
  if (newest < 0) {
    throw UsageError(place,
                     "Ranks were lost, and none of those that are left has the state of a complete "
                     "step: they were changing it, or had not been given it yet.\nGo back to the "
                     "last checkpoint: start the job again (lockstep run --max-restarts does).");
  }
  shared.steps = newest;
  std::vector<int> sources;
  for (int rank = 0; rank < world.size(); ++rank) {
    const StateReport& its = reports[static_cast<std::size_t>(rank)];
    if (its.is_whole && its.steps == newest) sources.push_back(rank);
  }
  if (static_cast<int>(sources.size()) == world.size()) return shared;

  const bool is_source = std::ranges::find(sources, world.rank()) != sources.end();
  shared.was_behind = !is_source;
  Json values;
  Contents contents;
  if (is_source) contents = contents_of_source(parts, values);
  Json head;
  if (world.rank() == sources.front()) {
    head = {{"values", values}, {"counts", counts}, {"names", Json::array()}};
    for (const NamedTensor& one : contents.tensors) head["names"].push_back(one.name);
    for (const Part& part : parts) {
      if (part.travels && part.marks.mark) head["marks"][part.name] = part.marks.get();
    }
  }
  head = Json::parse(share_text(world, head.dump(), sources.front()));
  do_together(world, "elastic", [&] {
    if (is_source) return;
    contents =
        contents_wanted(parts, head.at("values"), head.at("names").get<std::vector<std::string>>(),
                        world.global_rank());
  });
  is_filled = !is_source;
  Transfer transfer(world, sources);
  shared.bytes = transfer.send(contents.tensors);
  if (!transfer.has_arrived()) {
    throw MismatchError(place,
                        "The state that ranks were given is not that of the rank that has it.\n"
                        "Look for faulty memory or a faulty network, and start the job again.");
  }
  if (!is_source) {
    std::vector<at::Tensor> written;
    for (const NamedTensor& one : contents.tensors) written.push_back(one.tensor);
    mark_written(written);
    for (const Wish& wish : contents.wishes) wish.finish();
    for (const Part& part : parts) {
      if (part.travels && part.marks.mark) part.marks.set(head.at("marks").at(part.name));
    }
    shared.counts = head.at("counts").get<std::vector<std::int64_t>>();
    is_filled = false;
  }
  return shared;
}

}  // namespace lockstep
