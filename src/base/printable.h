// Texts of strangers, so that they can be shown on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// `text` with everything that would move the cursor, colour, reorder or hide what is shown written
// as "\x1b": control characters, those that change the direction of writing, and what is no UTF-8.
std::string printable(std::string_view text);

// The same, but lines stay lines.
std::string printable_lines(std::string_view text);

}  // namespace lockstep
