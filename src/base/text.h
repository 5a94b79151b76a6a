// Text: fmt's formatting, compiled once. Including all of fmt costs each file five seconds.
//
//   text::format("rank {} of {}", rank, size)
#pragma once

#if __has_include(<fmt/base.h>)
#include <fmt/base.h>
#else
#include <fmt/core.h>
#endif

#include <cstdio>
#include <string>
#include <string_view>

namespace lockstep::text {

std::string render(fmt::string_view format, fmt::format_args args);

template <typename... Args>
std::string format(fmt::format_string<Args...> format, Args&&... args) {
  return render(format, fmt::make_format_args(args...));
}

template <typename... Args>
void print(std::FILE* file, fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(render(format, fmt::make_format_args(args...)).c_str(), file);
}
template <typename... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(render(format, fmt::make_format_args(args...)).c_str(), stdout);
}

// The elements of a range, with `separator` between them.
template <typename Range>
std::string join(const Range& range, std::string_view separator) {
  std::string result;
  bool is_first = true;
  for (const auto& element : range) {
    if (!is_first) result += separator;
    is_first = false;
    result += text::format("{}", element);
  }
  return result;
}

}  // namespace lockstep::text
