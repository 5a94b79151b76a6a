// How an elastic job is made larger or smaller on request: by a person (lockstep scale), or a
// scheduler that takes a host away.

#include <lockstep/error.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "launch/elastic.h"

namespace lockstep {

void ElasticJob::drain_host(int host) {
  drained_.insert(host);
  for (auto& [seat, place] : places_) {
    if (seat.first != host) continue;
    place.is_wanted = false;
    roster_.set_leaving(seat);
  }
  publish();
}

// All ranks of a host have left: its launcher may end.
void ElasticJob::close_if_drained(int host) {
  if (host == options_.host_rank && !drained_.contains(host)) return;  // it coordinates
  for (const auto& [seat, place] : places_) {
    if (seat.first == host && (place.is_wanted || place.is_alive)) return;
  }
  callbacks_.order(host, {{"type", "seat"}, {"do", "close"}});
}

std::string ElasticJob::scale(int num_ranks) {
  const auto refuse = [](const std::string& message) {
    throw UsageError({.operation = "scale"}, message);
  };
  if (is_stopped_ || !roster_.is_open()) {
    refuse("The job is not in its elastic part now.\nTry again when it trains.");
  }
  const int most = roster_.num_logical();
  if (num_ranks < std::max(1, options_.min_ranks) || num_ranks > most) {
    refuse(text::format("{} ranks were asked for.\nGive {} to {}: the job has {} logical ranks.",
                        num_ranks, std::max(1, options_.min_ranks), most, most));
  }
  std::map<int, int> counts;  // of wanted seats, by host
  for (const auto& [host, _] : told_) counts[host] = 0;
  int total = 0;
  for (const auto& [seat, place] : places_) {
    if (!place.is_wanted || !told_.contains(seat.first)) continue;
    ++counts[seat.first];
    ++total;
  }
  const int before = total;
  for (; total > num_ranks; --total) {  // from the host that has most, its last one
    const auto host =
        std::ranges::max_element(counts, {}, [](const auto& one) { return one.second; })->first;
    auto last = places_.end();
    for (auto at = places_.begin(); at != places_.end(); ++at) {
      if (at->first.first == host && at->second.is_wanted) last = at;
    }
    last->second.is_wanted = false;
    --counts[host];
    roster_.set_leaving(last->first);
  }
  for (; total < num_ranks; ++total) {
    const auto host =
        std::ranges::min_element(counts, {}, [](const auto& one) { return one.second; })->first;
    int at = 0;  // the first place without a process that is wanted
    while (places_.contains({host, at}) && places_[{host, at}].is_wanted) ++at;
    const auto [found, is_new] = places_.try_emplace(Seat{host, at});
    if (is_new) found->second.number = next_number();
    if (roster_.has(found->first)) {
      refuse("Ranks are still leaving.\nTry again in a moment.");
    }
    found->second.is_wanted = true;
    found->second.num_failures = 0;
    ++counts[host];
    start_in(found->first);
  }
  publish();
  return text::format("from {} to {}", count_of_ranks(before), count_of_ranks(num_ranks));
}

std::string ElasticJob::drain(int number) {
  const auto found =
      std::ranges::find_if(places_, [&](const auto& one) { return one.second.number == number; });
  if (found == places_.end() || !roster_.has(found->first) || is_stopped_) {
    throw UsageError({.operation = "scale"},
                     text::format("There is no rank {} now.\nGive a number that the job's output "
                                  "shows.",
                                  number));
  }
  if (roster_.num_members() <= std::max(1, options_.min_ranks)) {
    throw UsageError({.operation = "scale"},
                     "Too few ranks would be left.\nStop the job, or lower --min-ranks.");
  }
  found->second.is_wanted = false;
  roster_.set_leaving(found->first);
  publish();
  return text::format("rank {} leaves at the end of a step", number);
}

Json ElasticJob::obey(const Json& request) {
  if (request.contains("ranks")) return scale(request.at("ranks").get<int>());
  if (request.contains("leave")) return drain(request.at("leave").get<int>());
  return describe();
}

std::string ElasticJob::describe() const {
  std::string text = text::format("generation {}, {} of at most {} ranks", roster_.generation(),
                                  roster_.num_members(), roster_.num_logical());
  for (const auto& [seat, place] : places_) {
    if (!roster_.has(seat)) continue;
    const int rank = roster_.rank_of(seat);
    text += text::format("\n  [{}] on host {}: {}", place.number, seat.first,
                         rank < 0                   ? "is starting"
                         : roster_.is_leaving(seat) ? "leaves at the end of a step"
                                                    : text::format("rank {}", rank));
  }
  return text;
}

}  // namespace lockstep
