// How messages speak of a rank.
#pragma once

#include <lockstep/backend.h>

#include <string>

namespace lockstep {

// "rank 2 (host b7, pid 4121)"
std::string describe(const Member& member);

}  // namespace lockstep
