// Environment: a copy of environment variables, with typed reads that name the variable in errors.
//
// A value, so that tests can make one up. An empty variable counts as not set.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace lockstep {

class Environment {
 public:
  Environment() = default;
  Environment(std::initializer_list<std::pair<const std::string, std::string>> variables)
      : variables_(variables) {}

  // The variables of this process, as they are now.
  static Environment of_process();

  std::optional<std::string> get(const std::string& name) const;
  bool has(const std::string& name) const { return get(name).has_value(); }

  // Throws UsageError if the variable is set to something that is not a whole number >= `least`.
  std::optional<int> get_int(const std::string& name, int least = 0) const;

 private:
  std::map<std::string, std::string> variables_;
};

// Throws UsageError that names `what` if `text` is not a whole number >= `least`.
int parse_int(const std::string& what, const std::string& text, int least);

}  // namespace lockstep
