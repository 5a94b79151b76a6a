#include "base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/text.h"

namespace lockstep {

std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

Hasher::Hasher() : state_(XXH3_createState(), [](XXH3_state_t* state) { XXH3_freeState(state); }) {
  XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_.get()));
}

void Hasher::add(std::string_view bytes) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_.get()), bytes.data(), bytes.size());
}

std::string Hasher::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(static_cast<XXH3_state_t*>(state_.get()));
  return text::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace lockstep
