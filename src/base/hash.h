// One hash for all: XXH3, 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

std::uint64_t hash_bytes(const void* data, std::size_t size, std::uint64_t seed = 0);

}  // namespace lockstep
