#include "base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lockstep {

std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

}  // namespace lockstep
