// The other hosts' side of the link: a connection to the Coordinator.

#include <lockstep/error.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/socket.h"
#include "base/text.h"
#include "launch/coordinator.h"

namespace lockstep {

RemoteLeader::RemoteLeader(EventLoop& loop, Output& output, Host& host, const RunOptions& options)
    : loop_(loop),
      output_(output),
      host_(host),
      options_(options),
      self_(hello_of(options)),
      tls_(read_secret(options.secret_file)) {
  host.set_leader(this);
  if (!is_elected()) {
    leader_ = {.address = options.master_host, .port = options.master_port};
    connect();
  }
  timer_ = loop_.after(kPingEvery, [this] { look_around(); });
}

RemoteLeader::~RemoteLeader() {
  if (timer_) loop_.cancel(*timer_);
}

std::string RemoteLeader::address() const {
  return text::format("{}:{}", leader_.address, leader_.port);
}

void RemoteLeader::follow(const ElectedLeader& leader) {
  election_problem_.clear();
  if (lost_ || host_.exit_code() || leader.term == leader_.term) return;
  const bool is_first = leader_.term == 0;
  leader_ = leader;
  num_attempts_ = 0;
  // The one before is gone, or stops now, even if its connection is still there.
  if (connection_) connection_->close();
  has_joined_ = false;
  lost_since_ = EventLoop::Clock::now();
  last_reason_.clear();
  if (!is_first || options_.is_verbose) {
    output_.say(text::format("{} at {} coordinates now", leader.host, address()));
  }
  if (!is_resolving_) connect();
}

// All that a new coordinator must know. Ends that none has heard of are told later.
RunningHost RemoteLeader::describe() const {
  RunningHost all{.job = job_, .seats = host_.seats()};
  for (SeatState& one : all.seats) {
    const bool is_news =
        std::ranges::any_of(kept_ends_, [&](const SeatEnd& end) { return end.place == one.place; });
    if (is_news) one.has_ended = one.has_failed = false;
  }
  return all;
}

Handover RemoteLeader::hand_over() {
  Handover all{
      .self = self_, .ends = kept_ends_, .end = kept_end_, .has_followed = leader_.term != 0};
  if (has_started_) all.running = describe();
  for (auto& [_, question] : questions_) all.questions.push_back(std::move(question));
  if (connection_) connection_->close();
  return all;
}

void RemoteLeader::send_kept() {
  for (const SeatEnd& end : std::exchange(kept_ends_, {})) report_seat(end);
  for (const auto& [id, question] : questions_) {
    connection_->send(
        {{"type", "ask"}, {"id", id}, {"place", question.place}, {"request", question.request}});
  }
  if (is_draining_) connection_->send({{"type", "drain"}});
  if (kept_end_) connection_->send({{"type", "end"}, {"end", *std::exchange(kept_end_, {})}});
}

void RemoteLeader::connect() {
  if (leader_.address.empty()) return;
  struct Attempt {
    Fd socket;
    std::string reason;
  };
  const auto attempt = std::make_shared<Attempt>();
  is_resolving_ = true;
  loop_.run_aside(
      [attempt, host = leader_.address, port = leader_.port, n = num_attempts_++] {
        try {
          attempt->socket = start_connecting(host, port, n);
          if (!attempt->socket) attempt->reason = std::strerror(errno);
        } catch (const Error& error) {  // it may be known in a moment: pods come up in any order
          attempt->reason = error.message().substr(0, error.message().find(".\n"));
        }
      },
      [this, attempt, term = leader_.term, alive = std::weak_ptr(alive_)] {
        if (alive.expired()) return;
        is_resolving_ = false;
        if (term != leader_.term) {
          connect();
        } else if (!attempt->socket) {
          last_reason_ = attempt->reason;
        } else if (!lost_ && !host_.exit_code() && !is_greeted()) {
          on_socket(std::move(attempt->socket));
        }
      });
}

// Then the coordinator may count this host in by this connection already: there must be no other
// one.
bool RemoteLeader::is_greeted() const {
  return connection_ && connection_->is_open() && connection_->is_ready();
}

void RemoteLeader::on_socket(Fd socket) {
  connection_ =
      Connection::make(loop_, std::move(socket), &tls_, false,
                       {.opened =
                            [this] {
                              Json hello = self_;
                              hello["type"] = "hello";
                              hello["version"] = kLinkVersion;
                              if (has_started_) hello["running"] = describe();
                              connection_->send(hello);
                            },
                        .received = [this](const Json& message) { on_message(message); },
                        .closed = [this](const std::string& reason) { on_lost(reason); }});
}

void RemoteLeader::on_message(const Json& message) {
  const std::string type = message.at("type");
  if (type == "welcome") {
    const bool was_orphan = is_orphan();
    has_joined_ = true;
    if (was_orphan) send_kept();
    const std::string warning = message.at("warning");
    if (!warning.empty()) output_.say("warning: " + warning);
  } else if (type == "kill") {
    host_.kill_now();
  } else if (type == "start") {
    has_started_ = true;
    is_running_ = true;
    const auto generation = message.at("generation").get<Generation>();
    job_.restart = job_.generation = generation.number;
    job_.world_size = generation.world_size;
    host_.start(generation);
  } else if (type == "state") {
    job_ = message.at("job").get<JobState>();
  } else if (type == "stop") {
    host_.stop(message.at("cause").get<StopCause>());
  } else if (type == "restart") {
    host_.restart_in(std::chrono::seconds(message.at("seconds").get<int>()),
                     message.at("restart").get<int>(), message.at("cause").get<StopCause>());
    reported_.reset();
  } else if (type == "finish") {
    connection_->close();
    const Json& cause = message.at("cause");
    host_.finish(cause.is_null() ? std::nullopt : std::optional(cause.get<StopCause>()));
  } else if (type == "seat") {
    host_.obey(message);
  } else if (type == "look") {
    connection_->send({{"type", "looked"}, {"ranks", host_.look()}});
  } else if (type == "answer") {
    const auto found = questions_.find(message.at("id").get<std::int64_t>());
    if (found == questions_.end()) return;
    const auto reply = std::move(found->second.reply);
    questions_.erase(found);
    reply(message.at("answer"));
  } else if (type == "refused") {
    fail("was refused: " + message.at("reason").get<std::string>(),
         is_orphan() ? kExitPreempted : 2);
  } else if (type == "lost") {
    fail(text::format("was given up by {}: {}", leader_name(),
                      message.at("reason").get<std::string>()),
         options_.is_elastic ? kExitPreempted : 1, kHeldUpAdvice);
  }
}

void RemoteLeader::on_lost(const std::string& reason) {
  if (host_.exit_code()) return;
  connection_->close({{"type", "lost"}, {"reason", reason}});  // it may only have been held up
  last_reason_ = reason;
  if (reason.starts_with(kHandshakeFailed) && !is_orphan()) {
    return fail(text::format("was refused by what answers at {}: it has another secret, or is not "
                             "{} of this job ({})",
                             address(), leader_name(), reason),
                1, "Check --master, and give all hosts the same secret.");
  }
  if (!has_joined_) return;  // look_around tries again
  if (is_elected()) {
    has_joined_ = false;
    lost_since_ = EventLoop::Clock::now();
    output_.say(text::format("lost the coordinator, {} at {}: {}; {} until another is elected",
                             leader_.host, address(), reason,
                             has_started_ ? "the ranks of this host run on" : "waiting"));
    return;
  }
  // Of an elastic job the exit code says to schedulers: start it again.
  fail(text::format("lost host 0 at {}: {}", address(), reason),
       options_.is_elastic ? kExitPreempted : 1,
       "Without host 0, which decides for all, the job ends here.");
}

// Nobody decides any more: the ranks here stop, then this launcher ends.
void RemoteLeader::fail(const std::string& text, int code, const std::string& advice) {
  if (connection_) connection_->close();
  // What went wrong here before is the better explanation.
  lost_ = reported_.value_or(StopCause{.host_rank = options_.host_rank,
                                       .host = host_name(),
                                       .text = text,
                                       .advice = advice,
                                       .code = code,
                                       .signal = SIGTERM,
                                       .may_restart = false});
  host_.stop(*lost_);
  if (!is_running_) host_.finish(lost_);
}

void RemoteLeader::report(const StopCause& cause) {
  // Who kills the launcher of a host of an elastic job kills that host alone.
  const bool is_kill = cause.is_interrupt && cause.signal == SIGKILL;
  if (!lost_ && ((options_.is_elastic && is_kill && has_joined_) || is_orphan())) {
    lost_ = cause;
    host_.stop(cause);
    if (connection_) connection_->close();
    if (!is_running_) host_.finish(lost_);
    return;
  }
  // At once, whatever the coordinator says; but a rank that is blamed, perhaps one of these, may
  // end first.
  if (cause.blamed_rank < 0) host_.stop(cause);
  if (lost_) return;
  if (!reported_ || weight_of(cause) > weight_of(*reported_)) reported_ = cause;
  if (connection_ && connection_->is_open() && has_joined_) {
    connection_->send({{"type", "cause"}, {"cause", cause}});
  } else if (!has_started_) {
    host_.finish(cause);
  }
}

void RemoteLeader::kill_all() {
  host_.kill_now();
  if (connection_) connection_->send({{"type", "kill"}});
}

void RemoteLeader::report_end(End end) {
  is_running_ = false;
  if (lost_) return host_.finish(lost_);
  if (is_orphan()) kept_end_ = end;
  if (connection_) connection_->send({{"type", "end"}, {"end", end}});
  if (!is_draining_ || end == End::kFailed) return;
  connection_->close();  // after what is sent
  host_.finish(std::nullopt);
}

void RemoteLeader::ask(int place, const Json& request, std::function<void(const Json&)> reply) {
  const bool is_open = connection_ && connection_->is_open() && has_joined_;
  if (!is_open && !is_orphan()) return;  // the ranks are stopping anyway
  const std::int64_t id = num_questions_++;
  questions_.emplace(id, Question{place, request, std::move(reply)});
  if (!is_open) return;  // it is sent to the next coordinator
  connection_->send({{"type", "ask"}, {"id", id}, {"place", place}, {"request", request}});
}

void RemoteLeader::report_seat(const SeatEnd& end) {
  if (end.is_about_to && is_orphan()) return;  // a new coordinator is told when it has ended
  // Nobody waits for its answers any more.
  std::erase_if(questions_, [&](const auto& one) { return one.second.place == end.place; });
  if (is_orphan()) return kept_ends_.push_back(end);
  if (connection_) connection_->send({{"type", "seat_end"}, {"seat", end}});
}

// Of an elastic job this host alone: its ranks leave at the end of a step.
bool RemoteLeader::drain() {
  if (!options_.is_elastic || !has_joined_ || !connection_->is_open() || !is_running_) return false;
  output_.say("told to stop: the ranks of this host leave at the end of a step");
  connection_->send({{"type", "drain"}});
  is_draining_ = true;
  return true;
}

// Of a connection that has been tried for longest, what is known now is better than why the one
// before ended.
std::string RemoteLeader::why_not_reached() const {
  if (!election_problem_.empty()) return election_problem_;
  if (leader_.address.empty()) return "etcd has not answered yet";
  if (!connection_ || !connection_->is_open()) return last_reason_;
  if (connection_->is_ready()) return "it was reached, but does not answer any more";
  return connection_->is_answered() ? "what answers there does not speak as a launcher does"
                                    : "there is no answer";
}

// Before anything has started.
void RemoteLeader::wait_to_join() {
  const std::string where = leader_.address.empty() ? "" : " at " + address();
  if (seconds_since(began_) > std::chrono::duration<double>(options_.join_timeout).count()) {
    return fail(text::format("could not reach {}{} in {:.0f} s: {}", leader_name(), where,
                             seconds_since(began_), why_not_reached()),
                1,
                is_elected()
                    ? "Check etcd (--coordinator), each host's --master, and firewalls; or raise "
                      "--join-timeout."
                    : "Check --master, that host 0 is running, and firewalls; or raise "
                      "--join-timeout.");
  }
  if (seconds_since(began_) <= 10 || std::exchange(has_said_waiting_, true)) return;
  output_.say(text::format("waiting for {}{}: {}", leader_name(), where, why_not_reached()));
}

void RemoteLeader::look_around() {
  timer_ = loop_.after(kPingEvery, [this] { look_around(); });
  if (lost_ || host_.exit_code()) return;
  const bool is_in_time = watch_.is_in_time();
  if (is_greeted()) {
    if (has_joined_) connection_->send({{"type", "ping"}});
    if (is_in_time && EventLoop::Clock::now() - connection_->last_heard() > options_.lost_after) {
      on_lost(text::format("it has been silent for {} s", options_.lost_after.count()));
    }
    if (has_joined_) return;
  }
  if (is_orphan()) {
    const auto limit = options_.lost_after + 2 * kLeaseTtl;
    if (EventLoop::Clock::now() - lost_since_ > limit) {
      return fail(
          text::format("has had no coordinator for {} s: {}", limit.count(), why_not_reached()),
          kExitPreempted, "Check etcd (--coordinator), and the network between the hosts.");
    }
  } else {
    wait_to_join();
    if (lost_) return;
  }
  // One that neither fails nor opens is tried anew as well: packets may have been dropped.
  if (is_resolving_ || is_greeted()) return;
  const bool is_open = connection_ && connection_->is_open();
  if (!is_open || EventLoop::Clock::now() - connection_->last_heard() > kProofDeadline) connect();
}

}  // namespace lockstep
