#include "launch/key_value.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace lockstep {

Json KeyValue::answer(const Json& request) try {
  return try_to_answer(request);
} catch (const Json::exception& error) {
  return {{"error", error.what()}};
}

void KeyValue::revoke(const std::string& prefix, const std::string& why) {
  revoked_[prefix] = why;
  for (auto at = values_.lower_bound(prefix);
       at != values_.end() && at->first.starts_with(prefix);) {
    num_bytes_ -= at->first.size() + at->second.size();
    at = values_.erase(at);
  }
}

// Why, or null.
Json KeyValue::find_revoked(const std::string& key) const {
  const auto after = revoked_.upper_bound(key);
  if (after == revoked_.begin()) return nullptr;
  const auto& [prefix, why] = *std::prev(after);
  return key.starts_with(prefix) ? Json(why) : Json();
}

Json KeyValue::try_to_answer(const Json& request) {
  const std::string op = request.at("op");
  if (!revoked_.empty()) {
    Json keys = request.value("keys", Json::array());
    if (request.contains("key")) keys.push_back(request.at("key"));
    for (const Json& one : keys) {
      if (Json why = find_revoked(one); !why.is_null()) return {{"revoked", why}};
    }
  }
  const auto key = [&] { return request.at("key").get<std::string>(); };
  const auto value = [&](const char* name) -> const Bytes& {
    return request.at(name).get_binary();
  };
  if (op == "set") {
    put(key(), value("value"));
    return nullptr;
  }
  if (op == "append") {
    const auto found = values_.find(key());
    Bytes all = found == values_.end() ? Bytes() : found->second;
    const Bytes& more = value("value");
    all.insert(all.end(), more.begin(), more.end());
    put(key(), std::move(all));
    return nullptr;
  }
  if (op == "compare_set") {  // as c10d's stores do: what is not there yet equals nothing
    const auto found = values_.find(key());
    const Bytes& expected = value("expected");
    if (found == values_.end()) {
      if (!expected.empty()) return Json::binary(expected);
      put(key(), value("value"));
      return Json::binary(value("value"));
    }
    if (found->second == expected) put(key(), value("value"));
    return Json::binary(values_.at(key()));
  }
  if (op == "get") {
    const auto found = values_.find(key());
    return found == values_.end() ? Json(nullptr) : Json::binary(found->second);
  }
  if (op == "add") {
    const auto more = request.at("value").get<std::int64_t>();
    const auto found = values_.find(key());
    const Bytes held = found == values_.end() ? Bytes() : found->second;
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
    put(key(), Bytes(text.begin(), text.end()));
    return sum;
  }
  if (op == "check") {
    return std::ranges::all_of(request.at("keys"), [&](const Json& one) {
      return values_.contains(one.get<std::string>());
    });
  }
  if (op == "delete") {
    const auto found = values_.find(key());
    if (found == values_.end()) return false;
    num_bytes_ -= found->first.size() + found->second.size();
    values_.erase(found);
    return true;
  }
  if (op == "count") return values_.size();
  if (op == "list") {
    Json keys = Json::array();
    for (const auto& [name, _] : values_) keys.push_back(name);
    return keys;
  }
  throw Json::other_error::create(500, "there is no operation " + op, &request);
}

void KeyValue::put(const std::string& key, Bytes value) {
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  const std::size_t after = num_bytes_ - before + key.size() + value.size();
  if (after > kMaxBytes) {
    throw Json::other_error::create(
        500,
        text::format("the job's store has {} bytes and takes no more than {}", num_bytes_,
                     kMaxBytes),
        nullptr);
  }
  values_[key] = std::move(value);
  num_bytes_ = after;
}

}  // namespace lockstep
