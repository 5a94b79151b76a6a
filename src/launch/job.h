// The parts of a job, as its launchers speak of them.
#pragma once

#include <lockstep/error.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/json.h"

namespace lockstep {

// One start of all ranks. After a failure the next generation may follow.
struct Generation {
  int number = 0;
  int first_rank = 0;  // of this host
  int world_size = 0;
  int max_restarts = 0;     // host 0's, which decides
  bool is_running = false;  // an elastic job's, to which this host comes
};
LOCKSTEP_JSON_FIELDS(Generation, number, first_rank, world_size, max_restarts, is_running)

// Why a job has to stop: the first thing that happened.
struct StopCause {
  int host_rank = 0;
  std::string host = {};
  int rank = -1;          // -1: no rank, but the host itself
  int blamed_rank = -1;   // the rank that it failed because of, says the rank
  std::string text = {};  // "was killed by signal 9 (Killed) after 3.1 s"
  std::string advice = {};
  int code = 1;               // that the launchers exit with
  int signal = 15;            // that the ranks get
  bool is_interrupt = false;  // somebody wanted it: no failure if all ranks then exit with 0
  bool may_restart = true;
  std::vector<std::string> last_lines = {};
};
LOCKSTEP_JSON_FIELDS(StopCause, host_rank, host, rank, blamed_rank, text, advice, code, signal,
                     is_interrupt, may_restart, last_lines)

// Which of two causes explains the end better: a failure counts for more than ranks that have saved
// and left, and most if no other rank is blamed for it.
inline int weight_of(const StopCause& cause) {
  return cause.code == kExitPreempted ? 0 : cause.blamed_rank >= 0 ? 1 : 2;
}

// How the ranks of a host, or of all, have ended; the worst of them counts.
enum class End { kOk, kSaved, kFailed };  // kSaved: told to stop, with the state saved

// The end of a rank of an elastic job.
struct SeatEnd {
  int place = 0;         // on its host
  StopCause cause = {};  // as it would be the job's; its code is 0 if the rank ended well
  // It is about to end, whatever its code will be: how is told when it has.
  bool is_about_to = false;
};
LOCKSTEP_JSON_FIELDS(SeatEnd, place, cause, is_about_to)

// What decides for all hosts: on the first host itself, on the others a connection to it.
class Leader {
 public:
  virtual ~Leader() = default;
  // The ranks of this host must stop, or are stopping already, for this reason.
  virtual void report(const StopCause& cause) = 0;
  // All ranks of all hosts are to be killed at once.
  virtual void kill_all() = 0;
  // All processes of the generation are gone from this host.
  virtual void report_end(End end) = 0;
  // A rank, by its place on this host, asks the job's store or, in an elastic job, for its next
  // generation.
  virtual void ask(int place, const Json& request, std::function<void(const Json&)> reply) = 0;
  // Of an elastic job: a rank of this host has ended.
  virtual void report_seat(const SeatEnd& end) = 0;
  // Whether somebody who wants this host to stop means its ranks alone: they leave, and the job
  // goes on. If so, it is done.
  virtual bool drain() { return false; }
};

}  // namespace lockstep
