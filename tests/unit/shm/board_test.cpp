// The board, with ranks as threads (also under TSan): what never ends is found on all ranks, and
// nothing else is, however the threads are delayed.

#include "shm/board.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <array>
#include <atomic>
#include <barrier>
#include <functional>
#include <latch>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "base/text.h"
#include "shm/group.h"
#include "support/run_ranks.h"
#include "unit/shm/thread_ranks.h"

namespace lockstep::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kChannels = 4;

// A store that answers late.
class SlowStore {
 public:
  explicit SlowStore(microseconds delay) : delay_(delay) {}

  CourierStore for_rank() {
    return {.period = milliseconds(1),
            .set =
                [this](const std::string& key, const std::string& value) {
                  dawdle();
                  const std::lock_guard lock(mutex_);
                  values_[key] = value;
                },
            .get =
                [this](const std::string& key) {
                  dawdle();
                  const std::lock_guard lock(mutex_);
                  return values_[key];
                },
            .add =
                [this](const std::string& key, std::int64_t value) {
                  dawdle();
                  const std::lock_guard lock(mutex_);
                  return counters_[key] += value;
                }};
  }

 private:
  void dawdle() const {
    thread_local std::minstd_rand random(std::random_device{}());
    if (delay_.count() > 0) std::this_thread::sleep_for(microseconds(random() % delay_.count()));
  }

  const microseconds delay_;
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::int64_t> counters_;
};

// What ranks have started on each channel: an operation is done when all have.
using Started = std::vector<std::array<std::atomic<std::uint64_t>, kChannels>>;

class Rank {
 public:
  Rank(int rank, Started& started, Segment page, const BoardOptions& options)
      : rank_(rank), started_(started), board_(std::make_shared<Board>(std::move(page), options)) {
    for (int i = 0; i < kChannels; ++i) {
      channels_.push_back(std::make_unique<BoardChannel>(board_, std::string(1, 'A' + i),
                                                         std::string("channel ") + char('A' + i)));
    }
  }

  std::uint64_t start(int channel) {
    const std::lock_guard lock(mutexes_[static_cast<std::size_t>(channel)]);
    const std::uint64_t number = channels_[static_cast<std::size_t>(channel)]->start("all_reduce");
    mine(channel) = number;
    return number;
  }

  void wait(int channel, std::uint64_t number) {
    BoardWait wait(channels_[static_cast<std::size_t>(channel)].get(), number);
    const auto start = Clock::now();
    while (!is_done(channel, number)) {
      wait.look(Clock::now() - start, [&] {
        return Activity{"all_reduce", "all_reduce " + std::to_string(number)};
      });
      if (Clock::now() - start > std::chrono::seconds(30)) throw std::runtime_error("no end");
      std::this_thread::sleep_for(microseconds(50));
    }
  }

  bool are_others_stuck_outside(int channel) const {
    return channels_[static_cast<std::size_t>(channel)]->are_others_stuck_outside();
  }
  void call(int channel) { wait(channel, start(channel)); }
  int rank() const { return rank_; }
  const Board* board() const { return board_.get(); }

 private:
  std::atomic<std::uint64_t>& mine(int channel) {
    return started_[static_cast<std::size_t>(rank_)][static_cast<std::size_t>(channel)];
  }
  bool is_done(int channel, std::uint64_t number) const {
    return std::ranges::all_of(started_, [&](const auto& rank) {
      return rank[static_cast<std::size_t>(channel)] >= number;
    });
  }

  const int rank_;
  Started& started_;
  std::shared_ptr<Board> board_;
  std::vector<std::unique_ptr<BoardChannel>> channels_;
  std::array<std::mutex, kChannels> mutexes_;  // as engines have
};

// `hosts`: a letter for each rank.
void run_on_board(const std::string& hosts, milliseconds patience, microseconds store_delay,
                  const std::function<void(Rank&)>& body, bool joins_in_another_thread = false) {
  const std::size_t size = hosts.size();
  SlowStore store(store_delay);
  Started started(size);
  std::vector<Segment> pages;
  std::vector<SegmentName> names;
  for (std::size_t rank = 0; rank < size; ++rank) {
    pages.push_back(Board::make_page());
    names.push_back(pages.back().name());
  }
  std::vector<std::unique_ptr<Rank>> ranks(size);  // all end together: threads share one mapping
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        BoardOptions options{.rank = static_cast<int>(rank),
                             .store = store.for_rank(),
                             .patience = patience,
                             .between_looks = milliseconds(1)};
        for (std::size_t peer = 0; peer < size; ++peer) {
          auto& page = options.pages.emplace_back();
          if (hosts[peer] == hosts[rank]) page = names[peer];
        }
        const auto join = [&] {
          ranks[rank] = std::make_unique<Rank>(static_cast<int>(rank), started,
                                               std::move(pages[rank]), options);
        };
        joins_in_another_thread ? std::thread(join).join() : join();
        body(*ranks[rank]);
      });
    }
  }
}

// Throws MismatchError, in the words that it must have.
void expect_mismatch(const std::function<void()>& call, const std::string& words) {
  const auto start = Clock::now();
  try {
    call();
    ADD_FAILURE() << "it ended";
  } catch (const MismatchError& error) {
    EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    EXPECT_GE(error.peer(), 0);
    EXPECT_NE(error.peer(), error.rank());
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
}

TEST(Board, TwoRanksInDifferentChannels) {
  for (const std::string hosts : {"aa", "ab"}) {
    run_on_board(hosts, milliseconds(20), microseconds(0), [](Rank& rank) {
      rank.call(2);
      expect_mismatch([&] { rank.call(rank.rank()); },
                      "rank 0 in all_reduce 1, of channel A; rank 1 in all_reduce 1, of channel B");
    });
  }
}

// Rank 1 waits in channel 1; rank 0 sees it from any other channel, and helps.
TEST(Board, ARankThatIsStuckIsSeenFromOtherChannels) {
  run_on_board("aa", milliseconds(20), microseconds(0), [](Rank& rank) {
    if (rank.rank() == 0) {
      EXPECT_FALSE(rank.are_others_stuck_outside(1));
      while (!rank.are_others_stuck_outside(0)) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_FALSE(rank.are_others_stuck_outside(1));
    }
    rank.call(1);
    EXPECT_FALSE(rank.are_others_stuck_outside(2));  // nobody starts anything else
    rank.call(2);
  });
}

TEST(Board, AThreadThatHasEndedIsNotWaitedFor) {
  run_on_board("aa", milliseconds(20), microseconds(0), [](Rank& rank) {
    std::thread([&] { rank.call(2); }).join();
    expect_mismatch([&] { rank.call(rank.rank()); },
                    "rank 0 in all_reduce 1, of channel A; rank 1 in all_reduce 1, of channel B");
  });
}

// A rank may have no caller for a while, between threads that come one after the other.
TEST(Board, WithoutTheThreadThatJoinedNothingIsSaid) {
  run_on_board(
      "aa", milliseconds(20), microseconds(0),
      [](Rank& rank) {
        if (rank.rank() == 0) std::this_thread::sleep_for(milliseconds(500));
        std::thread([&] { rank.call(0); }).join();
        if (rank.rank() == 1) std::this_thread::sleep_for(milliseconds(500));
        std::thread([&] { rank.call(1); }).join();
      },
      true);
}

TEST(Board, RanksThatWaitForTheSameAreNamedTogether) {
  for (const std::string hosts : {"aaaa", "aabb", "abcb", "abbb"}) {
    run_on_board(hosts, milliseconds(20), microseconds(100), [](Rank& rank) {
      rank.call(2);
      expect_mismatch([&] { rank.call(rank.rank() == 2 ? 0 : 1); },
                      "ranks 0, 1, 3 in all_reduce 1, of channel B; rank 2 in all_reduce 1, of "
                      "channel A");
    });
  }
}

// One rank is an operation behind: it has left one out.
TEST(Board, AChannelWithAnOperationLeftOut) {
  run_on_board("aab", milliseconds(20), microseconds(0), [](Rank& rank) {
    rank.call(0);
    if (rank.rank() != 1) rank.start(0);
    expect_mismatch([&] { rank.call(rank.rank() == 1 ? 1 : 0); }, "in all_reduce 3, of channel A");
  });
}

TEST(Board, AllThreadsOfARankAreToldOfTheMismatch) {
  run_on_board("aa", milliseconds(20), microseconds(0), [](Rank& rank) {
    std::latch is_caller(1);
    std::jthread second([&] {
      rank.call(2);
      is_caller.count_down();
      expect_mismatch([&] { rank.call(rank.rank() + 2); }, " and all_reduce");
    });
    is_caller.wait();
    expect_mismatch([&] { rank.call(rank.rank()); }, " and all_reduce");
  });
}

// Rank 1 is late, in one thread; the other waits for what rank 0 calls later.
TEST(Board, AThreadThatIsBusyMayStillCome) {
  for (const std::string hosts : {"aa", "ab"}) {
    run_on_board(hosts, milliseconds(5), microseconds(0), [](Rank& rank) {
      rank.call(0);
      std::jthread second([&] {
        rank.call(1);
        if (rank.rank() == 0) std::this_thread::sleep_for(milliseconds(300));
        rank.call(1);
      });
      rank.call(0);
      if (rank.rank() == 1) std::this_thread::sleep_for(milliseconds(300));
      rank.call(0);
    });
  }
}

TEST(Board, WhatIsStartedIsNotMissing) {
  run_on_board("aa", milliseconds(5), microseconds(0), [](Rank& rank) {
    rank.call(0);
    const int first = rank.rank();
    const std::uint64_t one = rank.start(first);
    const std::uint64_t two = rank.start(1 - first);
    std::this_thread::sleep_for(milliseconds(100 * rank.rank()));
    rank.wait(first, one);
    rank.wait(1 - first, two);
  });
}

TEST(Board, JudgesStates) {
  const auto state = [](int generation, int a, int b, const std::string& wait) {
    return text::format("{}\nstarted A {}\nstarted B {}\nwait {}\n", generation, a, b, wait);
  };
  EXPECT_FALSE(judge({}));
  EXPECT_TRUE(judge({state(3, 2, 1, "A 2 x"), state(4, 1, 2, "B 2 y")}));
  EXPECT_FALSE(judge({state(3, 2, 1, "A 2 x"), state(4, 2, 2, "B 2 y")})) << "A 2 can end";
  EXPECT_FALSE(judge({state(3, 2, 2, "A 2 x"), state(4, 1, 2, "B 2 y")})) << "B 2 can end";
  EXPECT_FALSE(judge({state(3, 2, 1, "A 2 x"), "4\nstarted B 2\nwait B 2 y\n"}))
      << "rank 1 has ended A";
  const std::string verdict = *judge({state(3, 2, 1, "A 2 x"), state(4, 1, 2, "B 2 y")});
  EXPECT_EQ(generation_in(verdict, 0), 3U);
  EXPECT_EQ(generation_in(verdict, 1), 4U);
  EXPECT_EQ(generation_in(verdict, 2), 0U);
  EXPECT_EQ(generation_in("", 0), 0U);
}

TEST(Board, RefusesOperationsInsideOnRank0) {
  run_on_board("aa", milliseconds(300), microseconds(0), [](Rank& rank) {
    const Board* before = set_on_rank0(rank.board());
    EXPECT_EQ(before, nullptr);
    EXPECT_THROW(rank.start(0), UsageError);
    set_on_rank0(before);
    rank.call(0);
  });
}

// A program that is right: what is called, in which order, is drawn once for all ranks; how long it
// takes is not. It has two sequences of calls. Threads start several operations before they wait,
// in different orders on different ranks, and hand channels to each other; and from the second
// phase on, what the first thread of one rank calls, the second thread of another does.
class RightProgram {
 public:
  RightProgram(unsigned seed, bool has_second_thread)
      : seed_(seed), has_second_thread_(has_second_thread) {}

  void run(Rank& rank) const {
    std::barrier<> between(has_second_thread_ ? 2 : 1);
    std::jthread second;
    if (has_second_thread_) second = std::jthread([&] { play(rank, 1, between); });
    play(rank, 0, between);
  }

 private:
  static void dawdle(std::mt19937& random) {
    const unsigned kind = random() % 8;
    if (kind < 3) std::this_thread::sleep_for(microseconds(random() % 8000));
    if (kind == 3) std::this_thread::sleep_for(microseconds(random() % 40000));
  }

  void play(Rank& rank, std::size_t thread, std::barrier<>& between) const try {
    std::mt19937 shared(seed_);  // the same for all threads and ranks
    std::mt19937 delays(seed_ * 7919 + static_cast<unsigned>(rank.rank()) * 2 +
                        static_cast<unsigned>(thread));
    for (int phase = 0; phase < 3; ++phase) {
      const bool are_crossed = has_second_thread_ && phase > 0;
      const std::size_t sequence =
          are_crossed ? (thread + static_cast<std::size_t>(rank.rank())) % 2 : thread;
      // Each sequence has channels of its own, other ones in each phase.
      std::vector<int> all = {0, 1, 2, 3};
      std::shuffle(all.begin(), all.end(), shared);
      const std::array<int, 2> own = {all[2 * sequence], all[2 * sequence + 1]};
      std::mt19937 calls(shared() + static_cast<unsigned>(sequence));
      for (int i = 0; i < 8; ++i) {
        dawdle(delays);
        if (calls() % 3 != 0) {
          rank.call(own[calls() % 2]);
        } else {
          call_both(rank, own, delays);
        }
      }
      between.arrive_and_wait();
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << "seed " << seed_ << ": " << error.what();
    between.arrive_and_drop();
  }

  // Started and waited for in an order of this rank's own.
  static void call_both(Rank& rank, std::array<int, 2> channels, std::mt19937& random) {
    std::shuffle(channels.begin(), channels.end(), random);
    const std::array<std::uint64_t, 2> numbers = {rank.start(channels[0]), rank.start(channels[1])};
    dawdle(random);
    const std::size_t first = random() % 2;
    rank.wait(channels[first], numbers[first]);
    rank.wait(channels[1 - first], numbers[1 - first]);
  }

  const unsigned seed_;
  const bool has_second_thread_;
};

constexpr std::array<const char*, 5> kLayouts = {"aa", "aaa", "ab", "aab", "abc"};

TEST(Board, NoFalseAlarmInProgramsThatAreRight) {
  const int num_programs = test::soak(40, 2000);
  for (int seed = 0; seed < num_programs; ++seed) {
    const RightProgram program(static_cast<unsigned>(seed), seed % 4 != 0);
    run_on_board(kLayouts[static_cast<std::size_t>(seed) % kLayouts.size()], milliseconds(1),
                 microseconds(seed % 3 * 1500), [&](Rank& rank) { program.run(rank); });
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

TEST(Board, AWrongCallAfterARightProgramIsFound) {
  for (int seed = 0; seed < 5; ++seed) {
    const RightProgram program(static_cast<unsigned>(seed), false);
    run_on_board(kLayouts[static_cast<std::size_t>(seed)], milliseconds(1), microseconds(500),
                 [&](Rank& rank) {
                   program.run(rank);
                   expect_mismatch([&] { rank.call(rank.rank() == seed % 2 ? 1 : 2); },
                                   "of channel B");
                 });
  }
}

// Through groups: two channels of two ranks, as engines use them.
TEST(Board, GroupsThatDoNotMeet) {
  std::vector<Segment> pages;
  std::vector<SegmentName> names;
  for (int rank = 0; rank < 2; ++rank) {
    pages.push_back(Board::make_page());
    names.push_back(pages.back().name());
  }
  ThreadExchange exchange(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto board =
          std::make_shared<Board>(std::move(pages[static_cast<std::size_t>(rank)]),
                                  BoardOptions{.rank = rank, .pages = {names[0], names[1]}});
      std::vector<std::unique_ptr<Group>> groups;
      for (const std::string name : {"actor", "critic"}) {
        GroupOptions options{.rank = rank, .size = 2};
        options.channel = std::make_shared<BoardChannel>(board, name, "the model " + name);
        groups.push_back(std::make_unique<Group>(options, exchange.for_rank(rank)));
        groups.back()->wait(*groups.back()->start(Operation{}));
      }
      Group& mine = *groups[static_cast<std::size_t>(rank)];
      const auto start = Clock::now();
      expect_mismatch([&] { mine.wait(*mine.start(Operation{})); },
                      "rank 0 in barrier, of the model actor; rank 1 in barrier, of the model "
                      "critic.\nMake the same calls");
      EXPECT_GT(Clock::now() - start, milliseconds(250)) << "nothing is published before";
      for (const auto& group : groups) group->leave();
      exchange.for_rank(rank)("left");
    });
  }
}

}  // namespace
}  // namespace lockstep::shm
