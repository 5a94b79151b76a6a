// Host: the ranks of this host, one generation at a time: starts, watches and stops them.
//
// Invariant: when report_end() is called, no process that the ranks have started is left.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/process.h"
#include "launch/connection.h"
#include "launch/cores.h"
#include "launch/job.h"
#include "launch/output.h"
#include "launch/run_options.h"
#include "launch/status.h"
#include "launch/takeover.h"

namespace lockstep {

class Host {
 public:
  Host(EventLoop& loop, Output& output, const RunOptions& options);
  void set_leader(Leader* leader) { leader_ = leader; }

  // What the leader says.
  void start(const Generation& generation);
  void stop(const StopCause& cause);
  void restart_in(std::chrono::milliseconds delay, int restart, const StopCause& cause);
  void finish(const std::optional<StopCause>& cause);
  // Of an elastic job: starts a rank, ends one, tells all that a change is wanted, or closes.
  void obey(const Json& order);

  // What the user says.
  void pass_on(int signal);    // to the ranks, no more
  void interrupt(int signal);  // stops the job; a second time, at once
  void kill_now();

  void look_for_ends();  // after SIGCHLD
  std::optional<int> exit_code() const { return exit_code_; }
  bool is_running() const { return is_running_; }  // processes of ranks may be there
  // Of an elastic job: all places, also of ranks that have ended.
  std::vector<SeatState> seats() const;
  // What they do, for people; of ranks that have ended, how.
  std::vector<RankStatus> look() const;

 private:
  using Clock = EventLoop::Clock;

  struct Rank {
    int number = 0;
    pid_t pid = 0;
    Fd exec = {};                       // its outcome, until that is known
    std::shared_ptr<Connection> store;  // with several hosts, and of an elastic job
    std::optional<ExitStatus> end = {};
    bool is_newcomer = false;
    bool is_lost = false;  // and the job goes on
    Fd gauges = {};        // memory in which it says what it does (base/gauges.h)
    Fd lifeline = {};      // of an elastic job, until it is watched (base/lifeline.h)
    SeatState state = {};  // its part in an elastic job, but for how it ended
    Clock::time_point began = {};
  };

  // `number`: what its output shows. A newcomer comes to a job that runs.
  void start_rank(int local_rank, int number, const Share& share, bool is_newcomer);
  void start_newcomer(const Json& order);
  bool has_launcher_store() const { return options_.num_hosts > 1 || options_.is_elastic; }
  void ask(int local_rank, const std::weak_ptr<Connection>& connection, const Json& request);
  static void note_answer(SeatState& state, const std::string& op, const Json& answer);
  void look_at_exec(Rank& rank);
  void watch_life_of(Rank& rank);
  void look_if_ending(pid_t pid);
  void report_bad_start(const std::string& why);
  void reap_orphans() const;
  void on_end(Rank& rank);
  void on_all_ended();
  void sweep(Clock::time_point deadline);
  int blamed_by(const Rank& rank) const;
  void signal_all(int signal);
  StopCause cause_at(const Rank& rank) const;
  std::string describe(const StopCause& cause) const;

  EventLoop& loop_;
  Output& output_;
  const RunOptions& options_;
  Leader* leader_ = nullptr;
  std::optional<rlim_t> open_files_;  // for ranks
  Fd store_;                          // with one host
  Fd blames_;
  Fd notice_;                // of an elastic job: memory that its ranks read (base/notice.h)
  bool is_closing_ = false;  // of an elastic job: no rank is started any more
  Fd nothing_;
  int master_port_ = 0;
  Generation generation_;
  Clock::time_point began_;
  std::vector<Rank> ranks_;
  bool is_running_ = false;
  std::optional<StopCause> cause_;
  std::optional<EventLoop::Timer> kill_timer_;  // the next step of killing
  int num_interrupts_ = 0;
  Clock::time_point last_interrupt_;
  std::optional<int> exit_code_;
};

// The variables by which a launcher tells a rank its place: torchrun's names, and ours.
std::map<std::string, std::string> place_variables(const RunOptions& options,
                                                   const Generation& generation, int local_rank,
                                                   int master_port);

}  // namespace lockstep
