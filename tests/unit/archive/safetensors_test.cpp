#include "archive/safetensors.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

std::string file_with(const std::string& json, std::size_t data) {
  std::string file;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    file.push_back(static_cast<char>(json.size() >> 8 * i & 0xFF));
  }
  return file + json + std::string(data, 'x');
}

TensorHeader parse(const std::string& file) {
  const std::uint64_t length = parse_header_length(file, file.size(), "f");
  return parse_header(std::string_view(file).substr(kLengthBytes, length), file.size(), "f");
}

void expect_refused(const std::string& file, const std::string& reason) {
  try {
    parse(file);
    ADD_FAILURE() << "taken: " << file;
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

TEST(Safetensors, ReadsWhatItWrites) {
  std::vector<std::pair<std::string, TensorEntry>> tensors = {
      {"b", {.dtype = "F32", .shape = {2, 3}}},
      {"a \"quoted\"", {.dtype = "BOOL", .shape = {5}}},
      {"empty", {.dtype = "I64", .shape = {0, 4}}},
      {"one", {.dtype = "F64", .shape = {}}}};
  const std::string header = make_header(tensors, {{"format", "pt"}});
  EXPECT_EQ(header.size() % 8, 0U);
  const TensorHeader read = parse(header + std::string(24 + 5 + 8, 'x'));
  ASSERT_EQ(read.tensors.size(), 4U);
  EXPECT_EQ(read.metadata.at("format"), "pt");
  for (const auto& [name, entry] : tensors) {
    const TensorEntry& its = read.tensors.at(name);
    EXPECT_EQ(its.dtype, entry.dtype);
    EXPECT_EQ(its.shape, entry.shape);
    EXPECT_EQ(its.begin, entry.begin) << name;
    EXPECT_EQ(its.bytes, entry.bytes) << name;
  }
  EXPECT_EQ(read.tensors.at("b").begin, header.size());
}

TEST(Safetensors, EveryTypeHasItsSize) {
  EXPECT_EQ(bytes_of_dtype("BF16"), 2);
  EXPECT_EQ(bytes_of_dtype("C64"), 8);
  EXPECT_EQ(bytes_of_dtype("F8_E5M2"), 1);
  EXPECT_EQ(bytes_of_dtype("f32"), 0);
}

TEST(Safetensors, NamesInErrorsDoNothingToATerminal) {
  expect_refused(file_with(R"({"\u001b[2J":{"dtype":"F32"}})", 0), R"('\x1b[2J' lacks)");
  expect_refused(file_with(R"({"\u001b[2J":7})", 0), R"(near '\x1b[2J')");
}

TEST(Safetensors, WhatIsNotWholeIsRefusedWithTheReason) {
  expect_refused("", "0 bytes");
  expect_refused("1234567", "7 bytes");
  expect_refused(file_with("{}", 0).substr(0, 9), "said to have 2 bytes, the file has 9");
  expect_refused(std::string(8, '\xff'), "said to have 18446744073709551615 bytes");
  expect_refused(file_with("[]", 0), "does not begin with '{'");
  expect_refused(file_with("{", 0), "no JSON");
  expect_refused(file_with("{} x", 0), "no JSON");
  const auto tensor = [](const std::string& inside, std::size_t data) {
    return file_with("{\"t\":{" + inside + "}}", data);
  };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  EXPECT_EQ(parse(tensor(good, 8)).tensors.size(), 1U);
  expect_refused(tensor(good, 7), "end at byte");
  expect_refused(tensor(good, 9), "end at byte");
  expect_refused(tensor(R"("shape":[2],"data_offsets":[0,8])", 8), "lacks its dtype");
  expect_refused(tensor(R"("dtype":"F32","data_offsets":[0,8])", 8), "lacks its dtype, shape");
  expect_refused(tensor(R"("dtype":"F32","shape":[2])", 8), "data_offsets");
  expect_refused(tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])", 8), "type 'F33'");
  expect_refused(tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])", 8), "needs 12 bytes");
  expect_refused(tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])", 8), "negative");
  expect_refused(tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])", 8), "fraction");
  expect_refused(tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])", 8), "a list");
  expect_refused(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])", 8), "[8, 0]");
  expect_refused(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])", 12), "begins at 4");
  expect_refused(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])", 8), "third offset");
  expect_refused(tensor(R"("dtype":"F32","shape":[0],"data_offsets":[9,9])", 8), "outside");
  expect_refused(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":null)", 8), "null");
  expect_refused(tensor(R"("dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,8])", 8),
                 "more elements than there can be");
  expect_refused(tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])", 8),
                 "the number 18446744073709551615");
  expect_refused(file_with("{\"t\":{" + good + "},\"t\":{" + good + "}}", 8), "there twice");
  expect_refused(file_with("{\"t\":{" + good + "},\"u\":{" + good + "}}", 8), "begins at 0");
  expect_refused(file_with(R"({"__metadata__":{"a":1}})", 0), "a number");
  expect_refused(file_with(R"({"t":{"dtype":{}}})", 0), "an object");
}

}  // namespace
}  // namespace lockstep
