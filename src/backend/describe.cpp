#include "backend/describe.h"

#include <fmt/format.h>

namespace lockstep {

std::string describe(const Member& member) {
  return fmt::format("rank {} (host {}, pid {})", member.rank, member.host, member.pid);
}

}  // namespace lockstep
