#include "launch/cbor.h"

#include <array>

namespace lockstep {
namespace {

constexpr std::size_t kMaxDepth = 32;

enum Major : std::uint8_t { kBytes = 2, kText = 3, kArray = 4, kMap = 5, kTag = 6 };

}  // namespace

bool is_plain_cbor(const std::uint8_t* bytes, std::size_t size) {
  std::array<std::uint64_t, kMaxDepth> left = {1};  // values still to come, of each level
  std::size_t depth = 1;
  std::size_t at = 0;
  while (depth > 0) {
    if (left[depth - 1] == 0) {
      --depth;
      continue;
    }
    --left[depth - 1];
    if (at == size) return false;
    const int major = bytes[at] >> 5;
    const int info = bytes[at] & 31;
    ++at;
    // The number in the head: small ones are in its first byte, others in 1, 2, 4 or 8 more.
    std::uint64_t number = static_cast<std::uint64_t>(info);
    if (info >= 24) {
      const std::size_t count = std::size_t{1} << (info - 24);
      if (info > 27 || size - at < count) return false;
      number = 0;
      for (std::size_t i = 0; i < count; ++i) number = number << 8 | bytes[at++];
    }
    switch (major) {
      case kBytes:
      case kText:
        if (number > size - at) return false;
        at += number;
        break;
      case kArray:
      case kMap:
        // Each value has a byte at least.
        if (number > size - at || depth == kMaxDepth) return false;
        left[depth++] = major == kMap ? 2 * number : number;
        break;
      case kTag:
        return false;
      default:  // numbers, true, false, null: the head is all
        break;
    }
  }
  return at == size;
}

}  // namespace lockstep
