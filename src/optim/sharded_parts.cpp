#include "optim/sharded_parts.h"

#include <lockstep/error.h>

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace lockstep::optim::detail {

std::vector<Model> find_models(torch::optim::Optimizer& optimizer,
                               const std::shared_ptr<int>& token, bool* has_others) {
  std::vector<Model> models;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    for (const at::Tensor& parameter : optimizer.param_groups()[group].params()) {
      const auto sharing = Sharing::of(parameter);
      *has_others |= !sharing;
      if (!sharing) continue;
      auto found = std::ranges::find(models, sharing, &Model::sharing);
      if (found == models.end()) found = models.insert(models.end(), Model{.sharing = sharing});
      const auto slot = sharing->find(parameter);
      if (!slot) continue;  // it is frozen
      Use use{.parameter = parameter, .group = group, .slot = *slot};
      const auto keeper = sharing->keeper_of(*slot);
      if ((keeper && keeper != token) ||
          std::ranges::find(found->seen, *slot) != found->seen.end()) {
        found->failure = std::make_exception_ptr(UsageError(
            {.rank = sharing->ranks().global_rank(), .operation = "optimizer step"},
            text::format("The parameter {} is in two optimizers, or twice in one, and ranks "
                         "share what an optimizer keeps of it.\nGive it to one.",
                         sharing->name_of(*slot))));
        continue;
      }
      found->seen.push_back(*slot);
      use.gradient = parameter.grad().defined() ? parameter.grad() : sharing->gradient(use.slot);
      if (!use.gradient.defined()) continue;
      use.is_sparse = use.gradient.layout() != at::kStrided;
      use.is_sliced = found->slices != nullptr;
      use.is_slice_alone = use.is_sliced && !parameter.grad().defined();
      found->uses.push_back(std::move(use));
    }
  }
  return models;
}

std::vector<Piece> cut_pieces(const Model& model) {
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
    pieces.back().push_back({.use = &use, .tensor = std::move(tensor)});
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

std::vector<Piece> slices_of(const Model& model) {
  std::map<Alike, Piece> pieces;
  for (const Use& use : model.uses) {
    std::int64_t at = 0;
    for (const SliceRun& run : model.slices->runs(use.slot)) {
      pieces[key_of(use)].push_back({&use, {use.parameter, run.first, run.count}, at});
      at += run.count;
    }
  }
  std::vector<Piece> all;
  for (auto& [key, piece] : pieces) all.push_back(std::move(piece));
  return all;
}

std::vector<std::size_t> slots_of(const Model& model) {
  std::vector<std::size_t> slots;
  for (const Use& use : model.uses) slots.push_back(use.slot);
  return slots;
}

}  // namespace lockstep::optim::detail
