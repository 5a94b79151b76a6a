#define FMT_HEADER_ONLY
#include "base/text.h"

#include <fmt/format.h>

namespace lockstep::text {

std::string render(fmt::string_view format, fmt::format_args args) {
  return fmt::vformat(format, args);
}

}  // namespace lockstep::text
