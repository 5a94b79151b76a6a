// Verify: whether two runs are the same to the bit, and if not, the first step and tensor that
// differ.
#pragma once

#include <string>

#include "launch/inspect.h"

namespace lockstep {

// Both logs of hashes (`lockstep run --hash-every`, ddp/hash_log.h), or both checkpoints or folders
// of them. The code is 0 if all steps that both have are equal, 1 if not. Throws: UsageError,
// SystemError if they cannot be compared.
Report verify(const std::string& left, const std::string& right);

}  // namespace lockstep
