#include "shm/courier.h"

#include <charconv>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/mutex.h"
#include "base/text.h"

namespace lockstep::shm {
namespace {

// How long the end of a world waits for a store that may not answer.
constexpr auto kLastWord = std::chrono::seconds(1);

// The counter's lower bits are how many ranks are stuck, the rest how often one has become it: so
// it is never the same for different states.
constexpr const char* kStuck = "stuck";
constexpr std::int64_t kOnePublication = 1 << 20;

constexpr const char* kProposal = "proposal";    // its number, a line end, the verdict
constexpr const char* kConcluded = "concluded";  // the number of a proposal

std::string key_of(const char* what, std::int64_t number) {
  return text::format("{}/{}", what, number);
}

std::int64_t number_from(std::string_view text) {
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

std::uint64_t generation_of(const std::string& state) {
  return static_cast<std::uint64_t>(number_from(state));
}

std::uint64_t generation_in(const std::string& verdict, int rank) {
  std::istringstream fields(verdict.substr(0, verdict.find('\n')));
  std::uint64_t generation = 0;
  for (int i = 0; i <= rank; ++i) {
    if (!(fields >> generation)) return 0;
  }
  return generation;
}

struct Courier::State {
  State(int its_rank, std::vector<int> its_others, CourierStore its_store)
      : rank(its_rank), others(std::move(its_others)), store(std::move(its_store)) {}

  // What the thread has told and heard so far.
  struct Round {
    std::string told;
    std::int64_t seen = -1;  // of the counter
    std::int64_t num_proposed = 0;
    std::int64_t num_concluded = 0;
    std::int64_t num_agreed = 0;  // the last proposal that this rank has agreed to
    std::int64_t num_heard = 0;
  };

  bool is_idle(const Round& round) const LOCKSTEP_REQUIRES(mutex) {
    return state.empty() && round.told.empty() && num_concluded == round.num_concluded;
  }
  void exchange_as_rank0(Round& round) LOCKSTEP_EXCLUDES(mutex);
  void exchange(Round& round) LOCKSTEP_EXCLUDES(mutex);

  // Constant after construction.
  const int rank;
  const std::vector<int> others;
  const CourierStore store;

  Mutex mutex;
  Condition changed;
  bool has_thread LOCKSTEP_GUARDED_BY(mutex) = false;
  bool is_ending LOCKSTEP_GUARDED_BY(mutex) = false;
  std::string state LOCKSTEP_GUARDED_BY(mutex);
  std::string verdict LOCKSTEP_GUARDED_BY(mutex);  // rank 0: the proposal
  // Rank 0's.
  std::vector<std::string> states LOCKSTEP_GUARDED_BY(mutex);
  std::int64_t num_proposed LOCKSTEP_GUARDED_BY(mutex) = 0;
  std::int64_t num_concluded LOCKSTEP_GUARDED_BY(mutex) = 0;
  bool have_all_agreed LOCKSTEP_GUARDED_BY(mutex) = false;
  bool have_all_heard LOCKSTEP_GUARDED_BY(mutex) = false;
};

Courier::Courier(int rank, std::vector<int> others, CourierStore store)
    : state_(std::make_shared<State>(rank, std::move(others), std::move(store))) {}

Courier::~Courier() {
  const auto deadline = std::chrono::steady_clock::now() + kLastWord;
  const MutexLock lock(state_->mutex);
  state_->is_ending = true;
  state_->changed.notify_all();
  while (state_->has_thread && state_->changed.wait_until(state_->mutex, deadline)) {
  }
}

void Courier::post(const std::string& state) {
  const MutexLock lock(state_->mutex);
  state_->state = state;
  if (state.empty()) state_->states.clear();
  if (!state_->has_thread && !state.empty()) {
    try {
      std::thread(run, state_).detach();  // it ends with the courier, or when the store answers
      state_->has_thread = true;
    } catch (const std::system_error&) {  // NOLINT: without a thread nobody is told
    }
  }
  state_->changed.notify_all();
}

std::vector<std::string> Courier::states() const {
  const MutexLock lock(state_->mutex);
  return state_->states;
}

void Courier::propose(const std::string& verdict) {
  const MutexLock lock(state_->mutex);
  state_->verdict = verdict;
  state_->have_all_agreed = false;
  ++state_->num_proposed;
  state_->changed.notify_all();
}

bool Courier::have_all_agreed() const {
  const MutexLock lock(state_->mutex);
  return state_->have_all_agreed;
}

void Courier::conclude() {
  const MutexLock lock(state_->mutex);
  state_->num_concluded = state_->num_proposed;
  state_->have_all_heard = false;
  state_->changed.notify_all();
}

bool Courier::have_all_heard() const {
  const MutexLock lock(state_->mutex);
  return state_->have_all_heard;
}

std::string Courier::verdict() const {
  const MutexLock lock(state_->mutex);
  return state_->verdict;
}

void Courier::run(const std::shared_ptr<State>& state) noexcept {
  State::Round round;
  const MutexLock lock(state->mutex);
  while (!state->is_ending) {
    if (state->is_idle(round)) {
      state->changed.wait(state->mutex);
      continue;
    }
    {
      const MutexUnlock unlock(state->mutex);
      try {
        state->rank == 0 ? state->exchange_as_rank0(round) : state->exchange(round);
      } catch (...) {  // NOLINT: the store is gone; the waits have their deadlines
      }
    }
    if (!state->is_ending) state->changed.wait_for(state->mutex, state->store.period);
  }
  state->has_thread = false;
  state->changed.notify_all();
}

void Courier::State::exchange_as_rank0(Round& round) {
  std::string proposal;
  bool has_states = false;
  Round next = round;
  {
    const MutexLock lock(mutex);
    next.told = state;
    next.num_proposed = num_proposed;
    next.num_concluded = num_concluded;
    proposal = verdict;
    has_states = !states.empty();
  }
  const auto num_others = static_cast<std::int64_t>(others.size());
  if (next.num_proposed != round.num_proposed) {
    store.set(kProposal, text::format("{}\n{}", next.num_proposed, proposal));
  }
  if (next.num_concluded != round.num_concluded) {
    store.set(kConcluded, std::to_string(next.num_concluded));
  }
  const auto all_have = [&](const char* what, std::int64_t number) {
    return number != 0 && store.add(key_of(what, number), 0) == num_others;
  };
  const bool agreed = all_have("agreed", next.num_proposed);
  const bool heard = all_have("heard", next.num_concluded);
  next.seen = next.told.empty() ? -1 : store.add(kStuck, 0);
  const bool are_all_stuck = next.seen >= 0 && next.seen % kOnePublication == num_others;
  std::vector<std::string> read;
  const bool must_read = are_all_stuck && (!has_states || next.seen != round.seen);
  if (must_read) {
    for (const int other : others) read.push_back(store.get(key_of("state", other)));
  }
  round = next;
  const MutexLock lock(mutex);
  if (num_proposed == next.num_proposed) have_all_agreed = agreed;
  if (num_concluded == next.num_concluded) have_all_heard = heard;
  if (state != next.told || !are_all_stuck) {
    states.clear();
  } else if (must_read) {
    states = std::move(read);
  }
}

void Courier::State::exchange(Round& round) {
  std::string mine;
  {
    const MutexLock lock(mutex);
    mine = state;
  }
  if (mine != round.told) {
    const bool was_stuck = !round.told.empty();
    round.told = mine;
    if (was_stuck) store.add(kStuck, -1);
    if (!mine.empty()) {
      store.set(key_of("state", rank), mine);
      store.add(kStuck, kOnePublication + 1);
    }
  }
  if (mine.empty()) return;
  const std::string proposal = store.get(kProposal);
  const std::int64_t number = number_from(proposal);
  if (number == 0) return;
  const std::string proposed = proposal.substr(proposal.find('\n') + 1);
  const std::uint64_t generation = generation_in(proposed, rank);
  if (number > round.num_agreed) {
    {
      // Now, not when it was told: this is what agreeing means.
      const MutexLock lock(mutex);
      if (state.empty() || generation_of(state) != generation) return;
    }
    round.num_agreed = number;
    store.add(key_of("agreed", number), 1);
  }
  if (number > round.num_heard && number_from(store.get(kConcluded)) == number) {
    round.num_heard = number;
    {
      const MutexLock lock(mutex);
      verdict = proposed;
    }
    store.add(key_of("heard", number), 1);
  }
}

}  // namespace lockstep::shm
