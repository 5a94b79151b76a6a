// Is this part of that text?
#pragma once

#include <string>
#include <string_view>

namespace lockstep::test {

inline bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace lockstep::test
