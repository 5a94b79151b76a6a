// ElasticJob: what the coordinator does when ranks of an elastic job are lost, come, or are to
// leave: survivors form the next generation (roster.h), the dead are replaced, with a back-off and
// a limit, and seats are added or taken away on request.
//
// Launchers of hosts get orders: start a process in a seat, end one, tell ranks that a change is
// wanted, close. Threading: the event loop's.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/notice.h"
#include "launch/event_loop.h"
#include "launch/job.h"
#include "launch/roster.h"
#include "launch/run_options.h"
#include "launch/takeover.h"

namespace lockstep {

// "1 rank", "3 ranks"
std::string count_of_ranks(int num_ranks);

class ElasticJob {
 public:
  struct Callbacks {
    std::function<void(int host, const Json& order)> order;  // to the launcher of a host
    // The store of a generation is of no use any more: waits there end with this reason.
    std::function<void(int generation, const std::string& why)> revoke;
    std::function<void(const StopCause&)> fail;  // the job cannot go on
    std::function<void(const std::string&)> say;
  };
  ElasticJob(EventLoop& loop, const RunOptions& options, Callbacks callbacks);
  ~ElasticJob();
  ElasticJob(const ElasticJob&) = delete;
  ElasticJob& operator=(const ElasticJob&) = delete;

  // All ranks start together: so many on each host.
  void begin(int generation, const std::map<int, int>& ranks_of_hosts);
  // What is left of a job whose coordinator was lost, by host. `why` it was.
  void restore(int generation, int num_logical, const std::map<int, std::vector<SeatState>>& hosts,
               const std::string& why);
  // A host has come to a job that runs: ranks are started there.
  void add_host(int host, const std::string& name, int num_ranks);
  // A host is gone, with all its processes. False if nobody is left who could go on.
  bool remove_host(int host, const std::string& why);
  void drain_host(int host);  // its ranks leave at the end of a step, and it is closed

  // False: the job fails, as any job does.
  bool on_end(int host, const SeatEnd& end);
  void on_about_to_end(int host, const SeatEnd& end);
  Json answer(int host, int place, const Json& request);

  // What a person asks for (lockstep scale): {"ranks": 3}, {"leave": 2}, or nothing, to be told
  // what there is. Throws UsageError.
  Json obey(const Json& request);
  void stop();  // nobody is replaced any more

  bool is_open() const { return roster_.is_open(); }
  bool is_complete() const { return is_complete_; }
  int generation() const { return roster_.generation(); }
  int num_logical() const { return roster_.num_logical(); }
  int num_members() const { return roster_.num_members(); }

 private:
  using Clock = EventLoop::Clock;
  using Seat = Roster::Seat;
  static constexpr int kRefused = 4;  // after Roster::Answer::Kind's, for ranks

  struct Place {
    int number = 0;         // what its output shows
    bool is_wanted = true;  // if its process dies, another is started
    bool is_alive = false;  // there is a process
    // It is being taken apart, and the others go on: why, as they were told.
    std::string lost_as = {};
    int lost_in = 0;       // the generation
    int num_failures = 0;  // one after the other
    Clock::time_point started = {};
  };

  // To so many ranks in all. Returns what is done.
  std::string scale(int num_ranks);
  std::string drain(int number);  // a rank, by the number that its output shows
  std::string describe() const;
  void start_in(Seat seat);
  bool on_end_of_lost(Seat seat, const SeatEnd& end);
  static constexpr int kNoStep = -1;
  void replace(Seat seat, const SeatEnd& end, int lost_in);
  void on_step(int generation);
  void forget_timer(Seat seat);
  void say_loss(const std::string& text);
  void publish();
  void end_newcomers();
  void close_if_complete();
  void close_if_drained(int host);
  int next_number() const;

  EventLoop& loop_;
  const RunOptions& options_;
  const Callbacks callbacks_;
  Roster roster_;
  std::map<Seat, Place> places_;
  std::map<Seat, EventLoop::Timer> timers_;  // until a process is started there
  std::set<Seat> wait_for_step_;             // those of them that need not wait for the timer
  std::map<int, NoticeWords> told_;          // by host: what its ranks read in memory
  std::vector<std::string> changes_;         // since the last generation, a line each
  std::set<int> drained_;  // hosts that are to be closed when their ranks have left
  std::string kind_;       // of the ranks, as they say: model, platform, options
  int stepped_in_ = 0;     // the newest generation of which a step is complete
  int num_completed_ = 0;
  bool is_stopped_ = false;
  bool is_complete_ = false;
};

}  // namespace lockstep
