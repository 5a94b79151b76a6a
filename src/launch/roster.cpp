#include "launch/roster.h"

#include <algorithm>

namespace lockstep {

void Roster::begin(int generation, const std::vector<Seat>& seats) {
  processes_.clear();
  generation_ = generation;
  num_logical_ = 0;
  is_broken_ = is_agreed_ = is_restored_ = false;
  int rank = 0;
  for (const Seat& seat : seats) processes_[seat] = {.is_member = true, .rank = rank++};
}

void Roster::restore(int generation, int num_logical, const std::vector<Known>& processes) {
  processes_.clear();
  generation_ = generation;
  num_logical_ = num_logical;
  is_agreed_ = false;
  is_broken_ = is_restored_ = true;
  for (const Known& one : processes) {
    processes_[one.seat] = {.is_member = one.rank >= 0,
                            .has_entered = one.has_entered,
                            .is_done = one.is_done,
                            .rank = one.rank};
  }
}

void Roster::enter(Seat seat, int num_logical) {
  const auto found = processes_.find(seat);
  if (found == processes_.end()) return;
  found->second.has_entered = true;
  num_logical_ = num_logical;
}

bool Roster::is_open() const {
  return !processes_.empty() && std::ranges::all_of(processes_, [](const auto& one) {
    return !one.second.is_member || one.second.has_entered;
  });
}

void Roster::add(Seat seat) { processes_[seat] = {}; }

void Roster::set_leaving(Seat seat) {
  if (const auto found = processes_.find(seat); found != processes_.end()) {
    found->second.is_leaving = true;
  }
  form_if_ready();
}

Roster::Finish Roster::finish(Seat seat) {
  const auto found = processes_.find(seat);
  if (found == processes_.end() || found->second.is_done) return Finish::kOver;
  if (is_broken_ || is_agreed_) {
    for (auto& [_, its] : processes_) its.is_finishing = false;
    return Finish::kReform;
  }
  found->second.is_finishing = true;
  for (const auto& [_, its] : processes_) {
    if (its.is_member && !its.is_finishing) return Finish::kWait;
  }
  for (auto& [_, its] : processes_) its.is_done = its.is_member;
  return Finish::kOver;
}

Roster::Role Roster::remove(Seat seat) {
  const auto found = processes_.find(seat);
  if (found == processes_.end()) return Role::kNone;
  const Process process = found->second;
  processes_.erase(found);
  Role role = Role::kNewcomer;
  if (process.is_done) {
    role = Role::kDone;
  } else if (process.is_member) {
    role = Role::kMember;
    is_broken_ = true;
    // Who was to leave has the state, if nobody else does.
    if (num_members() == 0) {
      for (auto& [_, its] : processes_) its.is_leaving &= !its.is_member;
    }
  }
  form_if_ready();  // the others may have waited for this one alone
  return role;
}

Roster::Answer Roster::ask(Seat seat, int from, bool is_planned) {
  const auto found = processes_.find(seat);
  if (found == processes_.end()) return {.kind = Answer::Kind::kLeave};
  Process& process = found->second;
  if (!process.is_member && process.is_leaving) {  // it was not needed before it came
    processes_.erase(found);
    return {.kind = Answer::Kind::kLeave};
  }
  const auto place = [&]() -> Answer {
    return {.kind = Answer::Kind::kJoin,
            .generation = generation_,
            .rank = process.rank,
            .size = static_cast<int>(members().size())};
  };
  // It has its place, and asks for the first time since.
  const bool is_placed = process.is_member && from < generation_;
  if (is_placed && !is_broken_) return place();
  is_agreed_ |= is_planned && from == generation_;
  if (process.is_member && !is_broken_ && !is_agreed_ && !is_restored_) {
    return {.kind = Answer::Kind::kIntact, .generation = generation_};
  }
  process.is_ready = true;
  form_if_ready();
  if (!processes_.contains(seat)) return {.kind = Answer::Kind::kLeave};
  return process.is_member && !process.is_ready ? place() : Answer{.generation = generation_};
}

// A newcomer is wanted only as long as it has a logical rank to play.
bool Roster::is_change_wanted() const {
  if (!is_open() || has_done()) return false;
  if (is_restored_) return true;
  const bool has_room = num_logical_ == 0 || num_members() < num_logical_;
  return std::ranges::any_of(processes_, [&](const auto& one) {
    const Process& its = one.second;
    return its.is_member ? its.is_leaving : its.is_ready && has_room && !its.is_leaving;
  });
}

void Roster::form_if_ready() {
  if (!is_broken_ && !is_agreed_ && !is_change_wanted()) return;
  bool has_ready = false;
  for (const auto& [_, its] : processes_) {
    if (!its.is_member || its.is_done) continue;
    if (!its.is_ready) return;
    has_ready = true;
  }
  if (!has_ready) return;
  const bool are_newcomers_welcome = !has_done();
  std::erase_if(processes_, [](const auto& one) {
    return one.second.is_member && one.second.is_leaving && !one.second.is_done;
  });
  int num_members = 0;
  const auto count = [&](const auto& one) { return one.second.is_member && !one.second.is_done; };
  num_members = static_cast<int>(std::ranges::count_if(processes_, count));
  for (auto& [_, its] : processes_) {
    const bool has_room = num_logical_ == 0 || num_members < num_logical_;
    if (its.is_member || !its.is_ready || its.is_leaving || !has_room || !are_newcomers_welcome) {
      continue;
    }
    its.is_member = its.has_entered = true;
    ++num_members;
  }
  ++generation_;
  is_broken_ = is_agreed_ = is_restored_ = false;
  int rank = 0;
  for (auto& [_, its] : processes_) {
    if (!its.is_member || its.is_done) {
      its.rank = -1;
      continue;
    }
    its.is_ready = its.is_finishing = false;
    its.rank = rank++;
  }
}

std::vector<Roster::Seat> Roster::members() const {
  std::vector<Seat> all;
  for (const auto& [seat, its] : processes_) {
    if (its.rank >= 0) all.push_back(seat);
  }
  return all;
}

int Roster::num_members() const {
  return static_cast<int>(std::ranges::count_if(processes_, [](const auto& one) {
    return one.second.is_member && !one.second.is_leaving && !one.second.is_done;
  }));
}

bool Roster::has_done() const {
  return std::ranges::any_of(processes_, [](const auto& one) { return one.second.is_done; });
}

bool Roster::is_done() const {
  return has_done() && std::ranges::none_of(processes_, [](const auto& one) {
           return one.second.is_member && !one.second.is_done;
         });
}

std::vector<Roster::Seat> Roster::newcomers() const {
  std::vector<Seat> all;
  for (const auto& [seat, its] : processes_) {
    if (!its.is_member) all.push_back(seat);
  }
  return all;
}

bool Roster::is_leaving(Seat seat) const {
  const auto found = processes_.find(seat);
  return found != processes_.end() && found->second.is_leaving;
}

int Roster::rank_of(Seat seat) const {
  const auto found = processes_.find(seat);
  return found == processes_.end() ? -1 : found->second.rank;
}

}  // namespace lockstep
