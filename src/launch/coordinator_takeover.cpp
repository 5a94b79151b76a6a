// How an elected Coordinator takes over a job that runs, and how it leaves one (--coordinator).
//
// Nothing is decided before all hosts have come that the job had, but for the one that coordinated
// it, or --lost-after has passed. Ranks that are there are members of the newest generation that
// any host knows; everybody else is lost; and as the store is new, the members form the next one.

#include <lockstep/error.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"
#include "launch/coordinator.h"

namespace lockstep {

// So that each of them can take over.
void Coordinator::tell_state() {
  if (!is_held_ || generation_ < 0) return;
  JobState state = {.coordinator = options_.host_rank,
                    .restart = generation_,
                    .world_size = world_size_,
                    .generation = elastic_->generation(),
                    .num_logical = elastic_->num_logical()};
  for (const auto& [rank, _] : members_) state.hosts.push_back(rank);
  if (state == told_) return;
  told_ = state;
  for (const auto& [_, member] : members_) {
    if (member.connection) member.connection->send({{"type", "state"}, {"job", state}});
  }
}

void Coordinator::gather(const JobState& job) {
  gathering_.emplace();
  gathering_->job = job;
  gathering_->missing = {job.hosts.begin(), job.hosts.end()};
  gathering_->missing.erase(job.coordinator);  // nobody would have been elected
  gathering_->missing.erase(options_.host_rank);
  gathering_->deadline = loop_.after(options_.lost_after, [this] { restore(); });
}

void Coordinator::take_in(int host_rank, const RunningHost& running) {
  JobState& job = gathering_->job;
  gathering_->missing.erase(host_rank);
  gathering_->seats[host_rank] = running.seats;
  job.generation = std::max(job.generation, running.job.generation);
  job.num_logical = std::max(job.num_logical, running.job.num_logical);
  for (const SeatState& one : running.seats) {
    job.generation = std::max(job.generation, one.generation);
  }
}

void Coordinator::restore_if_all_came() {
  if (gathering_ && gathering_->missing.empty()) restore();
}

void Coordinator::restore() {
  if (!may_decide()) return;
  Gathering found = std::move(*gathering_);
  gathering_.reset();
  loop_.cancel(found.deadline);
  generation_ = found.job.restart;
  world_size_ = found.job.world_size;
  end_ = End::kOk;
  store_.clear();
  std::vector<int> lost;
  for (const int host : found.job.hosts) {
    if (!found.seats.contains(host)) lost.push_back(host);
  }
  const std::string why =
      lost.empty() ? text::format("host {} has taken over from host {}", options_.host_rank,
                                  found.job.coordinator)
                   : text::format("host {} has taken over: host{} {} lost", options_.host_rank,
                                  lost.size() == 1 ? "" : "s",
                                  text::join(lost, ", ") + (lost.size() == 1 ? " was" : " were"));
  output_.say(text::format("{}; {} of {} hosts go on after generation {}", why, found.seats.size(),
                           found.job.hosts.size(), found.job.generation));
  elastic_->restore(found.job.generation, found.job.num_logical, found.seats, why);
  for (const auto& [rank, _] : members_) {
    if (!found.seats.contains(rank)) start_late(rank);  // it had come before those that run
  }
  tell_state();
  for (const auto& call : found.later) call();
  check_restored();
  decide();
}

// Whether those that are left can go on.
void Coordinator::check_restored() {
  if (is_finished_ || cause_ || elastic_->is_complete()) return;
  std::string problem;
  if (!elastic_->is_open()) {
    problem = "not all ranks had begun to train";
  } else if (elastic_->num_members() < std::max(1, options_.min_ranks)) {
    problem = text::format("{} ranks are left, fewer than --min-ranks {}", elastic_->num_members(),
                           options_.min_ranks);
  } else if (static_cast<int>(members_.size()) < options_.min_hosts) {
    problem = text::format("{} hosts are left, fewer than --hosts {}", members_.size(),
                           options_.min_hosts);
  }
  if (problem.empty()) return;
  report({.host_rank = options_.host_rank,
          .host = self_.host,
          .text = text::format("took over a job that cannot go on: {}", problem),
          .advice = "Start the job again: it goes on from its last checkpoint.",
          .code = kExitPreempted,
          .signal = SIGTERM,
          .may_restart = false});
}

void Coordinator::step_down(const std::string& reason) {
  // Ranks may not take another step: those of the other hosts may be told to go on without them.
  leave(StopCause{.host_rank = options_.host_rank,
                  .host = self_.host,
                  .text = text::format("stops its ranks. {}", reason),
                  .advice = "Another host takes over if it can.",
                  .code = kExitPreempted,
                  .signal = SIGKILL,
                  .may_restart = false});
}

// Its ranks leave at the end of a step; without them it need not coordinate.
bool Coordinator::drain() {
  const bool can_go_on = is_held_ && !gathering_ && !cause_ && !is_finished_ && generation_ >= 0 &&
                         elastic_->is_open() && members_.size() > 1 &&
                         static_cast<int>(members_.size()) - 1 >= options_.min_hosts;
  if (!can_go_on) return false;
  output_.say(
      "told to stop: the ranks of this host leave at the end of a step, then another host "
      "coordinates");
  is_draining_ = true;
  elastic_->drain_host(options_.host_rank);
  return true;
}

// This host alone: the others hear nothing, and elect another coordinator.
void Coordinator::leave(std::optional<StopCause> cause) {
  if (is_finished_ || std::exchange(has_left_, true)) return;
  forget_effect();
  if (gathering_) loop_.cancel(gathering_->deadline);
  gathering_.reset();
  std::erase_if(members_, [](const auto& one) {
    if (one.second.connection) one.second.connection->close();
    return one.second.connection != nullptr;
  });
  door_.reset();
  if (elastic_) elastic_->stop();
  cause_ = std::move(cause);
  if (!host_.is_running()) return finish(cause_);
  host_.stop(*cause_);  // its end is reported
}

}  // namespace lockstep
