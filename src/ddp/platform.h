// Platform: what LibTorch chooses its kernels by, and with them the order of sums.
#pragma once

#include <string>

namespace lockstep {

// LibTorch's version, the instruction set that it uses, the model of the CPU, and the variables of
// LibTorch's libraries that change their choice.
std::string platform();

// Whether LOCKSTEP_ANY_PLATFORM allows a run to go on elsewhere, with other bits.
bool is_any_platform_allowed();

}  // namespace lockstep
