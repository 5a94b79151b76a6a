#include "launch/key_value.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Json = nlohmann::json;

Json bytes(const std::string& text) {
  return Json::binary(std::vector<std::uint8_t>(text.begin(), text.end()));
}

TEST(KeyValue, HoldsValues) {
  KeyValue store;
  EXPECT_TRUE(store.answer({{"op", "get"}, {"key", "a"}}).is_null());
  EXPECT_EQ(store.answer({{"op", "check"}, {"keys", {"a"}}}), false);
  store.answer({{"op", "set"}, {"key", "a"}, {"value", bytes(std::string("\0x", 2))}});
  EXPECT_EQ(store.answer({{"op", "get"}, {"key", "a"}}), bytes(std::string("\0x", 2)));
  store.answer({{"op", "append"}, {"key", "a"}, {"value", bytes("y")}});
  EXPECT_EQ(store.answer({{"op", "get"}, {"key", "a"}}), bytes(std::string("\0xy", 3)));
  EXPECT_EQ(store.answer({{"op", "check"}, {"keys", {"a", "b"}}}), false);
  EXPECT_EQ(store.answer({{"op", "count"}}), 1);
  EXPECT_EQ(store.answer({{"op", "list"}}), Json({"a"}));
  EXPECT_EQ(store.answer({{"op", "delete"}, {"key", "a"}}), true);
  EXPECT_EQ(store.answer({{"op", "delete"}, {"key", "a"}}), false);
}

TEST(KeyValue, Counts) {
  KeyValue store;
  EXPECT_EQ(store.answer({{"op", "add"}, {"key", "n"}, {"value", 3}}), 3);
  EXPECT_EQ(store.answer({{"op", "add"}, {"key", "n"}, {"value", -5}}), -2);
  EXPECT_EQ(store.answer({{"op", "get"}, {"key", "n"}}), bytes("-2"));
}

TEST(KeyValue, ComparesBeforeItSets) {
  KeyValue store;
  const auto compare_set = [&](const std::string& expected, const std::string& value) {
    return store.answer({{"op", "compare_set"},
                         {"key", "k"},
                         {"expected", bytes(expected)},
                         {"value", bytes(value)}});
  };
  EXPECT_EQ(compare_set("old", "new"), bytes("old"));  // nothing is there: it is not set
  EXPECT_EQ(compare_set("", "first"), bytes("first"));
  EXPECT_EQ(compare_set("", "second"), bytes("first"));
  EXPECT_EQ(compare_set("first", "second"), bytes("second"));
}

TEST(KeyValue, RefusesWhatMakesNoSense) {
  KeyValue store;
  store.answer({{"op", "set"}, {"key", "a"}, {"value", bytes("text")}});
  const std::vector<Json> questions = {
      {{"op", "dance"}},
      {{"op", "get"}},
      {{"key", "a"}},
      {{"op", "set"}, {"key", "a"}},
      {{"op", "set"}, {"key", "a"}, {"value", "text"}},
      {{"op", "add"}, {"key", "a"}, {"value", 1}},  // what is there is no number
      {{"op", "add"}, {"key", "b"}, {"value", "x"}},
      Json::array(),
      nullptr};
  for (const Json& question : questions) {
    EXPECT_TRUE(store.answer(question).contains("error")) << question.dump();
  }
  EXPECT_EQ(store.answer({{"op", "get"}, {"key", "a"}}), bytes("text"));
}

}  // namespace
}  // namespace lockstep
