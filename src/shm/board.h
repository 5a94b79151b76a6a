// Board: where ranks publish what they wait for, so that ranks which wait for each other in
// different operations find out at once.
//
// A world and each of its duplicates (one for every wrapped model) has an engine of its own, and an
// engine sees only its own operations. If rank 0 waits in one and rank 1 in another, both would
// wait until the timeout. All engines of a joined world share its board; an engine is a *channel*
// there, and its operations are numbered, the same on all ranks. The channel of a part of the world
// (World::split) is there on the part's ranks only.
//
// Words. A *caller* is a thread that has joined the world or has ever started an operation, until
// it ends. A rank
// is *stuck* while each of its callers is in a wait that has lasted for BoardOptions::patience and
// ends only with its operation (a point-to-point wait and one with a time limit of its own do not
// count: the caller may go on, or any thread send).
// A stuck rank publishes its *state*: its waits (channel, number) and how many operations of each
// channel it has started. Each state has a generation. It is withdrawn before a caller leaves its
// wait, and before a new caller starts its first operation. Until a wait has lasted that long,
// nothing is done but counting.
//
// Rank 0 decides. It looks at the states of all ranks, and if all are stuck, and each wait is for
// an operation that some rank has not started, it looks again. If it finds the same generations,
// that is the verdict, which it publishes. A rank whose generation is in the verdict ends its
// waits with MismatchError.
//
// No false alarm. Each state was valid when rank 0 read it first and when it read it again, and so
// all the time between: there was a moment at which all states were valid. In that moment no caller
// of any rank could start anything before its wait ended, and no wait could end before another rank
// started something. So only a thread that had never called lockstep can have helped. Nor does that
// happen where the thread M that has joined waits for the same operations in the same order on all
// ranks, whatever the other threads do: if M of rank p waits for X, and rank q has not started X,
// then M of rank q has neither passed its wait for X nor reached it, as X would be started there;
// so it is in an earlier wait. That one, too, is for an operation that some rank has not started,
// and so on: each wait is earlier than the one before, and the program has a first one. Where M has
// ended, nothing is published any more.
// An operation that all ranks have started is never missing, so what is slow is not an alarm.
//
// How states reach rank 0, and the verdict the others: on the host of rank 0 by a page of memory
// of each rank (a seqlock); from other hosts by the store (courier.h).
// Threading: any thread may call. Locks: an engine's, then the board's, then the courier's.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "collective/operation.h"
#include "shm/courier.h"
#include "shm/segment.h"

namespace lockstep::shm {

using collective::Activity;

// A text in shared memory that one process writes and others read.
template <std::size_t kBytes>
class SharedText {
 public:
  // One thread at a time. The text has at most kBytes.
  void write(std::string_view text);
  // Nothing while it is being written.
  std::optional<std::string> read() const;

 private:
  std::atomic<std::uint64_t> version_{0};  // odd: being written
  std::atomic<std::uint64_t> size_{0};
  std::array<std::atomic<std::uint64_t>, kBytes / 8> words_{};
};

// What a rank publishes in memory.
constexpr std::size_t kMostStateBytes = 8 << 10;
constexpr std::size_t kMostVerdictBytes = 32 << 10;
struct BoardPage {
  SharedText<kMostStateBytes> state;
  SharedText<kMostVerdictBytes> verdict;  // rank 0's only
};

class Board;

// An engine's part of the board.
class BoardChannel {
 public:
  // `name` is the same on all ranks, and has no spaces; `label` is what errors call it. The calling
  // thread, which joins or duplicates a world, is a caller.
  BoardChannel(std::shared_ptr<Board> board, std::string name, std::string label);
  ~BoardChannel();
  BoardChannel(const BoardChannel&) = delete;
  BoardChannel& operator=(const BoardChannel&) = delete;

  // Counts an operation, before any other rank hears of it, and returns its number. Under the
  // engine's lock. Throws UsageError inside on_rank0.
  std::uint64_t start(const char* operation);

  // Whether another rank of this host is stuck in an operation of another channel that this rank
  // has not started.
  bool are_others_stuck_outside() const;

  const std::shared_ptr<Board>& board() const { return board_; }
  const std::string& name() const { return name_; }
  const std::string& label() const { return label_; }

 private:
  friend class Board;

  // Constant after construction.
  const std::shared_ptr<Board> board_;
  const std::string name_;
  const std::string label_;

  std::atomic<std::uint64_t> num_started_{0};
  std::thread::id last_caller_;  // guarded by the engine's lock
};

// A wait for an operation. Nothing happens before look() is called after the board's patience.
class BoardWait {
 public:
  // Without a channel, or with number 0, it does nothing.
  BoardWait(BoardChannel* channel, std::uint64_t number) noexcept
      : channel_(number == 0 ? nullptr : channel), number_(number) {}
  ~BoardWait();
  BoardWait(const BoardWait&) = delete;
  BoardWait& operator=(const BoardWait&) = delete;

  // Every 100 ms or so while waiting. Throws MismatchError if the wait would never end.
  void look(std::chrono::nanoseconds waited, const std::function<Activity()>& activity);

 private:
  friend class Board;
  struct Verdict {
    int peer = -1;  // a rank that waits elsewhere
    std::string message;
  };

  BoardChannel* const channel_;
  const std::uint64_t number_;
  bool is_on_board_ = false;  // the thread's own

  // Guarded by the board.
  std::thread::id thread_ = {};
  Activity activity_ = {};
  std::optional<Verdict> verdict_ = {};
};

struct BoardOptions {
  int rank = 0;
  // By rank: where its page is; nothing for ranks of other hosts.
  std::vector<std::optional<SegmentName>> pages = {};
  // Through which hosts are told; not used on one host.
  CourierStore store = {};
  std::chrono::milliseconds patience = std::chrono::milliseconds(300);
  // What is published is seen by other cores after a moment: the second look comes later.
  std::chrono::milliseconds between_looks = std::chrono::milliseconds(20);
};

class Board : public std::enable_shared_from_this<Board> {
 public:
  // The memory of a rank's page, to be named to the others.
  static Segment make_page();

  Board(Segment page, BoardOptions options);
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

 private:
  friend class BoardChannel;
  friend class BoardWait;
  friend struct EndOfThread;

  // States by rank, that a verdict is made of.
  struct Proposal {
    std::vector<std::string> states;
    std::string verdict;
    std::chrono::steady_clock::time_point made = {};
    bool is_final = false;
  };

  bool are_others_stuck_outside(const std::string& channel);
  void add(BoardChannel& channel);
  void remove(BoardChannel& channel) noexcept;
  void add_caller(std::thread::id thread);
  void remove_caller(std::thread::id thread) noexcept;
  void look(BoardWait& wait, const std::function<Activity()>& activity);
  void remove(BoardWait& wait) noexcept;

  void publish() LOCKSTEP_REQUIRES(mutex_);
  std::string state() const LOCKSTEP_REQUIRES(mutex_);
  std::vector<std::string> read_states() LOCKSTEP_REQUIRES(mutex_);
  BoardPage* page_of(int rank) LOCKSTEP_REQUIRES(mutex_);
  void decide() LOCKSTEP_REQUIRES(mutex_);
  void receive_verdict() LOCKSTEP_REQUIRES(mutex_);
  void apply(const std::string& verdict) LOCKSTEP_REQUIRES(mutex_);

  // Constant after construction.
  const BoardOptions options_;
  const Segment memory_;
  BoardPage& page_;
  const std::thread::id first_caller_ = std::this_thread::get_id();  // it joined the world
  const std::unique_ptr<Courier> courier_;  // where rank 0 and this rank, or others, are apart

  Mutex mutex_;
  bool has_first_caller_ LOCKSTEP_GUARDED_BY(mutex_) = true;
  std::set<std::thread::id> callers_ LOCKSTEP_GUARDED_BY(mutex_);
  std::list<BoardChannel*> channels_ LOCKSTEP_GUARDED_BY(mutex_);
  std::list<BoardWait*> waits_ LOCKSTEP_GUARDED_BY(mutex_);
  std::uint64_t generation_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::string state_ LOCKSTEP_GUARDED_BY(mutex_);  // as published; empty: not stuck
  // The pages of others, attached when they are first looked at.
  std::vector<std::optional<Segment>> attached_ LOCKSTEP_GUARDED_BY(mutex_);
  std::optional<Proposal> proposal_ LOCKSTEP_GUARDED_BY(mutex_);  // rank 0's
};

// What rank 0 says of the states of all ranks: for each rank its generation and the number of what
// it waits in, then the text; nothing if a wait may still end.
std::optional<std::string> judge(const std::vector<std::string>& states);

// While f of on_rank0 runs, operations on the board's channels by this thread are refused: the
// others wait for f. Returns the board for which it was so before; nullptr: none.
const Board* set_on_rank0(const Board* board) noexcept;
// Throws UsageError while this thread runs the function of on_rank0 of a world of this board.
void refuse_on_rank0(const Board* board, int rank, const char* operation);

}  // namespace lockstep::shm
