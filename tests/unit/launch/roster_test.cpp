#include "launch/roster.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Kind = Roster::Answer::Kind;
using Role = Roster::Role;
using Seat = Roster::Seat;

// Three members of generation 0 that survive losses, with room for four.
Roster three() {
  Roster roster;
  roster.begin(0, {{0, 0}, {0, 1}, {1, 0}});
  for (const Seat& seat : roster.members()) roster.enter(seat, 4);
  return roster;
}

void expect_place(const Roster::Answer& answer, int generation, int rank, int size) {
  EXPECT_EQ(answer.kind, Kind::kJoin);
  EXPECT_EQ(answer.generation, generation);
  EXPECT_EQ(answer.rank, rank);
  EXPECT_EQ(answer.size, size);
}

TEST(Roster, IsOpenWhenAllHaveEntered) {
  Roster roster;
  EXPECT_FALSE(roster.is_open());
  roster.begin(0, {{0, 0}, {0, 1}});
  roster.enter({0, 1}, 2);
  EXPECT_FALSE(roster.is_open());
  roster.enter({0, 0}, 2);
  EXPECT_TRUE(roster.is_open());
}

TEST(Roster, SurvivorsFormTheNextGenerationWhenAllHaveAsked) {
  Roster roster = three();
  EXPECT_EQ(roster.remove({0, 1}), Role::kMember);
  EXPECT_EQ(roster.ask({0, 0}, 0, false).kind, Kind::kWait);
  EXPECT_EQ(roster.ask({0, 0}, 0, false).kind, Kind::kWait);
  expect_place(roster.ask({1, 0}, 0, false), 1, 1, 2);
  expect_place(roster.ask({0, 0}, 0, false), 1, 0, 2);
  EXPECT_EQ(roster.wanted(), 1);
}

TEST(Roster, AGenerationHasEndedWhenAMemberIsLost) {
  Roster roster = three();
  EXPECT_EQ(roster.num_ended(), 0);
  roster.add({1, 1});
  roster.remove({1, 1});  // a newcomer
  EXPECT_EQ(roster.num_ended(), 0);
  roster.remove({0, 1});
  EXPECT_EQ(roster.num_ended(), 1);
  roster.ask({0, 0}, 0, false);
  roster.ask({1, 0}, 0, false);
  EXPECT_EQ(roster.generation(), 1);
  EXPECT_EQ(roster.num_ended(), 1);
}

TEST(Roster, NobodyIsLostSoNobodyNeedsAnotherGeneration) {
  Roster roster = three();
  EXPECT_EQ(roster.ask({0, 0}, 0, false).kind, Kind::kIntact);
  EXPECT_EQ(roster.generation(), 0);
}

TEST(Roster, ADeathWhileReFormingMakesAnotherGeneration) {
  Roster roster = three();
  roster.remove({0, 1});
  roster.ask({0, 0}, 0, false);
  expect_place(roster.ask({1, 0}, 0, false), 1, 1, 2);
  EXPECT_EQ(roster.remove({1, 0}), Role::kMember);  // before the other has even heard of it
  expect_place(roster.ask({0, 0}, 0, false), 2, 0, 1);
}

TEST(Roster, WhoeverIsWaitedForMayDie) {
  Roster roster = three();
  roster.remove({0, 1});
  roster.ask({0, 0}, 0, false);
  EXPECT_EQ(roster.remove({1, 0}), Role::kMember);
  expect_place(roster.ask({0, 0}, 0, false), 1, 0, 1);
}

TEST(Roster, ANewcomerIsTakenInAtTheEndOfAStep) {
  Roster roster = three();
  roster.remove({0, 1});
  roster.ask({0, 0}, 0, false);
  roster.ask({1, 0}, 0, false);
  roster.add({0, 1});
  EXPECT_EQ(roster.wanted(), 1);  // it is only starting
  EXPECT_EQ(roster.ask({0, 1}, -1, false).kind, Kind::kWait);
  EXPECT_EQ(roster.wanted(), 2);
  EXPECT_EQ(roster.ask({0, 0}, 1, true).kind, Kind::kWait);
  expect_place(roster.ask({1, 0}, 1, true), 2, 2, 3);
  expect_place(roster.ask({0, 1}, -1, false), 2, 1, 3);
  expect_place(roster.ask({0, 0}, 1, true), 2, 0, 3);
  EXPECT_EQ(roster.wanted(), 2);
}

// Members agreed on a change, and then its reason is gone: they are in the middle of it.
TEST(Roster, ANewcomerThatDiesLeavesTheOthersToGoOn) {
  Roster roster = three();
  roster.add({1, 1});
  roster.ask({1, 1}, -1, false);
  EXPECT_EQ(roster.ask({0, 0}, 0, true).kind, Kind::kWait);
  EXPECT_EQ(roster.remove({1, 1}), Role::kNewcomer);
  roster.ask({0, 1}, 0, true);
  expect_place(roster.ask({1, 0}, 0, true), 1, 2, 3);
}

TEST(Roster, ThereAreNoMoreMembersThanLogicalRanks) {
  Roster roster = three();
  for (const int place : {1, 2}) {
    roster.add({1, place});
    roster.ask({1, place}, -1, false);
  }
  for (const Seat& seat : {Seat{0, 0}, Seat{0, 1}, Seat{1, 0}}) roster.ask(seat, 0, true);
  expect_place(roster.ask({1, 1}, -1, false), 1, 3, 4);
  EXPECT_EQ(roster.ask({1, 2}, -1, false).kind, Kind::kWait);
  EXPECT_EQ(roster.wanted(), 1);
  EXPECT_EQ(roster.newcomers(), std::vector<Seat>({{1, 2}}));
}

TEST(Roster, WhoIsToLeaveLeavesAtTheEndOfAStep) {
  Roster roster = three();
  roster.set_leaving({0, 0});
  EXPECT_EQ(roster.wanted(), 1);
  roster.ask({0, 0}, 0, true);
  roster.ask({0, 1}, 0, true);
  expect_place(roster.ask({1, 0}, 0, true), 1, 1, 2);
  EXPECT_EQ(roster.ask({0, 0}, 0, true).kind, Kind::kLeave);
  EXPECT_EQ(roster.remove({0, 0}), Role::kNone);  // nothing is lost with it
  expect_place(roster.ask({0, 1}, 0, true), 1, 0, 2);
}

// The coordinator was lost, with a member. One has heard of generation 3, the other not yet.
TEST(Roster, WhatIsRestoredFormsTheNextGeneration) {
  Roster roster;
  roster.restore(3, 4,
                 {{.seat = {1, 0}, .rank = 1, .has_entered = true},
                  {.seat = {2, 0}, .rank = 1, .has_entered = true},
                  {.seat = {2, 1}}});
  EXPECT_TRUE(roster.is_open());
  EXPECT_EQ(roster.num_members(), 2);
  EXPECT_EQ(roster.newcomers(), std::vector<Seat>({{2, 1}}));
  EXPECT_EQ(roster.wanted(), 4);  // also if nobody has noticed anything
  EXPECT_EQ(roster.num_ended(), 3);
  EXPECT_EQ(roster.ask({1, 0}, 3, false).kind, Kind::kWait);
  expect_place(roster.ask({2, 0}, 2, true), 4, 1, 2);
  expect_place(roster.ask({1, 0}, 3, false), 4, 0, 2);
  EXPECT_EQ(roster.wanted(), 4);
}

TEST(Roster, WhatIsRestoredIsNotOpenBeforeAllHaveEntered) {
  Roster roster;
  roster.restore(0, 0, {{.seat = {1, 0}, .rank = 0}, {.seat = {2, 0}, .rank = 1}});
  roster.enter({1, 0}, 2);
  EXPECT_FALSE(roster.is_open());
  roster.enter({2, 0}, 2);
  EXPECT_TRUE(roster.is_open());
}

TEST(Roster, TheEndIsForAllAtOnce) {
  Roster roster = three();
  roster.add({1, 1});
  roster.ask({1, 1}, -1, false);
  EXPECT_EQ(roster.finish({0, 0}), Roster::Finish::kWait);
  EXPECT_EQ(roster.finish({0, 1}), Roster::Finish::kWait);
  EXPECT_EQ(roster.finish({1, 0}), Roster::Finish::kOver);
  EXPECT_EQ(roster.finish({0, 0}), Roster::Finish::kOver);
  EXPECT_EQ(roster.wanted(), 0);  // nobody joins any more
  EXPECT_EQ(roster.remove({0, 0}), Role::kDone);
  EXPECT_EQ(roster.finish({0, 1}), Roster::Finish::kOver);
}

TEST(Roster, WhoIsLostAtTheEndIsLost) {
  Roster roster = three();
  EXPECT_EQ(roster.finish({0, 0}), Roster::Finish::kWait);
  EXPECT_EQ(roster.finish({0, 1}), Roster::Finish::kWait);
  EXPECT_EQ(roster.remove({0, 1}), Role::kMember);
  EXPECT_EQ(roster.finish({0, 0}), Roster::Finish::kReform);
  roster.ask({0, 0}, 0, false);
  expect_place(roster.ask({1, 0}, 0, false), 1, 1, 2);
  EXPECT_EQ(roster.finish({0, 0}), Roster::Finish::kWait);
  EXPECT_EQ(roster.finish({1, 0}), Roster::Finish::kOver);
}

TEST(Roster, WhoIsToLeaveStaysIfTheOthersAreLost) {
  Roster roster = three();
  roster.set_leaving({1, 0});
  roster.remove({0, 0});
  roster.remove({0, 1});
  expect_place(roster.ask({1, 0}, 0, false), 1, 0, 1);
}

TEST(Roster, ANewcomerThatIsNotNeededAnyMoreLeaves) {
  Roster roster = three();
  roster.add({1, 1});
  roster.set_leaving({1, 1});
  EXPECT_EQ(roster.ask({1, 1}, -1, false).kind, Kind::kLeave);
  EXPECT_FALSE(roster.has({1, 1}));
}

}  // namespace
}  // namespace lockstep
