// Golden values: what Python computed, stored in tests/golden with the script that made them.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace lockstep::test {

inline nlohmann::json read_golden(const std::string& name) {
  std::ifstream file(std::string(LOCKSTEP_GOLDEN_DIR "/") + name);
  if (!file) throw std::runtime_error("there is no golden file " + name);
  return nlohmann::json::parse(file);
}

}  // namespace lockstep::test
