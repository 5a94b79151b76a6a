// The rows of the memory benchmark: what peers need on paper, what was measured, and their ratios.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "training_run.h"

namespace lockstep::bench {

// What a host needs on paper, besides what a bare rank does: bytes for each parameter that are
// there once, those that each rank has, and buckets of each rank.
struct MemoryPeer {
  const char* name;
  double once;
  double per_rank;
  double buckets_per_rank;
  bool has_replicas;  // that ought to be equal at the end

  bool is_bare() const { return std::string(name).ends_with("bare"); }
  bool is_python() const { return std::string(name).starts_with("python_"); }
};
// With neither gradients nor states; the parameters of the first are there once for all ranks.
inline constexpr MemoryPeer kBare = {"bare", 4, 0, 0, false};
inline constexpr MemoryPeer kPythonBare = {"python_bare", 0, 4, 0, false};
inline constexpr MemoryPeer kReplicated = {"lockstep", 0, 16, 0, true};

struct MemoryRow {
  MemoryPeer peer;
  std::vector<Measurement> rounds = {};
  std::string no_room = {};  // why it was not run

  bool is_measured() const { return !rounds.empty(); }
  double pss() const { return median(rounds, &Measurement::pss_bytes); }
  double ms() const { return median(rounds, &Measurement::ms_per_step); }
};

// One model on so many ranks.
class MemoryRows {
 public:
  MemoryRows(std::string model, std::int64_t parameters, int ranks)
      : model_(std::move(model)), parameters_(static_cast<double>(parameters)), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  // Bytes on paper, of all ranks.
  double formula(const MemoryPeer& peer) const;
  // Bytes that must be available: with what bare ranks take, as far as they were measured.
  double needed(const MemoryPeer& peer) const;
  // As it is printed with --json; what is not known is null. Where lockstep's replicas did not fit,
  // the others are compared with their formula.
  nlohmann::json object_of(const MemoryRow& row) const;
  std::int64_t wrong(const MemoryRow& row) const;

  std::vector<MemoryRow> bare;
  std::vector<MemoryRow> rows;

 private:
  void compare(const MemoryRow& row, nlohmann::json& object) const;
  const MemoryRow* find(const std::string& name) const;
  // What bare ranks have but for their parameters: processes, activations, gradients on their way.
  std::optional<double> besides(const MemoryPeer& peer,
                                double Measurement::*pss = &Measurement::pss_bytes) const;

  std::string model_;
  double parameters_;
  int ranks_;
};

}  // namespace lockstep::bench
