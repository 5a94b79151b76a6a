#include "launch/election.h"

#include <lockstep/error.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "base/json.h"
#include "base/mutex.h"
#include "base/printable.h"
#include "base/text.h"
#include "launch/etcd.h"

namespace lockstep {
namespace {

using Clock = EventLoop::Clock;
using std::chrono::milliseconds;

// A third of the lease, so that it survives a keep-alive that gets no answer, and the next one.
constexpr int kKeepAlivesPerLease = 3;
constexpr milliseconds kLongestCall{2000};
constexpr milliseconds kShortestPause{250};

// What the leader is sure of: clocks differ by less than a tenth, and it takes a moment to stop.
milliseconds sure_part(milliseconds ttl) { return ttl - ttl / 10; }

std::string make_candidate_id() {
  std::random_device random;
  return text::format("{:08x}{:08x}", random(), random());
}

}  // namespace

// What one turn has found out.
struct Election::Finding {
  std::optional<ElectedLeader> leader = {};  // nothing: nobody leads now
  Clock::time_point asked = {};              // when the lease, if it is ours, was asked for
  std::string problem = {};                  // etcd did not answer; nothing else is known
};

// What the threads share with the election. A turn, one at a time, looks at the key and does what
// is needed: campaign if nobody leads, keep the lease alive if this launcher does. After the end of
// the candidacy the lease is revoked by the turn under way or, without one, by a thread for it.
struct Election::Candidacy {
  Candidacy(const std::string& url, const std::string& job_id, ElectedLeader self_,
            std::chrono::seconds ttl_, std::shared_ptr<Mailbox> mailbox_)
      : etcd(url, std::min<milliseconds>(kLongestCall, milliseconds(ttl_) / kKeepAlivesPerLease)),
        key(text::format("/lockstep/{}/coordinator", job_id)),
        self(std::move(self_)),
        ttl(ttl_),
        mailbox(std::move(mailbox_)) {}

  Finding follow() const;
  Finding lead() const;
  std::optional<ElectedLeader> leader_of(const Etcd::Entry& entry) const;
  bool is_ours(const Etcd::Entry& entry) const;

  Finding take_turn(bool is_leading) noexcept;
  void give_back(std::int64_t old_lease, const std::function<void()>& done) const noexcept;

  const Etcd etcd;
  const std::string key;
  const std::string id = make_candidate_id();
  const ElectedLeader self;
  const std::chrono::seconds ttl;
  const std::shared_ptr<Mailbox> mailbox;

  mutable Mutex mutex;
  mutable std::int64_t lease LOCKSTEP_GUARDED_BY(mutex) = 0;  // the newest one
  bool is_in_turn LOCKSTEP_GUARDED_BY(mutex) = false;
  bool is_over LOCKSTEP_GUARDED_BY(mutex) = false;
  std::function<void()> resigned LOCKSTEP_GUARDED_BY(mutex);
};

bool Election::Candidacy::is_ours(const Etcd::Entry& entry) const {
  const Json value = Json::parse(entry.value, nullptr, false);
  return value.is_object() && value.value("candidate", Json()) == id;
}

std::optional<ElectedLeader> Election::Candidacy::leader_of(const Etcd::Entry& entry) const try {
  const Json value = Json::parse(entry.value);
  return ElectedLeader{.address = value.at("address"),
                       .port = value.at("port"),
                       .host = value.at("host"),
                       .term = entry.create_revision};
} catch (const Json::exception&) {
  throw UsageError(
      {.operation = "launch"},
      text::format("The key {} in etcd was not written by lockstep.\nDelete it: etcdctl "
                   "del {}",
                   printable(key), printable(key)));
}

Election::Finding Election::Candidacy::follow() const {
  if (const auto entry = etcd.get(key)) {
    if (!is_ours(*entry)) return {.leader = leader_of(*entry)};
    // Won by a campaign whose answer was lost, or in a term that we have given up: whoever leads
    // must know it from the start of the term.
    etcd.revoke(entry->lease);
  }
  const Clock::time_point asked = Clock::now();
  const std::int64_t granted = etcd.grant_lease(ttl);
  {
    const MutexLock lock(mutex);
    lease = granted;
  }
  const Json value = {
      {"address", self.address}, {"port", self.port}, {"host", self.host}, {"candidate", id}};
  const Etcd::Entry entry = etcd.put_if_absent(key, value.dump(), granted);
  // By the lease, not by whether the put succeeded: it may have run twice.
  if (entry.lease == granted) {
    ElectedLeader leader = self;
    leader.term = entry.create_revision;
    leader.is_self = true;
    return {.leader = leader, .asked = asked};
  }
  if (is_ours(entry)) return {};  // as above; the next turn sees to it
  return {.leader = leader_of(entry)};
}

Election::Finding Election::Candidacy::lead() const {
  std::int64_t held = 0;
  {
    const MutexLock lock(mutex);
    held = lease;
  }
  const Clock::time_point asked = Clock::now();
  const std::chrono::seconds left = etcd.keep_alive(held);
  const auto entry = etcd.get(key);  // somebody may have deleted it by hand
  if (left >= ttl && entry && entry->lease == held) {
    ElectedLeader leader = self;
    leader.term = entry->create_revision;
    leader.is_self = true;
    return {.leader = leader, .asked = asked};
  }
  if (entry && !is_ours(*entry)) return {.leader = leader_of(*entry)};
  return {};
}

Election::Finding Election::Candidacy::take_turn(bool is_leading) noexcept {
  Finding finding;
  try {
    finding = is_leading ? lead() : follow();
  } catch (const Error& error) {
    finding.problem = error.message();
  } catch (const std::exception& error) {
    finding.problem =
        text::format("etcd's answer cannot be used: {}.\nCheck that it is etcd 3.4 or newer.",
                     printable(error.what()));
  }
  std::int64_t old_lease = 0;
  std::function<void()> done;
  {
    const MutexLock lock(mutex);
    is_in_turn = false;
    if (!is_over) return finding;
    old_lease = lease;
    done = std::move(resigned);
  }
  give_back(old_lease, done);
  return finding;
}

void Election::Candidacy::give_back(std::int64_t old_lease,
                                    const std::function<void()>& done) const noexcept {
  try {
    if (old_lease != 0) etcd.revoke(old_lease);
  } catch (const std::exception&) {
    // It ends by itself.
  }
  if (done) mailbox->post(done);
}

Election::Election(EventLoop& loop, const std::string& url, const std::string& job_id,
                   ElectedLeader self, std::chrono::seconds ttl, Callbacks callbacks)
    : loop_(loop),
      callbacks_(std::move(callbacks)),
      ttl_(ttl),
      pause_(std::max(kShortestPause, ttl_ / 4)),
      candidacy_(std::make_shared<Candidacy>(url, job_id, std::move(self), ttl, loop.mailbox())) {
  if (job_id.empty()) {
    throw UsageError(
        {.operation = "launch"},
        "An election needs the job's id, which keeps jobs apart in etcd.\nGive --job-id, "
        "the same on all hosts.");
  }
  if (ttl < std::chrono::seconds(1)) {
    throw UsageError({.operation = "launch"},
                     text::format("Invalid lease of {} s: give at least 1 s.", ttl.count()));
  }
  schedule(milliseconds(0));
}

Election::~Election() { resign(); }

void Election::resign(std::function<void()> done) {
  if (std::exchange(is_resigned_, true)) return;
  is_leading_ = false;
  cancel_timers();
  std::int64_t lease = 0;
  {
    const MutexLock lock(candidacy_->mutex);
    candidacy_->is_over = true;
    if (candidacy_->is_in_turn) {
      candidacy_->resigned = std::move(done);
      return;
    }
    lease = candidacy_->lease;
  }
  if (lease == 0) {
    if (done) loop_.mailbox()->post(std::move(done));
    return;
  }
  try {
    start_thread([candidacy = candidacy_, lease, done] { candidacy->give_back(lease, done); });
  } catch (const Error&) {  // no thread: the lease ends by itself
    if (done) loop_.mailbox()->post(std::move(done));
  }
}

void Election::cancel_timers() {
  if (next_turn_) loop_.cancel(*next_turn_);
  if (end_of_lease_) loop_.cancel(*end_of_lease_);
  next_turn_.reset();
  end_of_lease_.reset();
}

void Election::schedule(milliseconds delay) {
  next_turn_ = loop_.after(std::max(delay, milliseconds(0)), [this] {
    next_turn_.reset();
    take_turn();
  });
}

void Election::take_turn() {
  const auto set_in_turn = [this](bool is_in_turn) {
    const MutexLock lock(candidacy_->mutex);
    candidacy_->is_in_turn = is_in_turn;
  };
  const bool was_leading = is_leading_;
  const auto finding = std::make_shared<Finding>();
  set_in_turn(true);
  try {
    loop_.run_aside([candidacy = candidacy_, finding,
                     was_leading] { *finding = candidacy->take_turn(was_leading); },
                    [this, alive = std::weak_ptr(alive_), finding, was_leading] {
                      if (!alive.expired() && !is_resigned_) take(*finding, was_leading);
                    });
  } catch (const Error& error) {
    set_in_turn(false);
    report_problem(error.message());
  }
}

void Election::take(const Finding& finding, bool was_leading) {
  if (was_leading && !is_leading_) {  // too late: the lease has been given up meanwhile
    schedule(milliseconds(0));
    return;
  }
  if (!finding.problem.empty()) {
    report_problem(finding.problem);
    return;
  }
  is_outage_ = false;
  last_problem_.clear();
  const auto& leader = finding.leader;
  const Clock::time_point now = Clock::now();
  const Clock::time_point end = finding.asked + sure_part(ttl_);
  const std::weak_ptr alive = alive_;
  if (leader && leader->is_self && now < end) {
    hold_until(end);
    schedule(
        std::chrono::duration_cast<milliseconds>(finding.asked + ttl_ / kKeepAlivesPerLease - now));
  } else {
    schedule(pause_);
    if (is_leading_) {
      lose(leader && leader->is_self
               ? "etcd took too long to confirm it. Check whether this host or etcd is overloaded."
               : "etcd has ended it. Check whether this host was suspended, and whether somebody "
                 "deletes lockstep's keys in etcd.");
    }
    if (alive.expired() || is_resigned_ || (leader && leader->is_self)) return;
  }
  if (!leader || leader->term == told_term_) return;
  told_term_ = leader->term;
  const auto tell = callbacks_.elected;  // lives on if the callback destroys this
  const ElectedLeader copy = *leader;
  tell(copy);
}

void Election::hold_until(Clock::time_point end) {
  is_leading_ = true;
  held_until_ = end;
  if (end_of_lease_) loop_.cancel(*end_of_lease_);
  // Rounded down: rather early than late.
  const auto left = std::chrono::floor<milliseconds>(end - Clock::now());
  end_of_lease_ = loop_.after(std::max(left, milliseconds(0)), [this] {
    lose(text::format("etcd has not confirmed it for {:.1f} s. {}",
                      std::chrono::duration<double>(sure_part(ttl_)).count(),
                      last_problem_.empty()
                          ? "Check that etcd runs and that this host can reach it."
                          : last_problem_));
  });
}

void Election::lose(const std::string& why) {
  is_leading_ = false;
  told_term_ = 0;
  if (end_of_lease_) loop_.cancel(*end_of_lease_);
  end_of_lease_.reset();
  const auto tell = callbacks_.lost;
  const std::string reason =
      text::format("This launcher can no longer be sure of its lease on {}: {}",
                   printable(candidacy_->key), why);
  tell(reason);
}

void Election::report_problem(const std::string& problem) {
  schedule(pause_);
  last_problem_ = problem;
  if (std::exchange(is_outage_, true)) return;
  const auto tell = callbacks_.unreachable;
  const std::string reason = problem;
  tell(reason);
}

}  // namespace lockstep
