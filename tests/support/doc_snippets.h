// The code of a page of docs: it is compiled in a test, and stands in both in the same words.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

namespace lockstep::test {

// Lines without their indentation.
inline std::string lines_of(std::istream& text) {
  std::string all;
  for (std::string line; std::getline(text, line);) {
    const auto first = line.find_first_not_of(' ');
    if (first != std::string::npos) all += line.substr(first) + "\n";
  }
  return all;
}

// The page has so many snippets of C++, and each is in the source.
inline void expect_snippets(const std::string& page_path, const std::string& source_path,
                            int expected_count) {
  std::ifstream source(source_path);
  const std::string code = lines_of(source);
  std::ifstream page(page_path);
  int count = 0;
  std::stringstream block;
  bool is_inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("```")) {
      if (is_inside) {
        const std::string snippet = lines_of(block);
        EXPECT_NE(code.find(snippet), std::string::npos) << snippet;
        ++count;
      }
      is_inside = line == "```cpp";
      block = std::stringstream();
    } else if (is_inside) {
      block << line << "\n";
    }
  }
  EXPECT_EQ(count, expected_count);
}

}  // namespace lockstep::test
