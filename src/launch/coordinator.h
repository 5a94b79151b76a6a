// Coordinator: one launcher decides for all: when ranks start, why they stop, whether they start
// again, and what all launchers exit with. It is the first host's or, with --coordinator, the one
// that the launchers have elected (candidate.h).
//
// A host is this one (a Host), or a connection to its launcher. All hosts hear the same: start,
// stop with the first cause, finish.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "launch/connection.h"
#include "launch/door.h"
#include "launch/elastic.h"
#include "launch/election.h"
#include "launch/hello.h"
#include "launch/host.h"
#include "launch/job.h"
#include "launch/key_value.h"
#include "launch/output.h"
#include "launch/run_options.h"
#include "launch/status.h"
#include "launch/takeover.h"
#include "launch/tls.h"

namespace lockstep {

// Of the messages between launchers; a version of its own, so that they can tell each other.
inline constexpr int kLinkVersion = 6;
inline constexpr auto kPingEvery = std::chrono::seconds(1);

inline constexpr const char* kHeldUpAdvice =
    "If it was only held up, give all hosts a higher --lost-after.";

inline double seconds_since(EventLoop::Clock::time_point then) {
  return std::chrono::duration<double>(EventLoop::Clock::now() - then).count();
}

// Whether the launcher itself was held up: then it cannot know who else was silent.
class OwnWatch {
 public:
  bool is_in_time() {
    const auto now = EventLoop::Clock::now();
    return now - std::exchange(last_, now) < 3 * kPingEvery;
  }

 private:
  EventLoop::Clock::time_point last_ = EventLoop::Clock::now();
};

// After a takeover, until all hosts have come that the job had, or are lost.
struct Gathering {
  JobState job = {};                                 // the newest that a host knows
  std::set<int> missing = {};                        // hosts
  std::map<int, std::vector<SeatState>> seats = {};  // of hosts whose ranks run
  std::vector<std::function<void()>> later = {};     // what waits for the end of it
  EventLoop::Timer deadline = {};
};

class Coordinator : public Leader {
 public:
  // With one host, starts at once; else opens the port and waits for the others.
  Coordinator(EventLoop& loop, Output& output, Host& host, const RunOptions& options);
  // Elected, perhaps to a job that runs. `is_held`: nobody else can have been elected.
  Coordinator(EventLoop& loop, Output& output, Host& host, const RunOptions& options,
              Handover handover, std::function<bool()> is_held);
  ~Coordinator() override;

  void report(const StopCause& cause) override;
  void report_end(End end) override;
  void kill_all() override;
  void ask(int place, const Json& request, std::function<void(const Json&)> reply) override;
  void report_seat(const SeatEnd& end) override;
  bool drain() override;

  // Another launcher may be elected now: the ranks of this host are killed, and the other hosts are
  // left to that one.
  void step_down(const std::string& reason);

  ElasticJob* elastic() { return elastic_ ? &*elastic_ : nullptr; }
  // Asks the other hosts, too: what is said of them is what they told when they were asked before.
  JobStatus status();

  // Whether all other hosts have said goodbye, after the end.
  bool is_alone() const;

 private:
  struct Member {
    std::string name;
    int num_ranks = 0;
    std::shared_ptr<Connection> connection = {};  // null: this host
    bool has_ended = false;
    std::vector<RankStatus> ranks = {};  // of another host, as it has told last
  };

  void open_door();
  void gather(const JobState& job);
  void take_in(int host_rank, const RunningHost& running);
  void restore_if_all_came();
  void restore();
  void check_restored();
  void leave(std::optional<StopCause> cause);
  void tell_state();
  void start_late(int host_rank);
  bool may_decide() const { return !is_held_ || is_held_(); }

  void on_message(const std::shared_ptr<Connection>& connection, const Json& message);
  void on_hello(const std::shared_ptr<Connection>& connection, const Json& message);
  void on_given_up(int host_rank, const std::string& reason);
  void on_lost(int host_rank, const std::string& reason);
  void on_end(int host_rank, End end);
  void on_seat_end(int host_rank, const SeatEnd& end);
  Json answer(int host_rank, int place, const Json& request);
  void order(int host_rank, const Json& order);
  bool start_if_all_came();
  void call_last();
  bool lose_host(int host_rank, const std::string& reason);
  void start(int generation);
  void stop(StopCause cause);
  void forget_effect();
  void look_around();
  void decide();
  void finish(std::optional<StopCause> cause);

  EventLoop& loop_;
  Output& output_;
  Host& host_;
  const RunOptions& options_;
  const std::function<bool()> is_held_;  // null: it was not elected
  Hello self_;                           // with several hosts
  std::optional<Door> door_;
  EventLoop::Clock::time_point began_ = EventLoop::Clock::now();
  EventLoop::Clock::time_point not_before_ = began_;  // does it start ranks
  bool has_said_who_is_missing_ = false;
  std::map<int, Member> members_;  // by host rank
  KeyValue store_;
  std::optional<ElasticJob> elastic_;
  std::optional<Gathering> gathering_;
  JobState told_;  // to all hosts
  std::optional<EventLoop::Timer> timer_;
  OwnWatch watch_;
  int world_size_ = 0;   // of the ranks that have started together
  int generation_ = -1;  // none has started
  End end_ = End::kOk;   // of all ranks of this generation, so far
  bool is_finished_ = false;
  bool is_draining_ = false;  // its ranks leave, then another host coordinates
  bool has_left_ = false;     // the job goes on without this host, if it can
  std::optional<StopCause> cause_;
  std::optional<StopCause> effect_;  // of a rank that blames another one, which has not failed yet
  EventLoop::Timer effect_timer_;
  std::vector<std::string> notes_;  // on hosts that were started otherwise than this one
};

// The other hosts' side: a connection to the Coordinator.
//
// With --coordinator it is told where that one is. If it is lost, the ranks run on, and what they
// ask is kept, until another is elected, which may be this launcher.
class RemoteLeader : public Leader {
 public:
  RemoteLeader(EventLoop& loop, Output& output, Host& host, const RunOptions& options);
  ~RemoteLeader() override;

  void follow(const ElectedLeader& leader);
  void set_problem(const std::string& problem) { election_problem_ = problem; }
  bool is_ending() const { return lost_.has_value(); }
  bool is_connected() const { return has_joined_; }
  // This launcher coordinates now; nothing may be asked of this object any more.
  Handover hand_over();

  void report(const StopCause& cause) override;
  void report_end(End end) override;
  void kill_all() override;
  void ask(int place, const Json& request, std::function<void(const Json&)> reply) override;
  void report_seat(const SeatEnd& end) override;
  bool drain() override;

 private:
  bool is_elected() const { return !options_.coordinator.empty(); }
  // The ranks run, but nobody decides.
  bool is_orphan() const { return is_elected() && has_started_ && !has_joined_; }
  std::string leader_name() const { return is_elected() ? "the coordinator" : "host 0"; }
  std::string address() const;
  RunningHost describe() const;
  void send_kept();
  void connect();
  void on_socket(Fd socket);
  bool is_greeted() const;
  void on_message(const Json& message);
  void on_lost(const std::string& reason);
  void look_around();
  void wait_to_join();
  std::string why_not_reached() const;
  void fail(const std::string& text, int code, const std::string& advice = "");

  EventLoop& loop_;
  Output& output_;
  Host& host_;
  const RunOptions& options_;
  const Hello self_;
  Tls tls_;
  std::shared_ptr<Connection> connection_;
  EventLoop::Clock::time_point began_ = EventLoop::Clock::now();
  int num_attempts_ = 0;
  bool is_resolving_ = false;
  bool has_joined_ = false;  // the coordinator has said welcome
  bool has_started_ = false;
  bool has_said_waiting_ = false;
  std::string last_reason_;
  std::optional<StopCause> reported_;  // of this generation
  std::optional<StopCause>
      lost_;  // what to finish with when the ranks are gone: nobody decides any more
  bool is_running_ = false;
  bool is_draining_ = false;  // this host leaves the job
  std::map<std::int64_t, Question> questions_;
  std::int64_t num_questions_ = 0;
  // With --coordinator.
  ElectedLeader leader_;          // that was elected last; term 0: none yet
  std::string election_problem_;  // while etcd does not answer
  JobState job_;
  std::vector<SeatEnd> kept_ends_;  // of seats, that no coordinator has heard of
  std::optional<End> kept_end_;
  EventLoop::Clock::time_point lost_since_;                     // of an orphan
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // attempts to connect ask for it
  std::optional<EventLoop::Timer> timer_;
  OwnWatch watch_;
};

}  // namespace lockstep
