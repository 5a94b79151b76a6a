#include "launch/elastic.h"

#include <lockstep/error.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"

namespace lockstep {
namespace {

// A process that has run for so long is healthy: its place begins to count failures anew.
constexpr auto kHealthy = std::chrono::minutes(1);

// None the first time: most failures are a machine's, not the program's.
std::chrono::milliseconds back_off(int num_failures) {
  if (num_failures <= 1) return std::chrono::seconds(0);
  return std::chrono::seconds(std::min(30, 1 << std::min(num_failures - 2, 5)));
}

// The first replacement of a rank starts when the others have completed the step that they do
// again, or after this: loading a program takes time of the cores that they need.
constexpr auto kStepMayTake = std::chrono::seconds(2);

}  // namespace

std::string count_of_ranks(int num_ranks) {
  return text::format("{} rank{}", num_ranks, num_ranks == 1 ? "" : "s");
}

ElasticJob::ElasticJob(EventLoop& loop, const RunOptions& options, Callbacks callbacks)
    : loop_(loop), options_(options), callbacks_(std::move(callbacks)) {}

ElasticJob::~ElasticJob() { stop(); }

void ElasticJob::stop() {
  if (!std::exchange(is_stopped_, true)) end_newcomers();  // they wait for what does not come
  for (const auto& [_, timer] : timers_) loop_.cancel(timer);
  timers_.clear();
  wait_for_step_.clear();
}

void ElasticJob::begin(int generation, const std::map<int, int>& ranks_of_hosts) {
  stop();
  is_stopped_ = false;
  places_.clear();
  told_.clear();
  changes_.clear();
  stepped_in_ = 0;
  num_completed_ = 0;
  std::vector<Seat> seats;
  for (const auto& [host, num_ranks] : ranks_of_hosts) {
    for (int place = 0; place < num_ranks; ++place) {
      const auto number = static_cast<int>(seats.size());
      places_[{host, place}] = {.number = number, .is_alive = true, .started = Clock::now()};
      seats.emplace_back(host, place);
    }
  }
  roster_.begin(generation, seats);
  publish();
}

void ElasticJob::restore(int generation, int num_logical,
                         const std::map<int, std::vector<SeatState>>& hosts,
                         const std::string& why) {
  stop();
  is_stopped_ = false;
  places_.clear();
  told_.clear();
  num_completed_ = 0;
  changes_ = {why};
  std::vector<Roster::Known> processes;
  std::set<int> old_generations = {generation};
  for (const auto& [host, seats] : hosts) {
    for (const SeatState& one : seats) {
      const Seat seat{host, one.place};
      places_[seat] = {.number = one.number,
                       // One that has left is not replaced.
                       .is_wanted = !one.has_ended || one.has_failed,
                       .is_alive = !one.has_ended,
                       .started = Clock::now()};
      if (one.has_ended) {
        if (one.is_done && !one.has_failed) ++num_completed_;
        continue;
      }
      if (one.generation >= 0) old_generations.insert(one.generation);
      processes.push_back({.seat = seat,
                           .rank = one.generation >= 0 ? std::max(one.rank, 0) : -1,
                           .has_entered = one.has_entered,
                           .is_done = one.is_done});
    }
  }
  roster_.restore(generation, num_logical, processes);
  for (const int old : old_generations) callbacks_.revoke(old, why);
  publish();
  for (const auto& [seat, place] : places_) {
    if (place.is_wanted && !place.is_alive && num_completed_ == 0) start_in(seat);
  }
  close_if_complete();
}

int ElasticJob::next_number() const {
  int number = 0;
  for (const auto& [_, place] : places_) number = std::max(number, place.number + 1);
  return number;
}

void ElasticJob::add_host(int host, const std::string& name, int num_ranks) {
  drained_.erase(host);
  callbacks_.say(
      text::format("host {} ({}) has come, with {}", host, name, count_of_ranks(num_ranks)));
  for (int place = 0; place < num_ranks; ++place) {
    const auto [found, is_new] = places_.try_emplace(Seat{host, place});
    if (is_new) found->second.number = next_number();
    found->second.is_wanted = true;
    found->second.num_failures = 0;
    start_in({host, place});
  }
}

bool ElasticJob::remove_host(int host, const std::string& why) {
  if (!roster_.is_open()) return false;
  const int generation = roster_.generation();
  bool has_members = false;
  std::vector<int> numbers;
  told_.erase(host);
  for (auto& [seat, place] : places_) {
    if (seat.first != host) continue;
    forget_timer(seat);
    place.is_wanted = place.is_alive = false;
    if (!place.lost_as.empty()) callbacks_.say(std::exchange(place.lost_as, {}));
    const auto role = roster_.remove(seat);
    has_members |= role == Roster::Role::kMember;
    if (role == Roster::Role::kMember) numbers.push_back(place.number);
  }
  if (has_members) {
    const std::string text =
        text::format("host {} was lost with rank {}: {}", host, text::join(numbers, ", "), why);
    changes_.push_back(text);
    say_loss(text);
    callbacks_.revoke(generation, text);
  }
  const int left = roster_.num_members();
  if (left == 0 && !is_complete_) return false;
  publish();
  close_if_complete();
  return left >= options_.min_ranks || is_complete_;
}

void ElasticJob::say_loss(const std::string& text) {
  const int left = roster_.num_members();
  callbacks_.say(
      text::format("{}; {} {} on", text, count_of_ranks(left), left == 1 ? "goes" : "go"));
}

// Survivors need not wait until the kernel has taken a process apart. Whatever is not plain waits
// for on_end().
void ElasticJob::on_about_to_end(int host, const SeatEnd& end) {
  const Seat seat{host, end.place};
  const bool is_plain = !is_stopped_ && roster_.is_open() && !roster_.has_done() &&
                        roster_.rank_of(seat) >= 0 && !roster_.is_leaving(seat) &&
                        roster_.num_members() > std::max(1, options_.min_ranks);
  if (!is_plain) return;
  const int generation = roster_.generation();
  Place& place = places_[seat];
  roster_.remove(seat);
  place.lost_as = text::format("rank {} {}", place.number, end.cause.text);
  place.lost_in = generation;
  changes_.push_back(place.lost_as);
  callbacks_.revoke(generation, place.lost_as);
  publish();
}

bool ElasticJob::on_end(int host, const SeatEnd& end) {
  if (is_stopped_) return is_complete_;
  const Seat seat{host, end.place};
  const bool was_open = roster_.is_open();
  const int generation = roster_.generation();
  const bool is_ok = end.cause.code == 0;
  places_[seat].is_alive = false;
  if (!places_[seat].lost_as.empty()) return on_end_of_lost(seat, end);
  const Roster::Role role = roster_.remove(seat);
  switch (role) {
    case Roster::Role::kNone:  // it has left, or was ended
      close_if_drained(host);
      return true;
    case Roster::Role::kDone:
      if (!is_ok) return false;
      ++num_completed_;
      close_if_complete();
      return true;
    case Roster::Role::kMember: {
      if (!was_open || end.cause.code == kExitPreempted) return false;
      const int left = roster_.num_members();
      // Nobody has the state any more: only a checkpoint does.
      if (left == 0) return false;
      const std::string text =
          text::format("rank {} {}", places_[seat].number, is_ok ? "has ended" : end.cause.text);
      callbacks_.revoke(generation, text);
      changes_.push_back(text);
      say_loss(text);
      if (left < options_.min_ranks) {
        StopCause cause = end.cause;
        cause.advice =
            text::format("{} left, fewer than --min-ranks {}.{}{}", count_of_ranks(left),
                         options_.min_ranks, cause.advice.empty() ? "" : " ", cause.advice);
        callbacks_.fail(cause);
        return true;
      }
      break;
    }
    case Roster::Role::kNewcomer:
      if (!roster_.has_done() && !is_ok) {
        callbacks_.say(
            text::format("rank {} {} before it could join", places_[seat].number, end.cause.text));
      }
  }
  if (is_ok) {
    places_[seat].is_wanted = false;
  } else {
    replace(seat, end, role == Roster::Role::kMember ? generation : kNoStep);
  }
  publish();
  return true;
}

// The others have gone on without it; the job may even be complete.
bool ElasticJob::on_end_of_lost(Seat seat, const SeatEnd& end) {
  Place& place = places_[seat];
  const std::string lost_as = std::exchange(place.lost_as, {});
  if (end.cause.code == kExitPreempted && !roster_.has_done()) return false;
  const bool is_ok = end.cause.code == 0;
  const std::string text =
      text::format("rank {} {}", place.number, is_ok ? "has ended" : end.cause.text);
  // They may have been told already, in fewer words.
  if (std::erase(changes_, lost_as) != 0) changes_.push_back(text);
  say_loss(text);
  if (is_ok) {
    place.is_wanted = false;
  } else {
    replace(seat, end, place.lost_in);
  }
  if (!place.is_wanted) close_if_drained(seat.first);
  publish();
  return true;
}

// `lost_in`: the generation that has lost it; kNoStep: nothing is done again because of it.
void ElasticJob::replace(Seat seat, const SeatEnd& end, int lost_in) {
  Place& place = places_[seat];
  if (!place.is_wanted || is_stopped_ || roster_.has_done()) return;
  if (Clock::now() - place.started > kHealthy) place.num_failures = 0;
  ++place.num_failures;
  if (std::ranges::find(options_.fatal_codes, end.cause.code) != options_.fatal_codes.end()) {
    place.is_wanted = false;
    callbacks_.say(
        text::format("rank {} is not replaced: exit code {} is not retried (--no-replace)",
                     place.number, end.cause.code));
    return;
  }
  if (place.num_failures > options_.max_replacements) {
    place.is_wanted = false;
    callbacks_.say(
        text::format("rank {} is not replaced any more: it has failed {} times, each within {} s "
                     "(--max-replacements)",
                     place.number, place.num_failures, std::chrono::seconds(kHealthy).count()));
    return;
  }
  const auto delay = back_off(place.num_failures);
  if (delay.count() > 0) {
    callbacks_.say(text::format("rank {} is replaced in {} s", place.number, delay.count() / 1000));
  }
  const bool waits_for_step = delay.count() == 0 && lost_in >= stepped_in_;
  if (waits_for_step) wait_for_step_.insert(seat);
  timers_[seat] = loop_.after(waits_for_step ? kStepMayTake : delay, [this, seat] {
    timers_.erase(seat);
    wait_for_step_.erase(seat);
    start_in(seat);
  });
}

void ElasticJob::on_step(int generation) {
  if (generation != roster_.generation()) return;
  stepped_in_ = generation;
  for (const Seat& seat : std::exchange(wait_for_step_, {})) {
    forget_timer(seat);
    start_in(seat);
  }
}

void ElasticJob::forget_timer(Seat seat) {
  const auto timer = timers_.find(seat);
  if (timer == timers_.end()) return;
  loop_.cancel(timer->second);
  timers_.erase(timer);
  wait_for_step_.erase(seat);
}

void ElasticJob::start_in(Seat seat) {
  Place& place = places_[seat];
  if (is_stopped_ || !place.is_wanted || roster_.has_done() || roster_.has(seat)) return;
  if (place.is_alive) return;  // the process before: when that has ended, it is replaced
  place.started = Clock::now();
  place.is_alive = true;
  roster_.add(seat);
  callbacks_.order(seat.first, {{"type", "seat"},
                                {"do", "start"},
                                {"place", seat.second},
                                {"number", place.number},
                                {"generation", roster_.generation()},
                                {"logical", roster_.num_logical()}});
}

Json ElasticJob::answer(int host, int place, const Json& request) {
  const Seat seat{host, place};
  const std::string op = request.at("op");
  if (op == "elastic_enter") {
    const int num_logical = request.at("logical").get<int>();
    roster_.enter(seat, num_logical);
    kind_ = request.at("kind").get<std::string>();
    publish();
    return nullptr;
  }
  if (op == "elastic_step") {
    on_step(request.at("generation").get<int>());
    return nullptr;
  }
  if (op == "elastic_finish") {
    const Roster::Finish finish = roster_.finish(seat);
    if (finish == Roster::Finish::kOver && roster_.has_done()) end_newcomers();
    return Json::array({static_cast<int>(finish)});
  }
  // Where the ranks are of one kind, a newcomer must be, too.
  const std::string kind = request.at("kind").get<std::string>();
  if (roster_.rank_of(seat) < 0 && !kind_.empty() && kind != kind_) {
    return Json::array({static_cast<int>(kRefused), kind_});
  }
  const int before = roster_.generation();
  const Roster::Answer answer =
      roster_.ask(seat, request.at("from").get<int>(), request.at("planned").get<bool>());
  if (roster_.generation() != before) {
    callbacks_.revoke(before, text::format("generation {} has ended", before));
  }
  publish();
  using Kind = Roster::Answer::Kind;
  Json reply = Json::array({static_cast<int>(answer.kind)});  // an object would be an error
  if (answer.kind == Kind::kJoin) {
    reply = Json::array(
        {static_cast<int>(answer.kind), answer.generation, answer.rank, answer.size, changes_});
    // All have been told what led to this generation once its first rank has: it says it.
    if (answer.rank == 0) changes_.clear();
  }
  return reply;
}

// Every host's ranks read in memory which generation is wanted, and whether theirs has ended.
void ElasticJob::publish() {
  const NoticeWords words{
      .wanted = roster_.wanted(), .num_ended = roster_.num_ended(), .formed = roster_.generation()};
  for (const auto& [seat, _] : places_) {
    if (!roster_.has(seat)) continue;
    const auto [told, is_new] = told_.try_emplace(seat.first);
    if (!is_new && told->second == words) continue;
    told->second = words;
    callbacks_.order(seat.first, {{"type", "seat"},
                                  {"do", "want"},
                                  {"generation", words.wanted},
                                  {"ended", words.num_ended},
                                  {"formed", words.formed}});
  }
}

void ElasticJob::end_newcomers() {
  for (const Seat& seat : roster_.newcomers()) {
    callbacks_.order(seat.first, {{"type", "seat"}, {"do", "end"}, {"place", seat.second}});
  }
}

void ElasticJob::close_if_complete() {
  if (is_complete_ || num_completed_ == 0 || !roster_.members().empty()) return;
  is_complete_ = true;
  stop();
  std::vector<int> hosts;
  for (const auto& [seat, _] : places_) {
    if (hosts.empty() || hosts.back() != seat.first) hosts.push_back(seat.first);
  }
  for (const int host : hosts) callbacks_.order(host, {{"type", "seat"}, {"do", "close"}});
}

}  // namespace lockstep
