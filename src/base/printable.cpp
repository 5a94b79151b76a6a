#include "base/printable.h"

#include <array>
#include <cstdint>

#include "base/text.h"

namespace lockstep {
namespace {

struct Character {
  std::size_t bytes = 0;  // 0: it is no UTF-8
  std::uint32_t code = 0;
};

Character first_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  if (lead < 0x80) return {1, lead};
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
  std::uint32_t code = lead & (0x7FU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xC0U) != 0x80U) return {};
    code = code << 6U | (byte & 0x3FU);
  }
  constexpr std::array<std::uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};  // by bytes
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kLeast[bytes] || is_surrogate || code > 0x10FFFF) return {};
  return {bytes, code};
}

bool is_shown(std::uint32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool turns_direction = code == 0x061C || code == 0x200E || code == 0x200F ||
                               (code >= 0x2028 && code <= 0x202E) ||
                               (code >= 0x2066 && code <= 0x2069);
  return !is_control && !turns_direction;
}

std::string make_printable(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const Character one = first_character(text);
    const std::size_t bytes = one.bytes == 0 ? 1 : one.bytes;
    if ((one.bytes > 0 && is_shown(one.code)) || kept.find(text.front()) != kept.npos) {
      result += text.substr(0, bytes);
    } else {
      for (const char byte : text.substr(0, bytes)) {
        result += text::format("\\x{:02x}", static_cast<unsigned char>(byte));
      }
    }
    text.remove_prefix(bytes);
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) { return make_printable(text, ""); }

std::string printable_lines(std::string_view text) { return make_printable(text, "\n"); }

}  // namespace lockstep
