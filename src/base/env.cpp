#include "base/env.h"

#include <lockstep/error.h>
#include <unistd.h>

#include <charconv>
#include <string_view>

#include "base/text.h"

namespace lockstep {

Environment Environment::of_process() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    environment.variables_.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

std::optional<std::string> Environment::get(const std::string& name) const {
  const auto found = variables_.find(name);
  if (found == variables_.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

std::optional<int> Environment::get_int(const std::string& name, int least) const {
  const auto text = get(name);
  if (!text) return std::nullopt;
  return parse_int(name, *text, least);
}

int parse_int(const std::string& what, const std::string& text, int least) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least) {
    throw UsageError({}, text::format("{} is '{}'.\nSet it to a whole number of at least {}.", what,
                                      text, least));
  }
  return value;
}

}  // namespace lockstep
