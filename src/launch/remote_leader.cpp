// The other hosts' side of the link: a connection to the first host's Coordinator.

#include <lockstep/error.h>

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
  connect();
  timer_ = loop_.after(kPingEvery, [this] { look_around(); });
}

RemoteLeader::~RemoteLeader() {
  if (timer_) loop_.cancel(*timer_);
}

void RemoteLeader::connect() {
  struct Attempt {
    Fd socket;
    std::string reason;
  };
  const auto attempt = std::make_shared<Attempt>();
  is_resolving_ = true;
  loop_.run_aside(
      [attempt, host = options_.master_host, port = options_.master_port, n = num_attempts_++] {
        try {
          attempt->socket = start_connecting(host, port, n);
          if (!attempt->socket) attempt->reason = std::strerror(errno);
        } catch (const Error& error) {  // it may be known in a moment: pods come up in any order
          attempt->reason = error.message().substr(0, error.message().find(".\n"));
        }
      },
      [this, attempt] {
        is_resolving_ = false;
        if (!attempt->socket) {
          last_reason_ = attempt->reason;
        } else if (!lost_ && !host_.exit_code() && !is_greeted()) {
          on_socket(std::move(attempt->socket));
        }
      });
}

// Then host 0 may count this host in by this connection already: there must be no other one.
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
                              connection_->send(hello);
                            },
                        .received = [this](const Json& message) { on_message(message); },
                        .closed = [this](const std::string& reason) { on_lost(reason); }});
}

void RemoteLeader::on_message(const Json& message) {
  const std::string type = message.at("type");
  if (type == "welcome") {
    has_joined_ = true;
    const std::string warning = message.at("warning");
    if (!warning.empty()) output_.say("warning: " + warning);
  } else if (type == "kill") {
    host_.kill_now();
  } else if (type == "start") {
    has_started_ = true;
    is_running_ = true;
    host_.start(message.at("generation").get<Generation>());
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
  } else if (type == "answer") {
    const auto found = questions_.find(message.at("id").get<std::int64_t>());
    if (found == questions_.end()) return;
    const auto reply = std::move(found->second);
    questions_.erase(found);
    reply(message.at("answer"));
  } else if (type == "refused") {
    fail("was refused: " + message.at("reason").get<std::string>(), 2);
  } else if (type == "lost") {
    fail("was given up by host 0: " + message.at("reason").get<std::string>(),
         options_.is_elastic ? kExitPreempted : 1, kHeldUpAdvice);
  }
}

void RemoteLeader::on_lost(const std::string& reason) {
  if (host_.exit_code()) return;
  connection_->close({{"type", "lost"}, {"reason", reason}});  // it may only have been held up
  last_reason_ = reason;
  if (reason.starts_with(kHandshakeFailed)) {
    return fail(
        text::format("was refused by what answers at {}:{}: it has another secret, or is not "
                     "host 0 of this job ({})",
                     options_.master_host, options_.master_port, reason),
        1, "Check --master, and give all hosts the same secret.");
  }
  if (!has_joined_) return;  // look_around tries again
  // Of an elastic job the exit code says to schedulers: start it again.
  fail(text::format("lost host 0 at {}:{}: {}", options_.master_host, options_.master_port, reason),
       options_.is_elastic ? kExitPreempted : 1,
       "Without host 0, which decides for all, the job ends here.");
}

// Without host 0 nobody decides: the ranks here stop, then this launcher ends.
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
  if (options_.is_elastic && cause.is_interrupt && cause.signal == SIGKILL && has_joined_) {
    lost_ = cause;
    host_.stop(cause);
    connection_->close();
    if (!is_running_) host_.finish(lost_);
    return;
  }
  // At once, whatever host 0 says; but a rank that is blamed, perhaps one of these, may end first.
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
  if (connection_) connection_->send({{"type", "end"}, {"end", end}});
  if (!is_draining_ || end == End::kFailed) return;
  connection_->close();  // after what is sent
  host_.finish(std::nullopt);
}

void RemoteLeader::ask(int place, const Json& request, std::function<void(const Json&)> reply) {
  if (!connection_ || !connection_->is_open()) return;  // the ranks are stopping anyway
  const std::int64_t id = num_questions_++;
  questions_.emplace(id, std::move(reply));
  connection_->send({{"type", "ask"}, {"id", id}, {"place", place}, {"request", request}});
}

void RemoteLeader::report_seat(const SeatEnd& end) {
  if (connection_) connection_->send({{"type", "seat_end"}, {"seat", end}});
}

// Of an elastic job this host alone: its ranks leave at the end of a step.
bool RemoteLeader::drain() {
  if (!options_.is_elastic || !connection_ || !connection_->is_open() || !is_running_) return false;
  output_.say("told to stop: the ranks of this host leave at the end of a step");
  connection_->send({{"type", "drain"}});
  is_draining_ = true;
  return true;
}

// Of a connection that has been tried for longest, what is known now is better than why the one
// before ended.
std::string RemoteLeader::why_not_reached() const {
  if (!connection_ || !connection_->is_open()) return last_reason_;
  if (connection_->is_ready()) return "it was reached, but does not answer any more";
  return connection_->is_answered() ? "what answers there does not speak as a launcher does"
                                    : "there is no answer";
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
  if (seconds_since(began_) > std::chrono::duration<double>(options_.join_timeout).count()) {
    return fail(
        text::format("could not reach host 0 at {}:{} in {:.0f} s: {}", options_.master_host,
                     options_.master_port, seconds_since(began_), why_not_reached()),
        1, "Check --master, that host 0 is running, and firewalls; or raise --join-timeout.");
  }
  if (seconds_since(began_) > 10 && !has_said_waiting_) {
    has_said_waiting_ = true;
    output_.say(text::format("waiting for host 0 at {}:{}: {}", options_.master_host,
                             options_.master_port, why_not_reached()));
  }
  // One that neither fails nor opens is tried anew as well: packets may have been dropped.
  if (is_resolving_ || is_greeted()) return;
  const bool is_open = connection_ && connection_->is_open();
  if (!is_open || EventLoop::Clock::now() - connection_->last_heard() > kProofDeadline) connect();
}

}  // namespace lockstep
