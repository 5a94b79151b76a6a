// One run of one peer of the training benchmark: what a rank does in it, and what comes out.
//
// Every run is a fresh set of processes, so that the peak of memory is this peer's own. The ranks
// of a C++ peer are this program again, those of a Python peer are peers/ddp.py; each prints a
// Measurement as a line of JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lockstep::bench {

struct TrainingRun {
  std::string model;
  std::string peer;
  int warm_up = 0;
  int steps = 0;          // that are timed
  int ranks = 2;          // for measure()
  int watched_steps = 0;  // after those, in which memory is looked at (memory_watch.h)
  int micro_batches = 1;  // of each rank in a step: DistributedDataParallel::accumulate
  int logical_ranks = 0;  // that the ranks play in turns, each with a batch of its own; 0: none
};

struct Measurement {
  double ms_per_step = 0;  // median over steps
  double quiet_ms = 0;     // 2nd percentile: steps that nobody else's work on the machine held up
  double mean_ms = 0;      // shows what happens only now and then, such as replica checks
  double peak_mb = 0;      // of resident memory; a page shared by n processes counts 1/n in each
  double wire_mb = 0;      // that the host has sent in a step; 0 if it has no network of its own
  std::int64_t parameters = 0;
  std::int64_t wrong = 0;  // elements of parameters that differ from rank 0's at the end
  std::uint64_t hash = 0;  // of rank 0's, for C++ peers
  // Of all ranks together, in watched steps: measure() sets these, not the ranks.
  double pss_bytes = 0;
  double sampled_pss_bytes = 0;
  double page_table_bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Measurement, ms_per_step, quiet_ms, mean_ms,
                                                peak_mb, wire_mb, parameters, wrong, hash)

struct Peer {
  const char* name;
  int ranks;
  bool has_replicas;  // that ought to be equal at the end
};
inline constexpr Peer kPeers[] = {{"limit", 2, false},
                                  {"barrier", 2, false},
                                  {"lockstep", 2, true},
                                  {"lockstep_in_backward", 2, true},
                                  {"lockstep_gradients", 2, true},
                                  {"c10d_reducer", 2, true},
                                  {"c10d_reducer_view", 2, true},
                                  {"python_ddp", 2, true},
                                  {"python_ddp_view", 2, true},
                                  {"plain", 1, false},
                                  {"world_of_one", 1, false}};

// Elements that differ between ranks, of all rounds. Where the ranks share them (DdpOptions::shard)
// they cannot: then it is all elements of a round that does not have the bits of `expected`, a run
// of replicas with as many steps. The same with logical ranks, where `expected` is a run of as
// many.
std::int64_t count_wrong(const std::string& peer, const std::vector<Measurement>& rounds,
                         const std::vector<Measurement>& expected);

// Requires: there is a round.
double median(const std::vector<Measurement>& rounds, double Measurement::*member);

// A rank of a C++ peer: trains and prints its measurement.
void be_rank(const TrainingRun& run);

// What this host has sent over its cable so far, with all headers (tests/support/net_hosts.h).
double sent_mb();

// A Python that may have torch: the one that ./dev has made, unless LOCKSTEP_PYTHON is another.
std::string python_program();
// The command for a rank of a Python peer; more arguments say where the ranks meet.
std::vector<std::string> python_rank(const TrainingRun& run, const std::string& python);

// Puts ranks' measurements together: the slowest one's time, the largest peak, all wrong values.
Measurement put_together(const std::vector<Measurement>& ranks);

// Starts the ranks of a run, waits for them, and puts them together: the slowest rank's time, the
// largest peak, all wrong values. `python` is needed by Python's peers.
// Throws: std::runtime_error if a rank failed, or watched steps were too short to see anything.
Measurement measure(const TrainingRun& run, const std::string& python);

}  // namespace lockstep::bench
