// Checks: what must hold on every engine with any number of ranks. They share the processes of one
// test, because starting ranks takes longer than most of them do; each sees the world that the one
// before it left.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/world.h>

#include <functional>
#include <utility>
#include <vector>

#include "support/run_ranks.h"

namespace lockstep::test {

struct Check {
  // `ranks`: that it needs; 0: any number.
  Check(const char* its_name, std::function<void(const World&)> its_body, int its_ranks = 0)
      : name(its_name), body(std::move(its_body)), ranks(its_ranks) {
    all().push_back(this);
  }
  static std::vector<const Check*>& all() {
    static std::vector<const Check*> checks;
    return checks;
  }

  const char* name;
  std::function<void(const World&)> body;
  int ranks;
};

// Runs all checks of this program on `size` ranks, up to the first that fails.
inline void run_checks(int size, const JoinOptions& options = {}, const RankOptions& ranks = {}) {
  const auto body = [&](int) {
    const World world = World::join(options);
    for (const Check* check : Check::all()) {
      if (check->ranks != 0 && check->ranks != size) continue;
      SCOPED_TRACE(check->name);
      try {
        check->body(world);
      } catch (const std::exception& error) {
        FAIL() << error.what();
      }
      ASSERT_FALSE(testing::Test::HasFailure());
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(size, body, ranks)));
}

}  // namespace lockstep::test
