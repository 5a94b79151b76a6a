#include "memory_rows.h"

#include <lockstep/ddp.h>

#include <algorithm>

namespace lockstep::bench {
namespace {

// A guess of what a bare rank has besides its parameters, before one was measured.
constexpr double kBesides = 700e6;

}  // namespace

double MemoryRows::formula(const MemoryPeer& peer) const {
  const double buckets = peer.buckets_per_rank * static_cast<double>(DdpOptions{}.bucket_bytes);
  return (peer.once + peer.per_rank * ranks_) * parameters_ + buckets * ranks_;
}

double MemoryRows::needed(const MemoryPeer& peer) const {
  // At first each rank makes the model for itself; then it may move to memory for all.
  const double at_first = 4 * parameters_ * (ranks_ + 1);
  // At one moment: peaks of ranks do not all come together.
  const auto now = besides(peer, &Measurement::sampled_pss_bytes);
  return std::max(formula(peer), at_first) + now.value_or(kBesides * ranks_);
}

nlohmann::json MemoryRows::object_of(const MemoryRow& row) const {
  nlohmann::json object = {{"bench", "memory"},
                           {"model", model_},
                           {"peer", row.peer.name},
                           {"ranks", ranks_},
                           {"pss_mb", nullptr},
                           {"sampled_pss_mb", nullptr},
                           {"above_bare_mb", nullptr},
                           {"formula_mb", formula(row.peer) / 1e6},
                           {"x_formula", nullptr},
                           {"x_replicated", nullptr},
                           {"is_replicated_measured", find(kReplicated.name) != nullptr},
                           {"x_replicated_total", nullptr},
                           {"page_tables_mb", nullptr},
                           {"ms_per_step", nullptr},
                           {"x_barrier", nullptr},
                           {"wrong", nullptr}};
  if (!row.no_room.empty()) object["no_room"] = row.no_room;
  if (!row.is_measured()) return object;
  object["pss_mb"] = row.pss() / 1e6;
  object["sampled_pss_mb"] = median(row.rounds, &Measurement::sampled_pss_bytes) / 1e6;
  object["page_tables_mb"] = median(row.rounds, &Measurement::page_table_bytes) / 1e6;
  if (!row.peer.is_bare()) compare(row, object);
  return object;
}

void MemoryRows::compare(const MemoryRow& row, nlohmann::json& object) const {
  const MemoryRow* const replicated = find(kReplicated.name);
  const MemoryRow* const barrier = find("barrier");
  if (const auto left = besides(row.peer)) {
    const auto above = row.pss() - *left;
    object["above_bare_mb"] = above / 1e6;
    object["x_formula"] = above / formula(row.peer);
    const auto its_left = besides(kReplicated);
    const bool is_known = replicated != nullptr && its_left;
    object["x_replicated"] =
        above / (is_known ? replicated->pss() - *its_left : formula(kReplicated));
  }
  if (replicated != nullptr) object["x_replicated_total"] = row.pss() / replicated->pss();
  object["ms_per_step"] = row.ms();
  if (barrier != nullptr) object["x_barrier"] = row.ms() / barrier->ms();
  if (!row.peer.has_replicas) return;
  object["wrong"] = wrong(row);
}

std::int64_t MemoryRows::wrong(const MemoryRow& row) const {
  const MemoryRow* const replicated = find(kReplicated.name);
  return count_wrong(row.peer.name, row.rounds,
                     replicated != nullptr ? replicated->rounds : std::vector<Measurement>());
}

const MemoryRow* MemoryRows::find(const std::string& name) const {
  const auto found =
      std::ranges::find_if(rows, [&](const MemoryRow& row) { return name == row.peer.name; });
  return found == rows.end() || !found->is_measured() ? nullptr : &*found;
}

std::optional<double> MemoryRows::besides(const MemoryPeer& peer, double Measurement::*pss) const {
  for (const MemoryRow& row : bare) {
    if (row.peer.is_python() == peer.is_python() && row.is_measured()) {
      return median(row.rounds, pss) - formula(row.peer);
    }
  }
  return {};
}

}  // namespace lockstep::bench
