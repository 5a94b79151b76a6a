// One hash for all: XXH3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed = 0);

// 128 bits, of bytes that come in pieces.
class Hasher {
 public:
  Hasher();
  void add(std::string_view bytes);
  std::string hex() const;  // of all bytes so far; as `xxhsum -H2` prints it

 private:
  std::shared_ptr<void> state_;
};

}  // namespace lockstep
