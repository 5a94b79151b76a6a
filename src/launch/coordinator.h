// Coordinator: the first host's launcher decides for all: when ranks start, why they stop, whether
// they start again, and what all launchers exit with.
//
// A host is this one (a Host), or a connection to its launcher. All hosts hear the same: start,
// stop with the first cause, finish. Strangers on the port are told nothing and hold up nobody.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "launch/connection.h"
#include "launch/host.h"
#include "launch/job.h"
#include "launch/key_value.h"
#include "launch/output.h"
#include "launch/run_options.h"
#include "launch/tls.h"

namespace lockstep {

// Of the messages between launchers; a version of its own, so that they can tell each other.
inline constexpr int kLinkVersion = 3;
inline constexpr auto kPingEvery = std::chrono::seconds(1);
inline constexpr auto kLostAfter = std::chrono::seconds(8);
inline constexpr auto kProofDeadline = std::chrono::seconds(5);  // for a newcomer to prove itself

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
  void ask_store(const Json& request, std::function<void(const Json&)> reply) override;

  // Whether all other hosts have said goodbye, after the end.
  bool is_alone() const;

 private:
  struct Member {
    std::string name;
    int num_ranks = 0;
    std::shared_ptr<Connection> connection = {};  // null: this host
    bool has_ended = false;
  };

  void watch_listener();
  void accept_one();
  void refuse_stranger(const std::string& address, const std::string& reason);
  void on_message(const std::shared_ptr<Connection>& connection, const std::string& address,
                  const Json& message);
  void on_hello(const std::shared_ptr<Connection>& connection, const Json& message);
  void on_lost(int host_rank, const std::string& reason);
  void on_end(int host_rank, End end);
  void start(int generation);
  void stop(StopCause cause);
  void look_around();
  void decide();
  void finish(const std::optional<StopCause>& cause);

  EventLoop& loop_;
  Output& output_;
  Host& host_;
  const RunOptions& options_;
  std::optional<Tls> tls_;
  Fd listener_;
  EventLoop::Clock::time_point began_ = EventLoop::Clock::now();
  std::map<int, std::pair<std::shared_ptr<Connection>, EventLoop::Timer>> newcomers_;  // by number
  int num_newcomers_ = 0;
  int num_refused_ = 0;
  bool has_said_who_is_missing_ = false;
  std::map<int, Member> members_;  // by host rank
  KeyValue store_;
  std::optional<EventLoop::Timer> timer_;
  OwnWatch watch_;
  int generation_ = -1;  // none has started
  End end_ = End::kOk;   // of all ranks of this generation, so far
  bool is_finished_ = false;
  std::optional<StopCause> cause_;
  std::optional<StopCause> effect_;  // of a rank that blames another one, which has not failed yet
  EventLoop::Timer effect_timer_;
};

// The other hosts' side: a connection to the Coordinator.
class RemoteLeader : public Leader {
 public:
  RemoteLeader(EventLoop& loop, Output& output, Host& host, const RunOptions& options);
  ~RemoteLeader() override;

  void report(const StopCause& cause) override;
  void report_end(End end) override;
  void kill_all() override;
  void ask_store(const Json& request, std::function<void(const Json&)> reply) override;

 private:
  void connect();
  void on_socket(Fd socket);
  void on_message(const Json& message);
  void on_lost(const std::string& reason);
  void look_around();
  void fail(const std::string& text, int code);

  EventLoop& loop_;
  Output& output_;
  Host& host_;
  const RunOptions& options_;
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
  std::map<std::int64_t, std::function<void(const Json&)>> questions_;
  std::int64_t num_questions_ = 0;
  std::optional<EventLoop::Timer> timer_;
  OwnWatch watch_;
};

}  // namespace lockstep
