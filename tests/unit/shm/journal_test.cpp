#include "shm/journal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "shm/claims.h"

namespace lockstep::shm {
namespace {

constexpr Journal::Size kSize = {
    .num_ranks = 3, .num_lanes = 2, .num_pieces = 4, .piece_bytes = 10};

// Two runs of memory make a piece, which an update adds one to.
class JournalTest : public testing::Test {
 protected:
  Journal of(int rank) { return {memory_.data(), rank, kSize}; }
  Journal::Runs runs() {
    return {{first_.data(), first_.size()}, {second_.data(), second_.size()}};
  }
  void add_to(std::vector<std::byte>& run, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      run[i] = static_cast<std::byte>(std::to_integer<int>(run[i]) + 1);
    }
  }
  void add() {
    add_to(first_, first_.size());
    add_to(second_, second_.size());
  }
  void expect_values(int value) {
    for (const auto& run : {first_, second_}) {
      for (const std::byte one : run) EXPECT_EQ(std::to_integer<int>(one), value);
    }
  }
  void repair(int rank, const std::vector<int>& lost) {
    of(rank).repair(
        0, 7, 2, runs(), [&](int one) { return std::ranges::find(lost, one) != lost.end(); },
        [this] { add(); });
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(Journal::bytes_for(kSize));
  std::vector<std::byte> first_ = std::vector<std::byte>(7, std::byte{1});
  std::vector<std::byte> second_ = std::vector<std::byte>(3, std::byte{1});
};

TEST_F(JournalTest, KnowsWhatIsDone) {
  Journal mine = of(0);
  EXPECT_FALSE(mine.is_done(7, 2));
  mine.save(1, 7, 2, runs());
  add();
  EXPECT_FALSE(of(1).is_done(7, 2));
  mine.set_done(1, 7, 2);
  EXPECT_TRUE(of(1).is_done(7, 2));
  EXPECT_FALSE(of(1).is_done(8, 2));  // of the next update
  EXPECT_FALSE(of(1).are_done(7, 4));
  for (const std::size_t piece : {0, 1, 3}) mine.set_done(0, 7, piece);
  EXPECT_TRUE(of(1).are_done(7, 4));
}

TEST_F(JournalTest, ARankThatDiesInTheMiddleTearsNothing) {
  of(0).save(1, 7, 2, runs());
  add_to(first_, 4);  // and no more
  repair(1, {0});
  expect_values(2);
  EXPECT_TRUE(of(2).is_done(7, 2));
}

TEST_F(JournalTest, ARankThatDiesBeforeItHasBegunLeavesThePieceAsItWas) {
  repair(1, {0});
  expect_values(2);
}

TEST_F(JournalTest, WhoRepairsMayDieToo) {
  of(0).save(0, 7, 2, runs());
  add_to(first_, 4);
  // Rank 1 has put back what was there and saved it for itself, and dies while it does it again.
  of(1).repair(
      0, 7, 2, runs(), [](int rank) { return rank == 0; }, [this] { add_to(second_, 1); });
  // As if it had not come to the end.
  Journal again(memory_.data(), 1, kSize);
  std::memset(memory_.data(), 0, 4 * sizeof(std::uint64_t));
  first_.assign(7, std::byte{1});
  second_.assign(3, std::byte{1});
  again.save(0, 7, 2, runs());
  add_to(second_, 1);
  repair(2, {0, 1});
  expect_values(2);
}

TEST_F(JournalTest, AnOldCopyIsNotPutBack) {
  of(0).save(0, 6, 2, runs());  // of the update before
  add();
  repair(1, {0});
  expect_values(3);
}

TEST(ClosedClaims, GiveNoMorePieces) {
  std::vector<std::byte> memory(Claims::bytes_for(2));
  Claims claims(memory.data(), 0, 2);
  claims.begin(1, 4);
  EXPECT_TRUE(claims.next(1, 0));
  claims.close(1);
  EXPECT_TRUE(claims.is_writing(0));  // the one that it has
  EXPECT_FALSE(claims.next(1, 0));
  EXPECT_FALSE(claims.is_writing(0));
  claims.begin(2, 4);
  EXPECT_TRUE(claims.next(2, 0));
}

}  // namespace
}  // namespace lockstep::shm
