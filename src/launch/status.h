// What a job is doing, as its launchers see it: of each rank what it has written to memory
// (base/gauges.h), and what the kernel says of its process.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/gauges.h"
#include "base/json.h"

namespace lockstep {

struct RankStatus {
  int number = 0;  // what its output shows
  int host = 0;
  std::string host_name = {};
  int pid = 0;
  std::string end = {};  // how it has ended; empty: it lives
  bool is_stopped = false;
  bool has_gauges = false;
  int rank = -1;  // -1: it has not joined
  int generation = 0;
  std::string doing = {};
  std::string waits_in = {};  // an operation; empty: it does not wait
  int waits_for = -1;         // a rank; -1: not known
  double waits_s = 0;
  std::int64_t steps = 0;
  double step_s = 0;        // the last one
  double since_step_s = 0;  // since it was complete
  double stepping_s = 0;    // all, and of these:
  double waited_s = 0;
  std::int64_t bytes = 0;
  std::int64_t samples = 0;
  std::int64_t loss_step = -1;
  double loss = 0;
  std::int64_t memory_bytes = 0;  // resident
};
LOCKSTEP_JSON_FIELDS(RankStatus, number, host, host_name, pid, end, is_stopped, has_gauges, rank,
                     generation, doing, waits_in, waits_for, waits_s, steps, step_s, since_step_s,
                     stepping_s, waited_s, bytes, samples, loss_step, loss, memory_bytes)

struct JobStatus {
  std::string job = {};      // what its socket is called
  std::string program = {};  // with its arguments
  int pid = 0;               // of the launcher
  double seconds = 0;        // since it began
  int num_hosts = 1;
  int generation = 0;
  bool is_elastic = false;
  std::string note = {};               // what cannot be seen from here
  std::vector<RankStatus> ranks = {};  // by number
};
LOCKSTEP_JSON_FIELDS(JobStatus, job, program, pid, seconds, num_hosts, generation, is_elastic, note,
                     ranks)

// Fills in what the rank itself has written, and its memory.
void look_at(RankStatus& status, int gauges_fd);

// Whether its last step is so long ago that something must be wrong, or the program does something
// else.
bool is_late(const RankStatus& status);

// "waits 3.2 s for rank 2 (all_reduce)", "backward", "was killed by signal 9 (Killed)".
std::string describe_state(const RankStatus& status);

}  // namespace lockstep
