// What `lockstep top` shows of a job: a head, and a line for each rank. Pure: from two looks at the
// job, so that rates are of the time between them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/status.h"

namespace lockstep {

enum class TopSort { kRank, kHost, kWork, kWaiting, kMemory };

struct TopOptions {
  TopSort sort = TopSort::kRank;
  bool is_reversed = false;
  std::string filter = {};  // only lines in which this stands
};

struct TopLine {
  std::string text;
  bool is_bad = false;  // it has failed, or somebody has waited long
};
struct TopView {
  std::vector<std::string> head;
  std::string columns;
  std::vector<TopLine> ranks;
};

// `before`: an earlier look; without one, rates are those of the whole run.
TopView view_of(const JobStatus& now, const std::optional<JobStatus>& before,
                const TopOptions& options);

// All of it, for who has no terminal.
std::string to_text(const TopView& view);

// A line for each job, for `lockstep jobs`.
std::string list_jobs(const std::vector<JobStatus>& jobs);

// `lockstep top`: on a terminal until q is pressed or the job ends, else once. Returns an exit
// code. Throws: UsageError if there is no such job, or several and none was named.
int run_top(const std::string& job, double every_s);
int print_jobs();

}  // namespace lockstep
