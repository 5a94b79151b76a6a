// run: `lockstep run`, from options to exit code.
#pragma once

#include "launch/run_options.h"

namespace lockstep {

// In a guarded process (guard.h). Returns the exit code.
int run(const RunOptions& options);

// What run() would start, one line a rank.
std::string describe_run(const RunOptions& options);

}  // namespace lockstep
