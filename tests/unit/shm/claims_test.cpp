// Claims, with ranks as threads (also under TSan): every piece has one writer, whoever is late.

#include "shm/claims.h"

#include <gtest/gtest.h>

#include <barrier>
#include <memory>
#include <thread>
#include <vector>

namespace lockstep::shm {
namespace {

// As it is in memory that ranks share: zero at first.
class ClaimsMemory {
 public:
  explicit ClaimsMemory(int num_ranks)
      : num_ranks_(num_ranks), lines_(Claims::bytes_for(num_ranks) / sizeof(Line)) {}
  Claims for_rank(int rank) {
    return Claims(reinterpret_cast<std::byte*>(lines_.data()), rank, num_ranks_);
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64] = {};
  };
  int num_ranks_;
  std::vector<Line> lines_;
};

TEST(Claims, EveryPieceHasOneWriter) {
  constexpr int kRanks = 3;
  constexpr int kThreads = 2;  // of each
  for (const std::size_t num_pieces : {0, 1, 2, 3, 7, 1000}) {
    ClaimsMemory memory(kRanks);
    std::vector<int> writes(num_pieces);  // not atomic: TSan sees two writers
    std::barrier all(kRanks * kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kRanks * kThreads; ++i) {
      threads.emplace_back([&, rank = i / kThreads, lane = i % kThreads] {
        Claims claims = memory.for_rank(rank);
        for (std::uint64_t update = 1; update <= 3; ++update) {  // used again
          if (rank == 0 && lane == 0) claims.begin(update, num_pieces);
          all.arrive_and_wait();
          EXPECT_TRUE(claims.start(update));
          while (const auto piece = claims.next(update, lane)) ++writes.at(*piece);
          all.arrive_and_wait();
          EXPECT_FALSE(claims.is_writing(rank));
          EXPECT_EQ(claims.num_claimed(update), num_pieces);
          all.arrive_and_wait();
        }
      });
    }
    threads.clear();
    for (const int times : writes) EXPECT_EQ(times, 3);
  }
}

TEST(Claims, ARankBeginsWithItsOwnPartAndThenTakesOthers) {
  ClaimsMemory memory(3);
  Claims first = memory.for_rank(0);
  Claims last = memory.for_rank(2);
  first.begin(1, 8);  // 0 1, 2 3 4, 5 6 7
  std::vector<std::size_t> taken;
  EXPECT_EQ(first.next(1, 0), 0U);
  while (const auto piece = last.next(1, 0)) taken.push_back(*piece);
  // Rank 1 never came, and rank 0 is slow.
  EXPECT_EQ(taken, (std::vector<std::size_t>{5, 6, 7, 1, 2, 3, 4}));
  EXPECT_TRUE(first.is_writing(0));
  EXPECT_FALSE(first.is_writing(2));
  EXPECT_EQ(first.next(1, 0), std::nullopt);
  EXPECT_FALSE(first.is_writing(0));
  EXPECT_EQ(memory.for_rank(1).num_claimed(1), 8U);
}

TEST(Claims, ARankThatDiesWhileItWritesLeavesARecord) {
  ClaimsMemory memory(2);
  Claims alive = memory.for_rank(0);
  {
    Claims dead = memory.for_rank(1);
    alive.begin(1, 4);
    EXPECT_EQ(dead.next(1, 5), 2U);
  }
  std::size_t count = 0;
  while (alive.next(1, 0)) ++count;
  EXPECT_EQ(count, 3U);  // not the one that is half written
  EXPECT_TRUE(alive.is_writing(1));
  EXPECT_EQ(alive.num_claimed(1), 4U);
  EXPECT_FALSE(alive.is_torn());
  alive.set_torn();
  EXPECT_TRUE(memory.for_rank(1).is_torn());
}

// A rank that looks at what became of an update still can while another one has begun the next.
TEST(Claims, TheUpdateBeforeStaysKnown) {
  ClaimsMemory memory(2);
  Claims late = memory.for_rank(0);
  Claims early = memory.for_rank(1);
  early.begin(1, 3);
  while (early.next(1, 0)) {
  }
  early.begin(2, 5);
  EXPECT_EQ(early.next(2, 0), 2U);
  EXPECT_EQ(late.num_claimed(1), 3U);
  EXPECT_EQ(late.num_claimed(2), 1U);
}

// One rank has lost another and gives up, while a third goes on: both say the same.
TEST(Claims, AnUpdateHappensForAllOrForNobody) {
  ClaimsMemory memory(2);
  Claims one = memory.for_rank(0);
  Claims other = memory.for_rank(1);
  EXPECT_TRUE(one.start(1));
  EXPECT_FALSE(other.give_up(1));
  EXPECT_TRUE(other.give_up(2));
  EXPECT_FALSE(one.start(2));
  EXPECT_FALSE(other.start(2));
  EXPECT_TRUE(one.start(3));
  EXPECT_FALSE(other.give_up(3));
  constexpr std::uint64_t kRounds = 200;
  std::vector<char> starts(kRounds);
  std::vector<char> gives_up(kRounds);
  {
    std::barrier both(2);
    const std::jthread second([&] {
      for (std::uint64_t i = 0; i < kRounds; ++i) {
        both.arrive_and_wait();
        gives_up[i] = other.give_up(4 + i) ? 1 : 0;
      }
    });
    for (std::uint64_t i = 0; i < kRounds; ++i) {
      both.arrive_and_wait();
      starts[i] = one.start(4 + i) ? 1 : 0;
    }
  }
  for (std::uint64_t i = 0; i < kRounds; ++i) EXPECT_NE(starts[i], gives_up[i]);
}

}  // namespace
}  // namespace lockstep::shm
