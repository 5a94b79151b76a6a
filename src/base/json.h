// The one name for JSON values. Who builds or reads them includes <nlohmann/json.hpp> as well.
#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// How values are read: an integer is what is written as one and fits. nlohmann's own way takes
// 1e300 or 2^40 for an int, too, and what comes out is not defined or not the number of the file.
template <typename T, typename = void>
struct StrictNumbers : nlohmann::adl_serializer<T> {};

template <std::integral T>
requires(!std::same_as<T, bool>) struct StrictNumbers<T, void> : nlohmann::adl_serializer<T> {
  template <typename AnyJson>
  static void from_json(const AnyJson& json, T& value) {
    if (json.is_number_unsigned()) {
      const auto number = json.template get_ref<const std::uint64_t&>();
      if (!std::in_range<T>(number)) fail(json);
      value = static_cast<T>(number);
    } else if (json.is_number_integer()) {
      const auto number = json.template get_ref<const std::int64_t&>();
      if (!std::in_range<T>(number)) fail(json);
      value = static_cast<T>(number);
    } else {
      fail(json);
    }
  }

 private:
  template <typename AnyJson>
  [[noreturn]] static void fail(const AnyJson& json) {
    const std::string text = json.is_number() ? json.dump() : json.type_name();
    throw AnyJson::type_error::create(302, "an integer is needed here, not " + text, &json);
  }
};

using Json = nlohmann::basic_json<std::map, std::vector, std::string, bool, std::int64_t,
                                  std::uint64_t, double, std::allocator, StrictNumbers>;

}  // namespace lockstep

// As NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE, for lockstep::Json.
#define LOCKSTEP_JSON_FIELDS(Type, ...)                                                   \
  inline void to_json(::lockstep::Json& nlohmann_json_j, const Type& nlohmann_json_t) {   \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(NLOHMANN_JSON_TO, __VA_ARGS__))              \
  }                                                                                       \
  inline void from_json(const ::lockstep::Json& nlohmann_json_j, Type& nlohmann_json_t) { \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(NLOHMANN_JSON_FROM, __VA_ARGS__))            \
  }
