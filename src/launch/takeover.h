// What launchers must know to go on when the coordinator's host is lost (--coordinator).
//
// The coordinator tells all launchers the JobState whenever it changes; each launcher knows its own
// seats. Whoever is elected next gathers both from all that are left. See docs/elastic.md.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/json.h"
#include "launch/hello.h"
#include "launch/job.h"

namespace lockstep {

// How long a coordinator that is gone remains the coordinator.
inline constexpr auto kLeaseTtl = std::chrono::seconds(5);

struct JobState {
  int coordinator = -1;         // a host
  std::vector<int> hosts = {};  // all, with that one
  int restart = -1;             // how often all ranks were started again; -1: none has started
  int world_size = 0;           // of the ranks that have started together
  int generation = -1;          // the newest one (roster.h)
  int num_logical = 0;

  bool operator==(const JobState&) const = default;
};
LOCKSTEP_JSON_FIELDS(JobState, coordinator, hosts, restart, world_size, generation, num_logical)

// A place for a rank, as its host's launcher knows it.
struct SeatState {
  int place = 0;
  int number = 0;            // what its output shows
  int generation = -1;       // the last one that its process was told to join; -1: a newcomer
  int rank = -1;             // in that generation
  bool has_entered = false;  // the part of the program that survives losses
  bool is_done = false;      // its training is complete
  bool has_ended = false;
  bool has_failed = false;  // it has ended, and not well
};
LOCKSTEP_JSON_FIELDS(SeatState, place, number, generation, rank, has_entered, is_done, has_ended,
                     has_failed)

// A host whose ranks run, as its launcher describes it to a new coordinator.
struct RunningHost {
  JobState job = {};
  std::vector<SeatState> seats = {};
};
LOCKSTEP_JSON_FIELDS(RunningHost, job, seats)

// What a rank has asked, until it is answered.
struct Question {
  int place = 0;
  Json request = {};
  std::function<void(const Json&)> reply = {};
};

// What a launcher that follows passes on to itself when it becomes the coordinator.
struct Handover {
  std::optional<Hello> self = {};  // as of the start: the program's file may be another one by now
  std::optional<RunningHost> running = {};
  std::vector<SeatEnd> ends = {};  // that no coordinator has heard of
  std::vector<Question> questions = {};
  std::optional<End> end = {};  // all ranks of this host have ended
  bool has_followed = false;    // there was another coordinator: its job may still run
};

}  // namespace lockstep
