// Frames: how messages follow each other in a stream: the length in 4 bytes, the highest first,
// then the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

inline constexpr std::size_t kFrameHead = 4;

inline std::string to_frame(const std::vector<std::uint8_t>& message) {
  std::string frame;
  for (int shift = 24; shift >= 0; shift -= 8) {
    frame.push_back(static_cast<char>(message.size() >> shift & 0xFF));
  }
  return frame.append(message.begin(), message.end());
}

// The length of the message that follows the first kFrameHead bytes.
inline std::size_t frame_size(std::string_view frame) {
  std::size_t size = 0;
  for (const char one : frame.substr(0, kFrameHead)) {
    size = size << 8 | static_cast<unsigned char>(one);
  }
  return size;
}

}  // namespace lockstep
