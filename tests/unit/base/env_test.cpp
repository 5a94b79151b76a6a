#include "base/env.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <cstdlib>

namespace lockstep {
namespace {

TEST(Environment, ReadsTheProcess) {
  ::setenv("LOCKSTEP_ENV_TEST", "a=b", 1);
  EXPECT_EQ(Environment::of_process().get("LOCKSTEP_ENV_TEST"), "a=b");
  ::unsetenv("LOCKSTEP_ENV_TEST");
  EXPECT_FALSE(Environment::of_process().has("LOCKSTEP_ENV_TEST"));
}

TEST(Environment, AnEmptyVariableIsNotSet) {
  EXPECT_FALSE(Environment({{"RANK", ""}}).has("RANK"));
  EXPECT_FALSE(Environment({{"RANK", ""}}).get_int("RANK"));
}

TEST(Environment, NumbersAreWholeNumbers) {
  EXPECT_EQ(Environment({{"RANK", "12"}}).get_int("RANK"), 12);
  for (const char* bad : {"x", "1x", " 1", "1.5", "-1", "99999999999999"}) {
    try {
      Environment({{"RANK", bad}}).get_int("RANK");
      ADD_FAILURE() << bad;
    } catch (const UsageError& error) {
      EXPECT_NE(error.message().find("RANK is '" + std::string(bad) + "'"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_THROW(Environment({{"WORLD_SIZE", "0"}}).get_int("WORLD_SIZE", 1), UsageError);
}

}  // namespace
}  // namespace lockstep
