// Worlds with logical ranks, for their tests.
#pragma once

#include <lockstep/world.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace lockstep::test {

// A world of one in this process.
inline World alone(int logical_ranks) {
  return World::join({.engine = "solo",
                      .logical_ranks = logical_ranks,
                      .rank = 0,
                      .size = 1,
                      .store = c10::make_intrusive<c10d::HashStore>()});
}

}  // namespace lockstep::test
