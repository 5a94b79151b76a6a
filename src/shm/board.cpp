#include "shm/board.h"

#include <lockstep/error.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <sstream>
#include <utility>

#include "base/text.h"

namespace lockstep::shm {
namespace {

// How long rank 0 waits until other hosts have heard of the verdict, since its end may be the end
// of the store.
constexpr auto kUntilHeard = std::chrono::seconds(1);
constexpr std::size_t kMostWaitsShown = 6;

thread_local const Board* board_on_rank0 = nullptr;

// A state as a text: its generation, and a line for each channel and each wait.
struct ReadState {
  struct Awaited {
    std::string channel;
    std::uint64_t number = 0;
  };
  std::map<std::string, std::uint64_t> started;
  std::vector<Awaited> waits;
  std::string text;  // what it waits in
};

ReadState read_state(const std::string& text) {
  ReadState state;
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);  // the generation
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    std::string kind;
    std::string channel;
    std::uint64_t number = 0;
    fields >> kind >> channel >> number;
    if (kind == "started") {
      state.started[channel] = number;
      continue;
    }
    state.waits.push_back({channel, number});
    std::string what;
    std::getline(fields >> std::ws, what);
    state.text += (state.text.empty() ? "" : " and ") + what;
  }
  return state;
}

// "rank 0 in all_reduce of ...; ranks 1, 2 in ..."
std::string show(const std::vector<std::string>& texts, const std::vector<std::size_t>& place_of) {
  std::string shown;
  for (std::size_t place = 0; place < std::min(texts.size(), kMostWaitsShown); ++place) {
    std::vector<std::size_t> ranks;
    for (std::size_t rank = 0; rank < place_of.size(); ++rank) {
      if (place_of[rank] == place) ranks.push_back(rank);
    }
    shown +=
        text::format("{}{} {} in {}", shown.empty() ? "" : "; ",
                     ranks.size() == 1 ? "rank" : "ranks", text::join(ranks, ", "), texts[place]);
  }
  if (texts.size() > kMostWaitsShown) {
    shown += text::format("; others in {} more", texts.size() - kMostWaitsShown);
  }
  return shown;
}

}  // namespace

template <std::size_t kBytes>
void SharedText<kBytes>::write(std::string_view text) {
  const std::uint64_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, std::memory_order_relaxed);
  // Whoever sees one of these sees the odd version, too.
  size_.store(text.size(), std::memory_order_release);
  for (std::size_t at = 0; at < text.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    words_[at / sizeof word].store(word, std::memory_order_release);
  }
  version_.store(version + 2, std::memory_order_release);
}

template <std::size_t kBytes>
std::optional<std::string> SharedText<kBytes>::read() const {
  const std::uint64_t version = version_.load(std::memory_order_acquire);
  if (version % 2 != 0) return std::nullopt;
  std::string text(std::min<std::uint64_t>(size_.load(std::memory_order_acquire), kBytes), '\0');
  for (std::size_t at = 0; at < text.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = words_[at / sizeof word].load(std::memory_order_acquire);
    std::memcpy(text.data() + at, &word, std::min(sizeof word, text.size() - at));
  }
  if (version_.load(std::memory_order_relaxed) != version) return std::nullopt;
  return text;
}

BoardChannel::BoardChannel(std::shared_ptr<Board> board, std::string name, std::string label)
    : board_(std::move(board)), name_(std::move(name)), label_(std::move(label)) {
  board_->add(*this);
  board_->add_caller(std::this_thread::get_id());
}

BoardChannel::~BoardChannel() { board_->remove(*this); }

std::uint64_t BoardChannel::start(const char* operation) {
  refuse_on_rank0(board_.get(), board_->options_.rank, operation);
  const std::thread::id caller = std::this_thread::get_id();
  if (caller != last_caller_) {
    board_->add_caller(caller);
    last_caller_ = caller;
  }
  // Only the engine's lock lets a thread in here; others just read it.
  const std::uint64_t number = num_started_.load(std::memory_order_relaxed) + 1;
  num_started_.store(number, std::memory_order_relaxed);
  return number;
}

bool BoardChannel::are_others_stuck_outside() const {
  return board_->are_others_stuck_outside(name_);
}

BoardWait::~BoardWait() {
  if (is_on_board_) channel_->board()->remove(*this);
}

void BoardWait::look(std::chrono::nanoseconds waited, const std::function<Activity()>& activity) {
  if (channel_ == nullptr || waited < channel_->board()->options_.patience) return;
  channel_->board()->look(*this, activity);
}

const Board* set_on_rank0(const Board* board) noexcept {
  return std::exchange(board_on_rank0, board);
}

void refuse_on_rank0(const Board* board, int rank, const char* operation) {
  if (board == nullptr || board_on_rank0 != board) return;
  throw UsageError(
      {.rank = rank, .operation = operation},
      text::format("{} was called inside on_rank0, whose function runs on rank 0 only, "
                   "while the other ranks wait for it.\nCall it before or after, on all "
                   "ranks.",
                   operation));
}

// A thread that has ended helps nobody any more: it is no caller.
struct EndOfThread {
  std::vector<std::weak_ptr<Board>> boards;
  ~EndOfThread() {
    for (const auto& one : boards) {
      if (const auto board = one.lock()) board->remove_caller(std::this_thread::get_id());
    }
  }
};

Segment Board::make_page() {
  Segment page = Segment::create(sizeof(BoardPage));
  new (page.data()) BoardPage;
  return page;
}

Board::Board(Segment page, BoardOptions options)
    : options_(std::move(options)),
      memory_(std::move(page)),
      page_(*reinterpret_cast<BoardPage*>(memory_.data())),
      courier_([&]() -> std::unique_ptr<Courier> {
        std::vector<int> others;
        for (std::size_t rank = 0; rank < options_.pages.size(); ++rank) {
          if (!options_.pages[rank]) others.push_back(static_cast<int>(rank));
        }
        // Next to rank 0, its memory is enough.
        if (others.empty() || (options_.rank != 0 && options_.pages[0])) return nullptr;
        return std::make_unique<Courier>(options_.rank, std::move(others), options_.store);
      }()),
      attached_(options_.pages.size()) {}

bool Board::are_others_stuck_outside(const std::string& channel) {
  const MutexLock lock(mutex_);
  for (std::size_t rank = 0; rank < options_.pages.size(); ++rank) {
    if (static_cast<int>(rank) == options_.rank || !options_.pages[rank]) continue;
    const BoardPage* const page = page_of(static_cast<int>(rank));
    if (page == nullptr) continue;
    const ReadState state = read_state(page->state.read().value_or(""));
    for (const ReadState::Awaited& wait : state.waits) {
      const auto mine = std::ranges::find(channels_, wait.channel, &BoardChannel::name_);
      if (wait.channel != channel && mine != channels_.end() &&
          (*mine)->num_started_.load() < wait.number) {
        return true;
      }
    }
  }
  return false;
}

void Board::add(BoardChannel& channel) {
  const MutexLock lock(mutex_);
  channels_.push_back(&channel);
}

void Board::remove(BoardChannel& channel) noexcept {
  const MutexLock lock(mutex_);
  channels_.remove(&channel);
}

void Board::add_caller(std::thread::id thread) {
  thread_local EndOfThread end;
  std::erase_if(end.boards, [](const auto& one) { return one.expired(); });
  const auto is_this = [&](const auto& one) { return one.lock().get() == this; };
  if (std::ranges::none_of(end.boards, is_this)) end.boards.push_back(weak_from_this());
  const MutexLock lock(mutex_);
  if (callers_.insert(thread).second) publish();
}

void Board::remove_caller(std::thread::id thread) noexcept {
  const MutexLock lock(mutex_);
  // That no alarm is false rests on the thread that joined: without it none is raised.
  if (thread == first_caller_) {
    has_first_caller_ = false;
  } else {
    callers_.erase(thread);
  }
  publish();
}

void Board::look(BoardWait& wait, const std::function<Activity()>& activity) {
  const MutexLock lock(mutex_);
  if (!wait.is_on_board_) {
    wait.activity_ = activity();
    wait.thread_ = std::this_thread::get_id();
    waits_.push_back(&wait);
    wait.is_on_board_ = true;
    publish();
  }
  options_.rank == 0 ? decide() : receive_verdict();
  if (!wait.verdict_) return;
  throw MismatchError(
      {.rank = options_.rank, .peer = wait.verdict_->peer, .operation = wait.activity_.operation},
      wait.verdict_->message);
}

void Board::remove(BoardWait& wait) noexcept {
  const MutexLock lock(mutex_);
  waits_.remove(&wait);
  publish();
}

// What is published follows from the callers and the waits, and has a generation of its own.
void Board::publish() {
  ++generation_;
  std::string next;
  try {
    next = state();
  } catch (const std::bad_alloc&) {  // NOLINT: then the others do not hear that it is stuck
  }
  if (next.empty() && state_.empty()) return;
  state_ = std::move(next);
  page_.state.write(state_);
  if (courier_) courier_->post(state_);
}

// Empty unless this rank is stuck, or if there is no room to say it.
std::string Board::state() const {
  std::set<std::thread::id> waiting;
  for (const BoardWait* wait : waits_) waiting.insert(wait->thread_);
  const bool is_stuck =
      std::includes(waiting.begin(), waiting.end(), callers_.begin(), callers_.end());
  if (!is_stuck || !has_first_caller_) return {};
  std::string text = text::format("{}\n", generation_);
  for (const BoardChannel* channel : channels_) {
    text += text::format("started {} {}\n", channel->name_, channel->num_started_.load());
  }
  for (const BoardWait* wait : waits_) {
    std::string what = text::format("{}, of {}", wait->activity_.text, wait->channel_->label());
    std::ranges::replace(what, '\n', ' ');
    text += text::format("wait {} {} {}\n", wait->channel_->name_, wait->number_, what);
  }
  return text.size() <= kMostStateBytes ? text : std::string();
}

// Nothing if it cannot be had: its process may be gone.
BoardPage* Board::page_of(int rank) {
  const auto index = static_cast<std::size_t>(rank);
  if (!attached_[index]) {
    try {
      attached_[index].emplace(Segment::attach(*options_.pages[index]));
    } catch (const Error&) {
      return nullptr;
    }
  }
  return reinterpret_cast<BoardPage*>(attached_[index]->data());
}

// Of all ranks; none unless all are stuck.
std::vector<std::string> Board::read_states() {
  std::vector<std::string> of_others;
  if (courier_) of_others = courier_->states();
  auto next_other = of_others.begin();
  std::vector<std::string> states;
  for (std::size_t rank = 0; rank < options_.pages.size(); ++rank) {
    std::string state;
    if (static_cast<int>(rank) == options_.rank) {
      state = state_;
    } else if (!options_.pages[rank]) {
      if (next_other != of_others.end()) state = *next_other++;
    } else if (const BoardPage* page = page_of(static_cast<int>(rank))) {
      state = page->state.read().value_or("");
    }
    if (state.empty()) return {};
    states.push_back(std::move(state));
  }
  return states;
}

// Rank 0: looks at all states; the second look that finds the same ones is the verdict.
void Board::decide() {
  const auto now = std::chrono::steady_clock::now();
  if (proposal_ && proposal_->states[0] != state_) proposal_.reset();
  // Those who have heard of a verdict do not wait any more.
  if (!proposal_ || !proposal_->is_final) {
    std::vector<std::string> states = read_states();
    if (!proposal_ || proposal_->states != states) {
      proposal_.reset();
      std::optional<std::string> verdict = judge(states);
      if (!verdict || verdict->size() > kMostVerdictBytes) return;
      if (courier_) courier_->propose(*verdict);
      proposal_ =
          Proposal{.states = std::move(states), .verdict = std::move(*verdict), .made = now};
      return;
    }
    if (now - proposal_->made < options_.between_looks ||
        (courier_ && !courier_->have_all_agreed()))
      return;
    proposal_->is_final = true;
    proposal_->made = now;
    if (courier_) courier_->conclude();
  }
  if (courier_ && !courier_->have_all_heard() && now - proposal_->made < kUntilHeard) return;
  page_.verdict.write(proposal_->verdict);
  apply(proposal_->verdict);
}

void Board::receive_verdict() {
  if (state_.empty()) return;
  if (courier_) return apply(courier_->verdict());
  if (const BoardPage* page = page_of(0)) apply(page->verdict.read().value_or(""));
}

// Ends the waits of this rank, if the verdict is about its present state.
void Board::apply(const std::string& verdict) {
  if (state_.empty() || generation_in(verdict, options_.rank) != generation_) return;
  std::istringstream lines(verdict);
  std::string places;
  std::getline(lines, places);  // the generations
  std::getline(lines, places);
  std::istringstream fields(places);
  std::vector<int> place_of(options_.pages.size());
  for (int& place : place_of) fields >> place;
  const int mine = place_of[static_cast<std::size_t>(options_.rank)];
  const auto other = std::ranges::find_if(place_of, [&](int place) { return place != mine; });
  const int peer = other == place_of.end() ? -1 : static_cast<int>(other - place_of.begin());
  const std::string message((std::istreambuf_iterator<char>(lines)), {});
  for (BoardWait* wait : waits_) {
    wait->verdict_ = BoardWait::Verdict{.peer = peer, .message = message};
  }
}

std::optional<std::string> judge(const std::vector<std::string>& states) {
  if (states.empty()) return std::nullopt;
  std::vector<ReadState> ranks;
  for (const std::string& state : states) ranks.push_back(read_state(state));
  const auto is_missing = [&](const ReadState::Awaited& wait) {
    return std::ranges::any_of(ranks, [&](const ReadState& rank) {
      // A channel is made on all its ranks before any can use it: who has none is not one of them
      // (World::split), or has ended it.
      const auto started = rank.started.find(wait.channel);
      return started != rank.started.end() && started->second < wait.number;
    });
  };
  std::vector<std::string> texts;  // of what ranks wait in
  std::vector<std::size_t> place_of;
  std::vector<std::uint64_t> generations;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!std::ranges::all_of(ranks[rank].waits, is_missing)) return std::nullopt;
    const auto found = std::ranges::find(texts, ranks[rank].text);
    place_of.push_back(static_cast<std::size_t>(found - texts.begin()));
    if (found == texts.end()) texts.push_back(ranks[rank].text);
    generations.push_back(generation_of(states[rank]));
  }
  return text::format(
      "{}\n{}\nThe ranks wait for each other in different calls: {}.\nMake the same calls in the "
      "same order on all ranks.",
      text::join(generations, " "), text::join(place_of, " "), show(texts, place_of));
}

}  // namespace lockstep::shm
