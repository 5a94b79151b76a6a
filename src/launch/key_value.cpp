#include "launch/key_value.h"

#include <algorithm>
#include <charconv>

namespace lockstep {

using Json = nlohmann::json;
using Bytes = std::vector<std::uint8_t>;

Json KeyValue::answer(const Json& request) try {
  return try_to_answer(request);
} catch (const Json::exception& error) {
  return {{"error", error.what()}};
}

Json KeyValue::try_to_answer(const Json& request) {
  const std::string op = request.at("op");
  const auto key = [&] { return request.at("key").get<std::string>(); };
  const auto value = [&](const char* name) -> const Bytes& {
    return request.at(name).get_binary();
  };
  if (op == "set") {
    values_[key()] = value("value");
    return nullptr;
  }
  if (op == "append") {
    Bytes& held = values_[key()];
    const Bytes& more = value("value");
    held.insert(held.end(), more.begin(), more.end());
    return nullptr;
  }
  if (op == "compare_set") {  // as c10d's stores do: what is not there yet equals nothing
    const auto found = values_.find(key());
    const Bytes& expected = value("expected");
    if (found == values_.end()) {
      if (!expected.empty()) return Json::binary(expected);
      return Json::binary(values_[key()] = value("value"));
    }
    if (found->second == expected) found->second = value("value");
    return Json::binary(found->second);
  }
  if (op == "get") {
    const auto found = values_.find(key());
    return found == values_.end() ? Json(nullptr) : Json::binary(found->second);
  }
  if (op == "add") {
    const auto more = request.at("value").get<std::int64_t>();
    Bytes& held = values_[key()];
    std::int64_t sum = 0;
    const auto* const begin = reinterpret_cast<const char*>(held.data());
    const auto read = std::from_chars(begin, begin + held.size(), sum);
    if (!held.empty() && read.ptr != begin + held.size()) {
      throw Json::other_error::create(500, "the value of " + key() + " is no number", &request);
    }
    if (__builtin_add_overflow(sum, more, &sum)) {
      throw Json::other_error::create(500, "the sum of " + key() + " is too large", &request);
    }
    const std::string text = std::to_string(sum);
    held.assign(text.begin(), text.end());
    return sum;
  }
  if (op == "check") {
    return std::ranges::all_of(request.at("keys"), [&](const Json& one) {
      return values_.contains(one.get<std::string>());
    });
  }
  if (op == "delete") return values_.erase(key()) != 0;
  if (op == "count") return values_.size();
  if (op == "list") {
    Json keys = Json::array();
    for (const auto& [name, _] : values_) keys.push_back(name);
    return keys;
  }
  throw Json::other_error::create(500, "there is no operation " + op, &request);
}

}  // namespace lockstep
