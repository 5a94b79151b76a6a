// KeyValue: the store of a job on several hosts. It lives in the first host's launcher; ranks reach
// it through their own (world/launcher_store.h).
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lockstep {

class KeyValue {
 public:
  // Answers {"op": ..., "key": ..., ...}; values are CBOR's byte strings. An operation that does
  // not exist, or lacks a part, throws nlohmann::json::exception.
  nlohmann::json answer(const nlohmann::json& request);

  void clear() { values_.clear(); }

 private:
  nlohmann::json try_to_answer(const nlohmann::json& request);

  std::map<std::string, std::vector<std::uint8_t>> values_;
};

}  // namespace lockstep
