#include "launch/coordinator.h"

#include <lockstep/error.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/socket.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostNewcomers = 64;  // at a time; the oldest has to go
constexpr int kRefusalsShown = 10;
// For a rank that others blame to end as well. An exception must unwind, a crash may dump a core.
constexpr auto kBlamedMayTake = std::chrono::seconds(5);

}  // namespace

Coordinator::Coordinator(EventLoop& loop, Output& output, Host& host, const RunOptions& options)
    : loop_(loop), output_(output), host_(host), options_(options) {
  host.set_leader(this);
  members_[0] = {.name = host_name(), .num_ranks = options.num_ranks};
  if (options.num_hosts == 1) {
    start(0);
    return;
  }
  tls_.emplace(read_secret(options.secret_file));
  listener_ = listen_at(options.master_host, options.master_port);
  if (!listener_) {
    throw_errno(text::format("cannot listen at {}:{}", options.master_host, options.master_port),
                "Give --master a free port and an address of this host, the first one.");
  }
  watch_listener();
  timer_ = loop_.after(kPingEvery, [this] { look_around(); });
}

Coordinator::~Coordinator() {
  if (timer_) loop_.cancel(*timer_);
  if (effect_) loop_.cancel(effect_timer_);
  if (listener_) loop_.forget(listener_.get());
  for (const auto& [_, newcomer] : newcomers_) loop_.cancel(newcomer.second);
}

void Coordinator::watch_listener() {
  loop_.watch(listener_.get(), POLLIN, [this](short) { accept_one(); });
}

void Coordinator::accept_one() {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  Fd socket(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &size,
                      SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno != EMFILE && errno != ENFILE) return;  // gone again
    // Until descriptors are free, asking again at once would only cost time.
    loop_.forget(listener_.get());
    loop_.after(kPingEvery, [this] { watch_listener(); });
    return;
  }
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  ::getnameinfo(reinterpret_cast<sockaddr*>(&from), size, host.data(), host.size(), port.data(),
                port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  const std::string address = text::format("{}:{}", host.data(), port.data());
  if (newcomers_.size() >= kMostNewcomers) {
    loop_.cancel(newcomers_.begin()->second.second);
    newcomers_.erase(newcomers_.begin());
    refuse_stranger("one of many connections", "too many at a time");
  }
  const int number = num_newcomers_++;
  const auto forget = [this, number] {
    const auto found = newcomers_.find(number);
    if (found == newcomers_.end()) return false;
    loop_.cancel(found->second.second);
    newcomers_.erase(found);
    return true;
  };
  // The callbacks belong to the connection: they must not keep it alive.
  auto self = std::make_shared<std::weak_ptr<Connection>>();
  auto connection =
      Connection::make(loop_, std::move(socket), &*tls_, true,
                       {.received =
                            [this, self, address, forget](const Json& message) {
                              const auto mine = self->lock();
                              forget();
                              on_message(mine, address, message);
                            },
                        .closed =
                            [this, self, address, forget](const std::string& reason) {
                              if (forget()) return refuse_stranger(address, reason);
                              for (const auto& [rank, member] : members_) {
                                if (member.connection && member.connection == self->lock()) {
                                  return on_lost(rank, reason);
                                }
                              }
                            }});
  *self = connection;
  const auto timer = loop_.after(kProofDeadline, [this, forget, address] {
    if (forget()) refuse_stranger(address, "it did not prove itself in time");
  });
  newcomers_.emplace(number, std::pair(std::move(connection), timer));
}

void Coordinator::refuse_stranger(const std::string& address, const std::string& reason) {
  ++num_refused_;
  if (num_refused_ > kRefusalsShown) return;
  output_.say(text::format("refused {}: {}{}", address, reason,
                           num_refused_ == kRefusalsShown ? " (no more of these are shown)" : ""));
}

void Coordinator::on_message(const std::shared_ptr<Connection>& connection,
                             const std::string& address, const Json& message) {
  const auto found = std::ranges::find_if(
      members_, [&](const auto& one) { return one.second.connection == connection; });
  const std::string type = message.at("type");
  if (found == members_.end()) {
    if (type == "hello") {
      on_hello(connection, message);
    } else {
      refuse_stranger(address, "it did not say who it is");
      connection->close();
    }
  } else if (type == "cause") {
    report(message.at("cause").get<StopCause>());
  } else if (type == "end") {
    on_end(found->first, message.at("end").get<End>());
  } else if (type == "kill") {
    kill_all();
  } else if (type == "store") {
    connection->send({{"type", "answer"},
                      {"id", message.at("id")},
                      {"answer", store_.answer(message.at("request"))}});
  }
}

// Everybody here knows the secret, so the answer may say what is wrong.
void Coordinator::on_hello(const std::shared_ptr<Connection>& connection, const Json& message) {
  const int rank = message.at("host_rank");
  const std::string name = message.at("host");
  std::string problem;
  if (is_finished_) {
    problem = "the job has ended";
  } else if (message.at("version") != kLinkVersion) {
    problem = "the launchers are of different versions: install the same lockstep on all hosts";
  } else if (message.at("num_hosts") != options_.num_hosts) {
    problem = text::format(
        "host {} was started with --hosts {}, host 0 with --hosts {}: give all the "
        "same number",
        rank, message.at("num_hosts").get<int>(), options_.num_hosts);
  } else if (rank < 1 || rank >= options_.num_hosts) {
    problem = text::format("--host-rank {} is not in 1 to {}", rank, options_.num_hosts - 1);
  } else if (members_.contains(rank)) {
    problem = text::format("there is a host {} already, {}: give each host a rank of its own", rank,
                           members_[rank].name);
  }
  if (!problem.empty()) {
    output_.say(text::format("refused host {}: {}", name, problem));
    connection->send({{"type", "refused"}, {"reason", problem}});
    loop_.after(kProofDeadline, [connection] {});  // lives until the answer has left
    return;
  }
  members_[rank] = {
      .name = name, .num_ranks = message.at("num_ranks").get<int>(), .connection = connection};
  connection->send({{"type", "welcome"}});
  if (options_.is_verbose) output_.say(text::format("host {} ({}) has come", rank, name));
  if (static_cast<int>(members_.size()) == options_.num_hosts) start(0);
}

void Coordinator::start(int generation) {
  generation_ = generation;
  cause_.reset();
  effect_.reset();
  end_ = End::kOk;
  store_.clear();
  int world_size = 0;
  for (auto& [_, member] : members_) {
    member.has_ended = false;
    world_size += member.num_ranks;
  }
  int first_rank = 0;
  for (auto& [rank, member] : members_) {
    const Generation its = {generation, first_rank, world_size};
    first_rank += member.num_ranks;
    if (member.connection) member.connection->send({{"type", "start"}, {"generation", its}});
  }
  // Last: it may fail at once.
  host_.start({generation, 0, world_size});
}

void Coordinator::report(const StopCause& cause) {
  if (effect_ && cause.is_interrupt) stop(*effect_);  // nobody waits any longer
  if (is_finished_) return;
  if (cause_) {  // the first one counts; but who wants the job to stop wants no restart either
    if (cause.is_interrupt) cause_->may_restart = false;
    if (cause_->code == kExitPreempted && !cause.is_interrupt) {
      const bool may_restart = cause_->may_restart;
      cause_ = cause;
      cause_->may_restart &= may_restart;
    }
    return;
  }
  if (cause.blamed_rank >= 0) {
    // It ended before the rank that it failed because of, which the report is to name.
    if (effect_) return;
    effect_ = cause;
    effect_timer_ = loop_.after(kBlamedMayTake, [this] { stop(*effect_); });
    return;
  }
  stop(cause);
}

void Coordinator::stop(StopCause cause) {
  if (effect_) loop_.cancel(effect_timer_);
  effect_.reset();
  cause_ = cause;
  if (generation_ < 0) return finish(cause);  // nothing runs yet
  for (auto& [_, member] : members_) {
    if (member.connection) member.connection->send({{"type", "stop"}, {"cause", cause}});
  }
  host_.stop(cause);
  decide();  // in the pause before a restart, all ranks are gone already
}

void Coordinator::on_lost(int host_rank, const std::string& reason) {
  if (is_finished_) return;
  Member& member = members_[host_rank];
  member.connection->close();
  report({.host_rank = host_rank,
          .host = member.name,
          .text = text::format("was lost: {}", reason),
          .advice = "See what it said last on that host.",
          .code = 1,
          .signal = SIGTERM,
          .may_restart = false});
  if (cause_) cause_->may_restart = false;  // whatever began it: with a host missing it ends here
  on_end(host_rank, End::kFailed);
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

void Coordinator::finish(const std::optional<StopCause>& cause) {
  is_finished_ = true;
  for (auto& [_, member] : members_) {
    if (!member.connection) continue;
    Json message = {{"type", "finish"}, {"cause", nullptr}};
    if (cause) message["cause"] = *cause;
    member.connection->send(message);
  }
  host_.finish(cause);
}

void Coordinator::kill_all() {
  for (auto& [_, member] : members_) {
    if (member.connection) member.connection->send({{"type", "kill"}});
  }
  host_.kill_now();
}

void Coordinator::ask_store(const Json& request, std::function<void(const Json&)> reply) {
  reply(store_.answer(request));
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
    if (is_in_time && EventLoop::Clock::now() - member.connection->last_heard() > kLostAfter) {
      silent.push_back(rank);
    }
  }
  for (const int rank : silent) {
    on_lost(rank, text::format("it has been silent for {} s", kLostAfter.count()));
  }
  if (generation_ >= 0 || is_finished_) return;
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
  report({.host_rank = 0,
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
