#include "launch/coordinator.h"

#include <lockstep/error.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace lockstep {
namespace {

// For a rank that others blame to end as well. An exception must unwind, a crash may dump a core.
constexpr auto kBlamedMayTake = std::chrono::seconds(5);

// For hosts beyond the fewest that an elastic job needs, to be there from the beginning.
constexpr auto kLastCall = std::chrono::seconds(10);

}  // namespace

Coordinator::Coordinator(EventLoop& loop, Output& output, Host& host, const RunOptions& options)
    : Coordinator(loop, output, host, options, {}, nullptr) {
  if (options.num_hosts == 1) start(0);
}

Coordinator::Coordinator(EventLoop& loop, Output& output, Host& host, const RunOptions& options,
                         Handover handover, std::function<bool()> is_held)
    : loop_(loop), output_(output), host_(host), options_(options), is_held_(std::move(is_held)) {
  host.set_leader(this);
  if (options.is_elastic) {
    elastic_.emplace(
        loop, options,
        ElasticJob::Callbacks{
            .order = [this](int host_rank, const Json& what) { order(host_rank, what); },
            .revoke =
                [this](int number, const std::string& why) {
                  store_.revoke(text::format("lockstep/{}/", number), why);
                },
            .fail =
                [this](StopCause cause) {
                  cause.may_restart = true;
                  report(cause);
                },
            .say = [this](const std::string& what) { output_.say(what); }});
  }
  members_[options.host_rank] = {.name = host_name(), .num_ranks = options.num_ranks};
  if (options.num_hosts == 1) return;
  self_ = handover.self ? *handover.self : hello_of(options);
  open_door();
  timer_ = loop_.after(kPingEvery, [this] { look_around(); });
  // Launchers whose ranks run need a moment to come.
  if (handover.has_followed) not_before_ += kLeaseTtl;
  if (!handover.running) {
    if (elastic_ && options.min_hosts == 1) call_last();
    return;
  }
  gather(handover.running->job);
  take_in(options.host_rank, *handover.running);
  for (const SeatEnd& end : handover.ends) report_seat(end);
  for (Question& one : handover.questions) ask(one.place, one.request, std::move(one.reply));
  if (handover.end) report_end(*handover.end);
  restore_if_all_came();
}

void Coordinator::open_door() {
  door_.emplace(
      loop_, output_, options_,
      Door::Callbacks{.received = [this](const auto& connection,
                                         const Json& message) { on_message(connection, message); },
                      .closed =
                          [this](const auto& connection, const std::string& reason) {
                            for (const auto& [rank, member] : members_) {
                              if (connection && member.connection == connection) {
                                return on_lost(rank, reason);
                              }
                            }
                          }});
}

Coordinator::~Coordinator() {
  if (timer_) loop_.cancel(*timer_);
  if (gathering_) loop_.cancel(gathering_->deadline);
  forget_effect();
}

void Coordinator::on_message(const std::shared_ptr<Connection>& connection, const Json& message) {
  if (!may_decide()) return;  // it hears so in a moment
  const auto found = std::ranges::find_if(
      members_, [&](const auto& one) { return one.second.connection == connection; });
  const std::string type = message.at("type");
  if (found == members_.end()) {
    if (type == "hello") {
      on_hello(connection, message);
    } else {
      door_->refuse("a launcher", "it did not say who it is");
      connection->close();
    }
  } else if (gathering_ &&
             (type == "ask" || type == "seat_end" || type == "end" || type == "drain")) {
    gathering_->later.emplace_back([this, connection, message] {
      if (connection->is_open()) on_message(connection, message);
    });
  } else if (type == "cause") {
    report(message.at("cause").get<StopCause>());
  } else if (type == "end") {
    on_end(found->first, message.at("end").get<End>());
  } else if (type == "kill") {
    kill_all();
  } else if (type == "lost") {
    on_given_up(found->first, message.at("reason"));
  } else if (type == "ask") {
    connection->send(
        {{"type", "answer"},
         {"id", message.at("id")},
         {"answer", answer(found->first, message.at("place").get<int>(), message.at("request"))}});
  } else if (type == "seat_end") {
    on_seat_end(found->first, message.at("seat").get<SeatEnd>());
  } else if (type == "looked") {
    found->second.ranks = message.at("ranks").get<std::vector<RankStatus>>();
  } else if (type == "drain" && elastic_) {
    if (static_cast<int>(members_.size()) - 1 < options_.min_hosts) {
      return report({.host_rank = found->first,
                     .host = found->second.name,
                     .text = "was told to stop",
                     .advice = "The job needs this host (--hosts).",
                     .code = 128 + SIGTERM,
                     .signal = SIGTERM,
                     .is_interrupt = true,
                     .may_restart = false});
    }
    output_.say(text::format("host {} ({}) was told to stop: its ranks leave at the end of a step",
                             found->first, found->second.name));
    elastic_->drain_host(found->first);
  }
}

// Everybody here knows the secret, so the answer may say what is wrong.
void Coordinator::on_hello(const std::shared_ptr<Connection>& connection, const Json& message) {
  Hello hello;
  hello.host = message.at("host");  // of any version
  std::string problem;
  if (is_finished_) {
    problem = "the job has ended";
  } else if (message.at("version") != kLinkVersion) {
    problem = "the launchers are of different versions: install the same lockstep on all hosts";
  } else {
    hello = message.get<Hello>();
    problem = find_conflict(self_, hello, options_.may_programs_differ);
    const bool is_running = message.contains("running");
    if (problem.empty() && gathering_ && !is_running) {
      // A host that is started anew; what it ran before is lost.
      gathering_->missing.erase(hello.host_rank);
      gathering_->later.emplace_back([this, connection, message] {
        if (connection->is_open()) on_message(connection, message);
      });
      return restore_if_all_came();
    }
    if (problem.empty() && is_running && generation_ >= 0) {
      connection->send({{"type", "lost"}, {"reason", "the job has gone on without it"}});
      loop_.after(kProofDeadline, [connection] {});  // lives until the answer has left
      return;
    }
    const auto before = members_.find(hello.host_rank);
    if (problem.empty() && elastic_ && before != members_.end() && before->second.connection &&
        before->second.name == hello.host) {
      on_lost(hello.host_rank, "it has come back");  // before its silence was noticed
      if (is_finished_ || cause_) problem = "the job ends";
    }
    if (problem.empty() && members_.contains(hello.host_rank)) {
      problem = text::format("there is a host {} already, {}: give each host a rank of its own",
                             hello.host_rank, members_[hello.host_rank].name);
    }
  }
  if (!problem.empty()) {
    output_.say(text::format("refused host {}: {}", hello.host, problem));
    connection->send({{"type", "refused"}, {"reason", problem}});
    loop_.after(kProofDeadline, [connection] {});  // lives until the answer has left
    return;
  }
  const std::string difference = compare_arguments(self_, hello);
  if (!difference.empty()) {
    notes_.push_back(text::format("Host {} ({}) was started with other arguments: {}.",
                                  hello.host_rank, hello.host, difference));
    output_.say("warning: " + notes_.back());
  }
  members_[hello.host_rank] = {
      .name = hello.host, .num_ranks = hello.num_ranks, .connection = connection};
  connection->send({{"type", "welcome"}, {"warning", difference.empty() ? "" : notes_.back()}});
  if (message.contains("running")) {
    const auto running = message.at("running").get<RunningHost>();
    if (!gathering_) gather(running.job);
    take_in(hello.host_rank, running);
    return restore_if_all_came();
  }
  if (options_.is_verbose) {
    output_.say(text::format("host {} ({}) has come", hello.host_rank, hello.host));
  }
  if (generation_ >= 0) {  // of an elastic job that runs
    start_late(hello.host_rank);
    tell_state();
    return;
  }
  if (start_if_all_came() || !elastic_ || static_cast<int>(members_.size()) != options_.min_hosts) {
    return;
  }
  call_last();
}

// Enough are here; those that come at about the same time are waited for.
void Coordinator::call_last() {
  const auto wait =
      std::chrono::ceil<std::chrono::milliseconds>(not_before_ - EventLoop::Clock::now());
  loop_.after(std::max<std::chrono::milliseconds>(kLastCall, wait), [this] {
    if (generation_ < 0 && !is_finished_ && !gathering_ &&
        static_cast<int>(members_.size()) >= options_.min_hosts) {
      start(0);
    }
  });
}

bool Coordinator::start_if_all_came() {
  if (static_cast<int>(members_.size()) < options_.num_hosts) return false;
  const auto wait =
      std::chrono::ceil<std::chrono::milliseconds>(not_before_ - EventLoop::Clock::now());
  if (wait.count() <= 0) {
    start(0);
    return true;
  }
  loop_.after(wait, [this] {
    if (generation_ < 0 && !is_finished_ && !gathering_) start_if_all_came();
  });
  return true;
}

// To a job that runs.
void Coordinator::start_late(int host_rank) {
  const Member& member = members_[host_rank];
  const Generation its = {.number = generation_,
                          .world_size = world_size_,
                          .max_restarts = options_.max_restarts,
                          .is_running = true};
  if (member.connection) {
    member.connection->send({{"type", "start"}, {"generation", its}});
  } else {
    host_.start(its);
  }
  elastic_->add_host(host_rank, member.name, member.num_ranks);
}

// What ranks of a host ask: of the store, or, in an elastic job, for their next generation.
Json Coordinator::answer(int host_rank, int place, const Json& request) try {
  const std::string op = request.value("op", "");
  if (elastic_ && op.starts_with("elastic_")) {
    Json its = elastic_->answer(host_rank, place, request);
    tell_state();
    return its;
  }
  return store_.answer(request);
} catch (const Json::exception& error) {
  return {{"error", error.what()}};
}

JobStatus Coordinator::status() {
  JobStatus status{.num_hosts = static_cast<int>(members_.size()),
                   .generation = elastic_ ? elastic_->generation() : generation_,
                   .ranks = host_.look()};
  for (const auto& [_, member] : members_) {
    if (!member.connection) continue;
    member.connection->send({{"type", "look"}});
    status.ranks.insert(status.ranks.end(), member.ranks.begin(), member.ranks.end());
  }
  return status;
}

void Coordinator::order(int host_rank, const Json& what) {
  const auto found = members_.find(host_rank);
  if (found == members_.end()) return;
  if (found->second.connection) {
    found->second.connection->send(what);
  } else {
    host_.obey(what);
  }
}

void Coordinator::on_seat_end(int host_rank, const SeatEnd& end) {
  if (is_finished_ || cause_ || !elastic_) return;
  if (end.is_about_to) return elastic_->on_about_to_end(host_rank, end);
  if (!elastic_->on_end(host_rank, end)) report(end.cause);
}

void Coordinator::start(int generation) {
  if (!may_decide()) return;
  generation_ = generation;
  cause_.reset();
  forget_effect();
  end_ = End::kOk;
  store_.clear();
  int world_size = 0;
  for (auto& [_, member] : members_) {
    member.has_ended = false;
    world_size += member.num_ranks;
  }
  world_size_ = world_size;
  if (elastic_) {
    std::map<int, int> ranks_of_hosts;
    for (const auto& [rank, member] : members_) ranks_of_hosts[rank] = member.num_ranks;
    elastic_->begin(generation, ranks_of_hosts);
  }
  int first_rank = 0;
  Generation own;
  for (auto& [rank, member] : members_) {
    const Generation its = {generation, first_rank, world_size, options_.max_restarts, false};
    first_rank += member.num_ranks;
    if (member.connection) {
      member.connection->send({{"type", "start"}, {"generation", its}});
    } else {
      own = its;
    }
  }
  tell_state();
  host_.start(own);  // last: it may fail at once
}

void Coordinator::report(const StopCause& cause) {
  if (has_left_) return;      // ranks that are killed are no cause
  if (gathering_) restore();  // what runs is known then, and can be stopped
  // Who kills the launcher of a host of an elastic job kills that host alone, if others can go on.
  const bool is_here = cause.host_rank == options_.host_rank;
  if (is_held_ && is_here && cause.is_interrupt && cause.signal == SIGKILL) return leave(cause);
  if (effect_ && cause.is_interrupt) stop(*effect_);  // nobody waits any longer
  if (is_finished_) return;
  if (cause_) {  // the first one counts; but who wants the job to stop wants no restart either
    if (cause.is_interrupt) cause_->may_restart = false;
    if (weight_of(*cause_) == 0 && !cause.is_interrupt) {
      const bool may_restart = cause_->may_restart;
      cause_ = cause;
      cause_->may_restart &= may_restart;
    }
    return;
  }
  if (effect_ && weight_of(cause) <= weight_of(*effect_)) return;
  if (cause.blamed_rank >= 0) {
    // It ended before the rank that it failed because of, which the report is to name.
    effect_ = cause;
    effect_timer_ = loop_.after(kBlamedMayTake, [this] { stop(*effect_); });
    return;
  }
  stop(cause);
}

void Coordinator::forget_effect() {
  if (effect_) loop_.cancel(effect_timer_);
  effect_.reset();
}

void Coordinator::stop(StopCause cause) {
  forget_effect();
  cause_ = cause;
  if (elastic_) elastic_->stop();
  if (generation_ < 0) return finish(cause);  // nothing runs yet
  for (auto& [_, member] : members_) {
    if (member.connection) member.connection->send({{"type", "stop"}, {"cause", cause}});
  }
  host_.stop(cause);
  decide();  // in the pause before a restart, all ranks are gone already
}

void Coordinator::on_lost(int host_rank, const std::string& reason) {
  if (is_finished_ || !may_decide()) return;
  Member& member = members_[host_rank];
  // It may only have been held up: then it hears why it is alone.
  member.connection->close({{"type", "lost"}, {"reason", reason}});
  if (gathering_) {
    gathering_->seats.erase(host_rank);
    members_.erase(host_rank);
    return;
  }
  if (lose_host(host_rank, reason)) return;
  const bool has_restarts = std::max(generation_, 0) < options_.max_restarts;
  report({.host_rank = host_rank,
          .host = member.name,
          .text = text::format("was lost: {}", reason),
          .advice = text::format("See what it said last on that host.{}",
                                 has_restarts ? " There is no restart: that needs all hosts." : ""),
          .code = 1,
          .signal = SIGTERM,
          .may_restart = false});
  // Whatever began it: with a host missing it ends here.
  if (cause_ && std::exchange(cause_->may_restart, false) && has_restarts) {
    notes_.push_back(text::format("Then host {} ({}) was lost ({}), so there is no restart.",
                                  host_rank, member.name, reason));
  }
  on_end(host_rank, End::kFailed);
}

// Whether an elastic job goes on without it.
bool Coordinator::lose_host(int host_rank, const std::string& reason) {
  if (!elastic_ || cause_ || !elastic_->is_open()) return false;
  if (static_cast<int>(members_.size()) - 1 < options_.min_hosts) return false;
  if (members_[host_rank].has_ended) {  // it has left: its ranks are gone
    members_.erase(host_rank);
    tell_state();
    decide();
    return true;
  }
  if (!elastic_->remove_host(host_rank, reason)) return false;
  members_.erase(host_rank);
  tell_state();
  decide();
  return true;
}

// A host that has not heard of this one for too long is on its own now.
void Coordinator::on_given_up(int host_rank, const std::string& reason) {
  if (elastic_ && (elastic_->is_open() || gathering_)) {
    return on_lost(host_rank, text::format("it gave up host {}: {}", options_.host_rank, reason));
  }
  report({.host_rank = options_.host_rank,
          .host = self_.host,
          .text = text::format("was given up by host {} ({}): {}", host_rank,
                               members_[host_rank].name, reason),
          .advice = kHeldUpAdvice,
          .code = 1,
          .signal = SIGTERM,
          .may_restart = false});
  on_lost(host_rank, "it gave up this host");
}

void Coordinator::on_end(int host_rank, End end) {
  Member& member = members_[host_rank];
  if (member.has_ended) return;
  member.has_ended = true;
  end_ = std::max(end_, end);
  decide();
}

// When all hosts report that their ranks have ended.
void Coordinator::decide() {
  if (is_finished_ ||
      !std::ranges::all_of(members_, [](const auto& one) { return one.second.has_ended; })) {
    return;
  }
  if (effect_) return stop(*effect_);  // all ranks blame one that did not fail; decides again
  if (end_ == End::kOk && (!cause_ || cause_->is_interrupt)) return finish(std::nullopt);
  if (end_ == End::kSaved && cause_ && cause_->is_interrupt) {
    cause_->code = kExitPreempted;
    cause_->advice = "All ranks have saved their state: start the job again to go on.";
  }
  const int restart = generation_ + 1;
  if (!cause_ || !cause_->may_restart || restart > options_.max_restarts) return finish(cause_);
  const auto delay = std::chrono::seconds(std::min(30, 1 << std::min(generation_, 5)));
  for (auto& [_, member] : members_) {
    if (member.connection) {
      member.connection->send({{"type", "restart"},
                               {"seconds", delay.count()},
                               {"restart", restart},
                               {"cause", *cause_}});
    }
  }
  host_.restart_in(delay, restart, *cause_);
  cause_.reset();
  end_ = End::kFailed;
  loop_.after(delay, [this, restart] {
    if (!is_finished_ && !cause_) start(restart);
  });
}

void Coordinator::finish(std::optional<StopCause> cause) {
  is_finished_ = true;
  if (cause && !cause->is_interrupt && !notes_.empty()) {
    if (!cause->advice.empty()) cause->advice += " ";
    cause->advice += text::join(notes_, " ");
  }
  for (auto& [_, member] : members_) {
    if (!member.connection) continue;
    Json message = {{"type", "finish"}, {"cause", nullptr}};
    if (cause) message["cause"] = *cause;
    member.connection->send(message);
  }
  host_.finish(cause);
}

void Coordinator::report_end(End end) {
  if (is_draining_ && end != End::kFailed && !cause_ && !elastic_->is_complete()) {
    leave(std::nullopt);
    return;
  }
  if (!gathering_) return on_end(options_.host_rank, end);
  gathering_->later.emplace_back([this, end] { report_end(end); });
}

void Coordinator::report_seat(const SeatEnd& end) {
  if (!gathering_) return on_seat_end(options_.host_rank, end);
  gathering_->later.emplace_back([this, end] { report_seat(end); });
}

void Coordinator::kill_all() {
  for (auto& [_, member] : members_) {
    if (member.connection) member.connection->send({{"type", "kill"}});
  }
  host_.kill_now();
}

void Coordinator::ask(int place, const Json& request, std::function<void(const Json&)> reply) {
  if (!may_decide()) return;
  if (gathering_) {
    gathering_->later.emplace_back([this, place, request, reply] { ask(place, request, reply); });
    return;
  }
  reply(answer(options_.host_rank, place, request));
}

bool Coordinator::is_alone() const {
  return std::ranges::none_of(members_, [](const auto& one) {
    return one.second.connection && one.second.connection->is_open();
  });
}

// Every second: tells the others that this host is there, and looks whether they are.
void Coordinator::look_around() {
  timer_ = loop_.after(kPingEvery, [this] { look_around(); });
  std::vector<int> silent;
  const bool is_in_time = watch_.is_in_time();
  for (auto& [rank, member] : members_) {
    if (!member.connection || !member.connection->is_open()) continue;
    member.connection->send({{"type", "ping"}});
    if (is_in_time &&
        EventLoop::Clock::now() - member.connection->last_heard() > options_.lost_after) {
      silent.push_back(rank);
    }
  }
  for (const int rank : silent) {
    on_lost(rank, text::format("it has been silent for {} s", options_.lost_after.count()));
  }
  if (generation_ >= 0 || is_finished_ || gathering_) return;
  std::vector<int> missing;
  for (int rank = 0; rank < options_.num_hosts; ++rank) {
    if (!members_.contains(rank)) missing.push_back(rank);
  }
  if (seconds_since(began_) > 10 && !has_said_who_is_missing_) {
    has_said_who_is_missing_ = true;
    output_.say(text::format("waiting for host {} of {} at {}:{}", text::join(missing, ", "),
                             options_.num_hosts, options_.master_host, options_.master_port));
  }
  if (EventLoop::Clock::now() - began_ < options_.join_timeout) return;
  report({.host_rank = options_.host_rank,
          .host = host_name(),
          .text = text::format("timed out after {:.0f} s waiting for host {}",
                               seconds_since(began_), text::join(missing, ", ")),
          .advice = "Start lockstep run there with the same --master and --hosts, or raise "
                    "--join-timeout.",
          .code = 1,
          .signal = SIGTERM,
          .may_restart = false});
}

}  // namespace lockstep
