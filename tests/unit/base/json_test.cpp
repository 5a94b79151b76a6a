#include "base/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

namespace lockstep {
namespace {

TEST(JsonNumbers, AnIntegerIsWhatIsWrittenAsOneAndFits) {
  EXPECT_EQ(Json::parse("-7").get<int>(), -7);
  EXPECT_EQ(Json::parse("18446744073709551615").get<std::uint64_t>(),
            std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(Json::parse("-9223372036854775808").get<std::int64_t>(),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(Json::parse("7").get<double>(), 7.0);
  EXPECT_TRUE(Json::parse("true").get<bool>());
  for (const char* const text : {"-9223372036854775809", "1e300", "1.5", "1.0", "\"1\"", "null"}) {
    EXPECT_THROW(Json::parse(text).get<std::int64_t>(), Json::type_error) << text;
  }
  EXPECT_THROW(Json::parse("1099511627776").get<int>(), Json::type_error);
  EXPECT_THROW(Json::parse("-1").get<std::size_t>(), Json::type_error);
  EXPECT_THROW(Json::parse("[1, 1e300]").get<std::vector<std::int64_t>>(), Json::type_error);
  EXPECT_THROW(Json::parse(R"({"a": 1e300})").value("a", std::int64_t{0}), Json::type_error);
}

struct Place {
  std::int64_t number;
  int rank;
};
LOCKSTEP_JSON_FIELDS(Place, number, rank)

TEST(JsonNumbers, FieldsOfATypeAreReadThisWay) {
  const auto place = Json(Place{.number = 5, .rank = -1}).get<Place>();
  EXPECT_EQ(place.number, 5);
  EXPECT_EQ(place.rank, -1);
  EXPECT_THROW(Json::parse(R"({"number": -1e30, "rank": 0})").get<Place>(), Json::type_error);
}

}  // namespace
}  // namespace lockstep
