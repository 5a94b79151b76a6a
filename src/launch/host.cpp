#include "launch/host.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>

#include "base/blame.h"
#include "base/env.h"
#include "base/lifeline.h"
#include "base/notice.h"
#include "base/text.h"
#include "launch/rank_command.h"

namespace lockstep {
namespace {

constexpr auto kEcho = std::chrono::seconds(1);
constexpr int kExitBadStart = 126;

bool has_saved(const ExitStatus& end) { return end.signal == 0 && end.code == kExitPreempted; }

// For programs that open a store of their own, as torchrun's do: a port that is free now. Nothing
// of lockstep uses it, and nobody listens there until such a program does.
int free_port() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket.get(), any, size) != 0 || ::getsockname(socket.get(), any, &size) != 0)
    return 0;
  return ntohs(address.sin_port);
}

// Where a rank's own error begins, among the last lines that it has said; their number if there is
// none. error.cpp writes it.
std::size_t find_error(const std::vector<std::string>& lines) {
  const auto is_head = [](const std::string& line) {
    return line.find("lockstep error on rank ") != std::string::npos;
  };
  return static_cast<std::size_t>(std::ranges::find_if(lines, is_head) - lines.begin());
}

std::string advice_for(const ExitStatus& status) {
  switch (status.signal) {
    case SIGKILL:
      return "Often that is the kernel's out-of-memory killer: see dmesg.";
    case SIGBUS:
      return "Often that is memory that could not be had: see dmesg, and lockstep doctor.";
    case SIGSEGV:
    case SIGABRT:
    case SIGILL:
    case SIGFPE:
      return "Run it with a debugger, or allow core files (ulimit -c unlimited).";
    default:
      return {};
  }
}

}  // namespace

std::map<std::string, std::string> place_variables(const RunOptions& options,
                                                   const Generation& generation, int local_rank,
                                                   int master_port) {
  auto variables =
      variables_of({.rank = generation.first_rank + local_rank,
                    .world_size = generation.world_size,
                    .local_rank = local_rank,
                    .local_size = options.num_ranks,
                    .host_rank = options.host_rank,
                    .num_hosts = options.num_hosts,
                    .master_host = options.num_hosts == 1 ? "127.0.0.1" : options.master_host,
                    .master_port = master_port,
                    .restart = generation.number,
                    .max_restarts = generation.max_restarts});
  if (options.hash_every > 0) {
    variables["LOCKSTEP_HASH_EVERY"] = std::to_string(options.hash_every);
    variables["LOCKSTEP_HASH_LOG"] = options.hash_log;
  }
  return variables;
}

Host::Host(EventLoop& loop, Output& output, const RunOptions& options)
    : loop_(loop),
      output_(output),
      options_(options),
      open_files_(raise_open_files_limit()) {  // several for each rank
  output_.on_log_failure([this](const std::string& why) {
    if (!exit_code_) return report_bad_start(why);
    output_.say(why);  // the ranks were faster
    if (*exit_code_ == 0) exit_code_ = kExitBadStart;
  });
  nothing_ = Fd(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!nothing_)
    throw_errno("cannot open /dev/null", "Repair this system: /dev/null must be there.");
  master_port_ = options.num_hosts == 1 ? free_port() : options.master_port + 1;
}

void Host::start(const Generation& generation) {
  generation_ = generation;
  began_ = Clock::now();
  cause_.reset();
  ranks_.clear();
  is_running_ = true;
  try {
    output_.begin(generation.first_rank, options_.num_ranks, generation.world_size);
    // A fresh one: what the generation before has left in its store is of no use.
    if (!has_launcher_store()) store_ = make_memfd("lockstep-store");
    blames_ = make_memfd("lockstep-blames");
    if (options_.is_elastic) notice_ = make_notice();
    is_closing_ = false;
    const auto shares = split_cores(this_machine(), options_.num_ranks, options_.bind);
    // A host that comes to a job that runs is told which ranks to start.
    for (int local = 0; local < options_.num_ranks && !generation.is_running; ++local) {
      start_rank(local, generation.first_rank + local, shares[static_cast<std::size_t>(local)],
                 false);
    }
  } catch (const Error& error) {
    report_bad_start(error.message());
    if (ranks_.empty()) on_all_ended();
  }
  if (options_.is_verbose) {
    std::vector<pid_t> pids;
    for (const Rank& rank : ranks_) pids.push_back(rank.pid);
    output_.say(text::format("ranks {} to {} of {}, generation {}, are processes {}",
                             generation.first_rank, generation.first_rank + options_.num_ranks - 1,
                             generation.world_size, generation.number, text::join(pids, ", ")));
  }
}

void Host::report_bad_start(const std::string& why) {
  leader_->report({.host_rank = options_.host_rank,
                   .host = host_name(),
                   .text = "could not start its ranks: " + why,
                   .code = kExitBadStart,
                   .signal = SIGTERM,
                   .may_restart = false});
}

void Host::start_rank(int local_rank, int number, const Share& share, bool is_newcomer) {
  Rank rank;
  rank.number = number;
  rank.began = Clock::now();
  rank.is_newcomer = is_newcomer;
  rank.state = {.place = local_rank, .number = number};
  if (!is_newcomer) {
    rank.state.generation = generation_.number;
    rank.state.rank = number;
  }
  Command command;
  command.arguments = options_.command;
  command.variables = place_variables(options_, generation_, local_rank, master_port_);
  command.removed_variables = {"LOCKSTEP_SECRET"};
  command.cpus = share.cpus;
  command.open_files = open_files_;
  if (output_.err().is_terminal()) {  // progress bars may draw, beside the rank's number
    const int columns = output_.err().columns() - output_.prefix_width();
    command.variables["LOCKSTEP_TERMINAL"] = std::to_string(columns);
  }
  if (options_.num_hosts > 1) {  // for the ranks' own connections between hosts
    command.variables["LOCKSTEP_LOST_AFTER"] = std::to_string(options_.lost_after.count());
  }
  if (!Environment::of_process().has("OMP_NUM_THREADS")) {
    command.variables["OMP_NUM_THREADS"] = std::to_string(share.threads);
  }
  if (options_.num_logical > 0) {
    command.variables["LOCKSTEP_LOGICAL_RANKS"] = std::to_string(options_.num_logical);
  } else if (options_.is_elastic && !Environment::of_process().has("LOCKSTEP_LOGICAL_RANKS")) {
    command.variables["LOCKSTEP_LOGICAL_RANKS"] = std::to_string(generation_.world_size);
  }
  rank.gauges = make_gauges();
  command.variables[kGaugesVariable] = gauges_address(rank.gauges.get());
  command.inherited_fds.push_back(rank.gauges.get());
  if (options_.is_elastic) {
    command.variables[kNoticeVariable] = std::to_string(notice_.get());
    command.inherited_fds.push_back(notice_.get());
    rank.lifeline = make_lifeline();
    command.variables[kLifelineVariable] = std::to_string(rank.lifeline.get());
    command.inherited_fds.push_back(rank.lifeline.get());
    command.variables["LOCKSTEP_SEAT"] = std::to_string(number);
    if (is_newcomer) {  // alone, until the others take it in
      command.variables["LOCKSTEP_NEWCOMER"] = "1";
      command.variables["RANK"] = "0";
      command.variables["WORLD_SIZE"] = "1";
    }
  }
  Fd socket;
  if (!has_launcher_store()) {
    pass_store(command, store_.get());
  } else {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      throw_errno("cannot make a socket", "Raise the limit on open files (ulimit -n).");
    }
    socket = Fd(ends[1]);
    command.variables["LOCKSTEP_STORE"] = text::format("launcher:{}", socket.get());
    command.inherited_fds.push_back(socket.get());
    // Answers find the connection that asked, if it is still there.
    auto mine = std::make_shared<std::weak_ptr<Connection>>();
    rank.store =
        Connection::make(loop_, Fd(ends[0]), nullptr, true,
                         {.received = [this, mine, local_rank](
                                          const Json& request) { ask(local_rank, *mine, request); },
                          .closed = [](const std::string&) {}});
    *mine = rank.store;
  }
  command.variables[kBlameVariable] = blame_address(blames_.get(), local_rank);
  command.inherited_fds.push_back(blames_.get());
  // From a terminal only the launcher reads; rank 0 gets what is piped in.
  if (rank.number != 0 || is_newcomer || ::isatty(STDIN_FILENO) == 1) {
    command.stdin_fd = nothing_.get();
  }
  Pipe out = make_pipe();
  Pipe err = make_pipe();
  command.stdout_fd = out.write_end.get();
  command.stderr_fd = err.write_end.get();
  Starting starting = begin_spawn(command);
  rank.pid = starting.pid;
  rank.exec = std::move(starting.outcome);
  const auto index = static_cast<std::size_t>(local_rank);
  loop_.watch(rank.exec.get(), POLLIN, [this, index](short) { look_at_exec(ranks_[index]); });
  output_.attach(rank.number, std::move(out.read_end), std::move(err.read_end));
  ranks_.resize(std::max(ranks_.size(), index + 1));
  ranks_[index] = std::move(rank);
}

void Host::ask(int local_rank, const std::weak_ptr<Connection>& connection, const Json& request) {
  const bool has_op = request.is_object() && request.contains("op") && request["op"].is_string();
  const std::string op = has_op ? request["op"].get<std::string>() : "";
  // A rank holds its lifeline before it asks for its place.
  if (op == "elastic_enter" || op == "elastic_next") {
    watch_life_of(ranks_[static_cast<std::size_t>(local_rank)]);
  }
  leader_->ask(local_rank, request, [this, connection, op](const Json& answer) {
    const auto its = connection.lock();
    if (!its) return;
    const auto rank = std::ranges::find(ranks_, its, &Rank::store);
    if (rank != ranks_.end()) note_answer(rank->state, op, answer);
    its->send(answer);
  });
}

// Without a thread its end is seen a moment later.
void Host::watch_life_of(Rank& rank) try {
  const Fd lifeline = std::move(rank.lifeline);
  if (!lifeline) return;
  watch_lifeline(lifeline.get(), [this, mailbox = loop_.mailbox(), pid = rank.pid] {
    mailbox->post([this, pid] { look_if_ending(pid); });
  });
} catch (const Error& error) {
  if (options_.is_verbose) output_.say(error.message());
}

// A thread that has joined a world may end, and its process go on.
void Host::look_if_ending(pid_t pid) {
  const auto rank = std::ranges::find(ranks_, pid, &Rank::pid);
  if (rank == ranks_.end() || rank->end || rank->is_lost || cause_ || is_closing_ ||
      !is_ending(find_process(pid))) {
    return;
  }
  leader_->report_seat({.place = static_cast<int>(rank - ranks_.begin()),
                        .cause = {.host_rank = options_.host_rank,
                                  .host = host_name(),
                                  .rank = rank->number,
                                  .text = text::format("(pid {}) was lost", pid)},
                        .is_about_to = true});
}

// A new coordinator wants to know what the old one has told the ranks.
void Host::note_answer(SeatState& state, const std::string& op, const Json& answer) {
  state.has_entered |= op == "elastic_enter";
  state.is_done |= op == "elastic_finish" && answer == Json::array({1});
  if (op != "elastic_next" || !answer.is_array() || answer.size() < 3) return;
  state.generation = answer[1].get<int>();
  state.rank = answer[2].get<int>();
  state.has_entered = true;
}

std::vector<SeatState> Host::seats() const {
  std::vector<SeatState> all;
  for (const Rank& rank : ranks_) {
    if (rank.pid <= 0) continue;
    all.push_back(rank.state);
    all.back().has_ended = rank.end.has_value();
    all.back().has_failed = rank.end && !rank.end->is_ok();
  }
  return all;
}

std::vector<RankStatus> Host::look() const {
  std::vector<RankStatus> all;
  for (const Rank& rank : ranks_) {
    if (rank.pid <= 0) continue;
    RankStatus& status = all.emplace_back();
    status.number = rank.number;
    status.host = options_.host_rank;
    status.host_name = host_name();
    status.pid = rank.pid;
    if (rank.end) status.end = rank.end->text();
    look_at(status, rank.gauges.get());
  }
  return all;
}

// In a place whose process is gone, or a new one.
void Host::start_newcomer(const Json& order) {
  const int place = order.at("place").get<int>();
  const int number = order.at("number").get<int>();
  const auto index = static_cast<std::size_t>(place);
  if (index < ranks_.size() && ranks_[index].pid > 0) {
    if (!ranks_[index].end) return;
    ::waitpid(ranks_[index].pid, nullptr, WNOHANG);  // who is left has seen how it ended
  }
  generation_.number = order.at("generation").get<int>();
  output_.add(number);
  const int num_places = std::max(options_.num_ranks, place + 1);
  const auto shares = split_cores(this_machine(), num_places, options_.bind);
  start_rank(place, number, shares[index], true);
  if (options_.is_verbose) {
    output_.say(text::format("rank {} is started again: process {}", number, ranks_[index].pid));
  }
}

void Host::obey(const Json& order) {
  const std::string what = order.at("do");
  if (what == "want") {
    if (!notice_) return;
    write_notice(notice_.get(), {.wanted = order.at("generation").get<int>(),
                                 .num_ended = order.at("ended").get<int>(),
                                 .formed = order.at("formed").get<int>()});
  } else if (what == "start" && is_running_ && !cause_ && !is_closing_) {
    try {
      start_newcomer(order);
    } catch (const Error& error) {  // no room for a process: as if it had failed at once
      leader_->report_seat({.place = order.at("place").get<int>(),
                            .cause = {.host_rank = options_.host_rank,
                                      .host = host_name(),
                                      .text = "could not be started: " + error.message()}});
    }
  } else if (what == "end") {
    const auto index = order.at("place").get<std::size_t>();
    if (index < ranks_.size() && !ranks_[index].end && ranks_[index].pid > 0) {
      ranks_[index].is_lost = true;
      ::kill(-ranks_[index].pid, SIGKILL);
    }
  } else if (what == "close") {
    is_closing_ = true;
    for (Rank& rank : ranks_) {
      if (!rank.end && rank.pid > 0) {
        rank.is_lost = true;
        ::kill(-rank.pid, SIGKILL);
      }
    }
    look_for_ends();
  }
}

void Host::look_at_exec(Rank& rank) {
  if (!rank.exec) return;
  loop_.forget(rank.exec.get());
  const Fd outcome = std::move(rank.exec);
  try {
    wait_for_exec(outcome, options_.command.front());
  } catch (const Error& error) {
    if (!rank.is_newcomer) return report_bad_start(error.message());
    output_.say(text::format("rank {}: {}", rank.number, error.message()));  // it ends, too
  }
}

void Host::look_for_ends() {
  if (!is_running_) return;
  reap_orphans();
  std::vector<Rank*> ended;
  for (Rank& rank : ranks_) {
    if (rank.end || rank.pid <= 0) continue;
    rank.end = look_at_end(rank.pid);
    if (rank.end) ended.push_back(&rank);
  }
  // Of those that ended together, one that was killed is the likelier cause: others that miss it
  // end with a code.
  std::ranges::stable_sort(ended, {}, [](const Rank* rank) { return rank->end->signal == 0; });
  for (Rank* rank : ended) on_end(*rank);
  // An elastic job may still start some here.
  if (options_.is_elastic && !is_closing_ && !cause_) return;
  if (is_running_ && std::ranges::all_of(ranks_, [](const Rank& rank) {
        return rank.end.has_value() || rank.pid <= 0;
      })) {
    on_all_ended();
  }
}

// What ranks have left behind ends, too, and must not fill the table of processes. Ranks themselves
// stay zombies, so that others can see how they ended.
void Host::reap_orphans() const {
  const auto is_rank = [this](pid_t pid) {
    return std::ranges::find(ranks_, pid, &Rank::pid) != ranks_.end();
  };
  siginfo_t info{};
  do {
    info = {};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
  } while (!is_rank(info.si_pid) && ::waitpid(info.si_pid, nullptr, WNOHANG) > 0);
  // The kernel shows one zombie only, now a rank: others are looked for.
  for (const pid_t pid : children()) {
    if (!is_rank(pid)) ::waitpid(pid, nullptr, WNOHANG);
  }
}

void Host::on_end(Rank& rank) {
  if (rank.store) rank.store->close();
  look_at_exec(rank);
  if (options_.is_elastic && !cause_) {
    output_.catch_up(rank.number);
    SeatEnd end{.place = static_cast<int>(&rank - ranks_.data()), .cause = cause_at(rank)};
    if (rank.end->is_ok()) end.cause.code = 0;
    rank.is_lost = !rank.end->is_ok() && !has_saved(*rank.end);
    leader_->report_seat(end);
    return;
  }
  // A failure counts for more than ranks that have saved and left.
  const bool is_worse = cause_ && cause_->code == kExitPreempted && !has_saved(*rank.end);
  if (rank.end->is_ok() || (cause_ && !is_worse)) return;
  output_.catch_up(rank.number);
  leader_->report(cause_at(rank));
}

StopCause Host::cause_at(const Rank& rank) const {
  const double seconds = std::chrono::duration<double>(Clock::now() - rank.began).count();
  if (has_saved(*rank.end)) {
    // The others are leaving as well: they need no signal, only time.
    return {
        .host_rank = options_.host_rank,
        .host = host_name(),
        .rank = rank.number,
        .text = text::format("(pid {}) was told to stop, and has saved its state, after {:.1f} s",
                             rank.pid, seconds),
        .code = kExitPreempted,
        .signal = 0};
  }
  return {.host_rank = options_.host_rank,
          .host = host_name(),
          .rank = rank.number,
          .blamed_rank = blamed_by(rank),
          .text = text::format("(pid {}) {} after {:.1f} s", rank.pid, rank.end->text(), seconds),
          .advice = advice_for(*rank.end),
          .code = rank.end->signal != 0 ? 128 + rank.end->signal : rank.end->code,
          .last_lines = output_.last_lines(rank.number)};
}

// The rank that it failed because of, if that one may still fail, or has.
int Host::blamed_by(const Rank& rank) const {
  // An exception that nobody catches ends in SIGABRT; other signals have another reason.
  if (rank.end->signal != 0 && rank.end->signal != SIGABRT) return -1;
  const auto place = static_cast<int>(&rank - ranks_.data());
  const int blamed = read_blame(blames_.get(), place, rank.pid, Clock::now());
  const auto here = std::ranges::find(ranks_, blamed, &Rank::number);
  const bool has_left =
      here != ranks_.end() && here->end && (here->end->is_ok() || has_saved(*here->end));
  const bool is_another = blamed != rank.number && blamed < generation_.world_size;
  return is_another && !has_left ? blamed : -1;
}

void Host::on_all_ended() {
  is_running_ = false;
  if (kill_timer_) loop_.cancel(*kill_timer_);
  for (Rank& rank : ranks_) {
    if (rank.exec) loop_.forget(rank.exec.get());
    rank.exec.reset();
  }
  sweep(Clock::now() + kSweepDeadline);
}

// What ranks have started and left behind goes; the ranks themselves, until now zombies that tell
// the others how they ended, as well.
void Host::sweep(Clock::time_point deadline) {
  constexpr auto kRound = std::chrono::milliseconds(1);
  std::set<pid_t> spared;
  kill_children_once(spared);
  if (has_children() && Clock::now() < deadline) {
    kill_timer_ = loop_.after(kRound, [this, deadline] { sweep(deadline); });
    return;
  }
  kill_timer_.reset();
  if (has_children()) {
    output_.say("some processes of the ranks do not end, not even when killed: see ps and dmesg");
  }
  output_.end();
  const bool are_all_started =
      options_.is_elastic || static_cast<int>(ranks_.size()) == options_.num_ranks;
  End end = are_all_started ? End::kOk : End::kFailed;
  for (const Rank& rank : ranks_) {
    if (rank.is_lost || !rank.end) continue;
    end = std::max(end, rank.end->is_ok()      ? End::kOk
                        : has_saved(*rank.end) ? End::kSaved
                                               : End::kFailed);
  }
  leader_->report_end(end);
}

void Host::signal_all(int signal) {
  for (const Rank& rank : ranks_) {
    if (!rank.end && rank.pid > 0) ::kill(-rank.pid, signal);
  }
}

// Its own children are not asked: a signal such as SIGUSR1 would end them.
void Host::pass_on(int signal) {
  for (const Rank& rank : ranks_) {
    if (!rank.end && rank.pid > 0) ::kill(rank.pid, signal);
  }
}

void Host::stop(const StopCause& cause) {
  if (cause_) return;
  cause_ = cause;
  if (!is_running_) return;
  // Who kills the launcher of one host has not killed the ranks of the others: they may save.
  const bool is_elsewhere = cause.host_rank != options_.host_rank;
  signal_all(cause.signal == SIGKILL && is_elsewhere ? SIGTERM : cause.signal);
  signal_all(SIGCONT);      // one that is stopped hears nothing
  if (kill_timer_) return;  // they are being killed already
  kill_timer_ = loop_.after(options_.stop_grace, [this] { kill_now(); });
}

void Host::kill_now() {
  if (!is_running_) return;
  signal_all(SIGKILL);
  if (kill_timer_) loop_.cancel(*kill_timer_);
  // One that the kernel cannot end, as it waits for a dead file server, holds up nobody.
  kill_timer_ = loop_.after(kSweepDeadline, [this] {
    for (Rank& rank : ranks_) {
      if (!rank.end) rank.end = ExitStatus{.code = 0, .signal = SIGKILL};
    }
    on_all_ended();
  });
}

void Host::interrupt(int signal) {
  // Who signals all processes of a job has told the guard as well, which passes it on: that is one
  // wish, not two.
  const auto now = Clock::now();
  const bool is_echo = signal != SIGINT && num_interrupts_ > 0 && now - last_interrupt_ < kEcho;
  if (is_echo) return;
  last_interrupt_ = now;
  if (++num_interrupts_ > 1) return leader_->kill_all();
  if (signal == SIGTERM && leader_->drain()) return;
  leader_->report(
      {.host_rank = options_.host_rank,
       .host = host_name(),
       .text = text::format("was told to stop by signal {} ({})", signal, ::strsignal(signal)),
       // Schedulers start an elastic job again that has lost its first host.
       .code = options_.is_elastic && signal == SIGKILL ? kExitPreempted : 128 + signal,
       .signal = signal,
       .is_interrupt = true,
       .may_restart = false});
}

std::string Host::describe(const StopCause& cause) const {
  const bool is_here = cause.host_rank == options_.host_rank;
  const std::string where =
      options_.num_hosts == 1 ? "" : text::format(" of host {} ({})", cause.host_rank, cause.host);
  std::string text;
  if (cause.rank >= 0) {
    text = text::format("rank {}{} {}", cause.rank, where, cause.text);
  } else if (is_here) {
    text = text::format("this launcher {}", cause.text);
  } else {
    text = text::format("the launcher{} {}", where, cause.text);
  }
  if (!text.ends_with('.')) text += ".";
  if (!cause.advice.empty()) text += " " + cause.advice;
  if (!cause.last_lines.empty()) {
    text += text::format("\n  The last lines of rank {}:\n    {}", cause.rank,
                         text::join(cause.last_lines, "\n    "));
  }
  // Ranks that failed as well, each with what it said last. Who throws what nobody catches ends by
  // a signal, but by none that a launcher sends; and one that was stopped may have failed before.
  const auto was_stopped = [&](const ExitStatus& end) {
    return end.signal == SIGTERM || end.signal == SIGKILL ||
           (end.signal != 0 && end.signal == cause.signal);
  };
  constexpr int kShown = 4;
  constexpr std::size_t kShownLines = 3;
  constexpr std::size_t kErrorLines = 6;
  int others = 0;
  for (const Rank& rank : ranks_) {
    if (!rank.end || rank.end->is_ok() || has_saved(*rank.end) || rank.number == cause.rank ||
        rank.is_lost) {
      continue;
    }
    const auto lines = output_.last_lines(rank.number);
    const std::size_t error = find_error(lines);
    const bool has_error = error < lines.size();
    if (was_stopped(*rank.end) && !has_error) continue;
    if (++others > kShown) continue;
    if (others == 1) text += "\n  Because of it:";
    text += text::format("\n    rank {} {}", rank.number, rank.end->text());
    const std::size_t from = has_error                    ? error
                             : lines.size() < kShownLines ? 0
                                                          : lines.size() - kShownLines;
    const std::size_t to = has_error ? std::min(lines.size(), error + kErrorLines) : lines.size();
    for (std::size_t at = from; at < to; ++at) text += "\n      " + lines[at];
  }
  if (others > kShown) text += text::format("\n    and {} more", others - kShown);
  return text;
}

void Host::restart_in(std::chrono::milliseconds delay, int restart, const StopCause& cause) {
  output_.say(text::format("{}\nlockstep: restart {} of {} in {:.0f} s", describe(cause), restart,
                           generation_.max_restarts, std::chrono::duration<double>(delay).count()));
}

void Host::finish(const std::optional<StopCause>& cause) {
  exit_code_ = cause ? cause->code : 0;
  if (!cause) return;
  output_.say(text::format("{}\nlockstep: exit code {}", describe(*cause), *exit_code_));
}

}  // namespace lockstep
