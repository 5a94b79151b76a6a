// KeyValue: the store of a job on several hosts. It lives in the first host's launcher; ranks reach
// it through their own (world/launcher_store.h).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/json.h"

namespace lockstep {

class KeyValue {
 public:
  // Keys and values together. Ranks keep addresses and reports here, not data.
  static constexpr std::size_t kMaxBytes = 64 << 20;

  // Answers {"op": ..., "key": ..., ...}; values are CBOR's byte strings. An operation that does
  // not exist, lacks a part, or finds no room is answered with {"error": ...}.
  Json answer(const Json& request);

  void clear() {
    values_.clear();
    num_bytes_ = 0;
    revoked_.clear();
  }
  // What begins so is forgotten, and who asks for it is told {"revoked": why}: nobody waits there
  // any more.
  void revoke(const std::string& prefix, const std::string& why);

 private:
  using Bytes = std::vector<std::uint8_t>;

  Json try_to_answer(const Json& request);
  void put(const std::string& key, Bytes value);
  Json find_revoked(const std::string& key) const;

  std::map<std::string, Bytes> values_;
  std::size_t num_bytes_ = 0;
  std::map<std::string, std::string> revoked_;  // by prefix
};

}  // namespace lockstep
