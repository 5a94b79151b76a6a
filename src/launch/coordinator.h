// Coordinator: the first host's launcher decides for all: when ranks start, why they stop, whether
// they start again, and what all launchers exit with.
//
// A host is this one (a Host), or a connection to its launcher. All hosts hear the same: start,
// stop with the first cause, finish.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "launch/connection.h"
#include "launch/door.h"
#include "launch/elastic.h"
#include "launch/hello.h"
#include "launch/host.h"
#include "launch/job.h"
#include "launch/key_value.h"
#include "launch/output.h"
#include "launch/run_options.h"
#include "launch/tls.h"

namespace lockstep {

// Of the messages between launchers; a version of its own, so that they can tell each other.
inline constexpr int kLinkVersion = 4;
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

class Coordinator : public Leader {
 public:
  // With one host, starts at once; else opens the port and waits for the others.
  Coordinator(EventLoop& loop, Output& output, Host& host, const RunOptions& options);
  ~Coordinator() override;

  void report(const StopCause& cause) override;
  void report_end(End end) override { on_end(0, end); }
  void kill_all() override;
  void ask(int place, const Json& request, std::function<void(const Json&)> reply) override;
  void report_seat(const SeatEnd& end) override { on_seat_end(0, end); }

  ElasticJob* elastic() { return elastic_ ? &*elastic_ : nullptr; }

  // Whether all other hosts have said goodbye, after the end.
  bool is_alone() const;

 private:
  struct Member {
    std::string name;
    int num_ranks = 0;
    std::shared_ptr<Connection> connection = {};  // null: this host
    bool has_ended = false;
  };

  void on_message(const std::shared_ptr<Connection>& connection, const Json& message);
  void on_hello(const std::shared_ptr<Connection>& connection, const Json& message);
  void on_given_up(int host_rank, const std::string& reason);
  void on_lost(int host_rank, const std::string& reason);
  void on_end(int host_rank, End end);
  void on_seat_end(int host_rank, const SeatEnd& end);
  Json answer(int host_rank, int place, const Json& request);
  void order(int host_rank, const Json& order);
  bool start_if_all_came();
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
  Hello self_;  // with several hosts
  std::optional<Door> door_;
  EventLoop::Clock::time_point began_ = EventLoop::Clock::now();
  bool has_said_who_is_missing_ = false;
  std::map<int, Member> members_;  // by host rank
  KeyValue store_;
  std::optional<ElasticJob> elastic_;
  std::optional<EventLoop::Timer> timer_;
  OwnWatch watch_;
  int world_size_ = 0;   // of the ranks that have started together
  int generation_ = -1;  // none has started
  End end_ = End::kOk;   // of all ranks of this generation, so far
  bool is_finished_ = false;
  std::optional<StopCause> cause_;
  std::optional<StopCause> effect_;  // of a rank that blames another one, which has not failed yet
  EventLoop::Timer effect_timer_;
  std::vector<std::string> notes_;  // on hosts that were started otherwise than this one
};

// The other hosts' side: a connection to the Coordinator.
class RemoteLeader : public Leader {
 public:
  RemoteLeader(EventLoop& loop, Output& output, Host& host, const RunOptions& options);
  ~RemoteLeader() override;

  void report(const StopCause& cause) override;
  void report_end(End end) override;
  void kill_all() override;
  void ask(int place, const Json& request, std::function<void(const Json&)> reply) override;
  void report_seat(const SeatEnd& end) override;
  bool drain() override;

 private:
  void connect();
  void on_socket(Fd socket);
  bool is_greeted() const;
  void on_message(const Json& message);
  void on_lost(const std::string& reason);
  void look_around();
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
  bool has_joined_ = false;  // host 0 has said welcome
  bool has_started_ = false;
  bool has_said_waiting_ = false;
  std::string last_reason_;
  std::optional<StopCause> reported_;  // of this generation
  std::optional<StopCause>
      lost_;  // what to finish with when the ranks are gone: nobody decides any more
  bool is_running_ = false;
  bool is_draining_ = false;  // this host leaves the job
  std::map<std::int64_t, std::function<void(const Json&)>> questions_;
  std::int64_t num_questions_ = 0;
  std::optional<EventLoop::Timer> timer_;
  OwnWatch watch_;
};

}  // namespace lockstep
