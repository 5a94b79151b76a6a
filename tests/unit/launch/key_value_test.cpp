#include "launch/key_value.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/json.h"
#include "launch/cbor.h"

namespace lockstep {
namespace {

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

TEST(KeyValue, HasALimit) {
  KeyValue store;
  const Json large = bytes(std::string(KeyValue::kMaxBytes / 2, 'x'));
  EXPECT_TRUE(store.answer({{"op", "set"}, {"key", "a"}, {"value", large}}).is_null());
  EXPECT_TRUE(store.answer({{"op", "set"}, {"key", "a"}, {"value", large}}).is_null());  // again
  const Json answer = store.answer({{"op", "append"}, {"key", "a"}, {"value", large}});
  EXPECT_NE(answer.at("error").get<std::string>().find("takes no more"), std::string::npos);
  EXPECT_TRUE(store.answer({{"op", "set"}, {"key", "b"}, {"value", bytes("small")}}).is_null());
  EXPECT_EQ(store.answer({{"op", "delete"}, {"key", "a"}}), true);
  EXPECT_TRUE(store.answer({{"op", "append"}, {"key", "c"}, {"value", large}}).is_null());
}

bool is_plain(const std::vector<std::uint8_t>& message) {
  return is_plain_cbor(message.data(), message.size());
}

TEST(Cbor, WhatWeWriteIsPlain) {
  Json deep = 1;
  for (int i = 0; i < 31; ++i) deep = i % 2 == 0 ? Json::array({deep}) : Json{{"inner", deep}};
  const std::vector<Json> messages = {nullptr,
                                      true,
                                      -1,
                                      1.5,
                                      1ULL << 40,
                                      "text",
                                      bytes("bytes"),
                                      Json::array(),
                                      Json::object(),
                                      std::string(70000, 'x'),
                                      bytes(std::string(300, 'x')),
                                      deep,
                                      {{"op", "set"}, {"list", {1, "two", {{"three", 3.25}}}}}};
  for (const Json& one : messages) {
    const auto message = Json::to_cbor(one);
    EXPECT_TRUE(is_plain(message)) << one.dump().substr(0, 100);
    for (const std::size_t cut : {std::size_t{1}, (message.size() + 1) / 2}) {
      EXPECT_FALSE(is_plain({message.begin(), message.end() - static_cast<std::ptrdiff_t>(cut)}));
    }
  }
  EXPECT_FALSE(is_plain(Json::to_cbor(Json::array({deep}))));
}

// Each would be a call within a call of the parser.
TEST(Cbor, NestingIsRefused) {
  for (const std::uint8_t head : {0x81, 0x9f, 0xa1, 0xbf, 0x7f, 0x5f, 0xc6, 0xd8}) {
    EXPECT_FALSE(is_plain(std::vector<std::uint8_t>(2 << 20, head))) << static_cast<int>(head);
  }
  EXPECT_FALSE(is_plain({0x9b, 255, 255, 255, 255, 255, 255, 255, 255}));  // a list of 2^64 - 1
  EXPECT_FALSE(is_plain({0xbb, 128, 0, 0, 0, 0, 0, 0, 0, 1}));
  EXPECT_FALSE(is_plain({}));
}

}  // namespace
}  // namespace lockstep
