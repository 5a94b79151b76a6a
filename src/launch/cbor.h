// What may be parsed as a message: nlohmann's reader of CBOR calls itself for everything that is
// inside something else, so a stranger's nesting would end the stack.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

// Whether these bytes are one value of CBOR as nlohmann::json writes it: complete, nested 32 levels
// deep at most, without tags and without texts or lists of unknown length.
bool is_plain_cbor(const std::uint8_t* bytes, std::size_t size);

}  // namespace lockstep
