// What hooks have in common.
#pragma once

#include <lockstep/comm_hook.h>

#include <functional>

namespace lockstep {

// Starts the mean over ranks of a contiguous tensor, uncompressed; the tensor holds it once the
// returned function has run. The bits are those of a sum over ranks divided by their number.
std::function<void()> start_mean(const at::Tensor& tensor, HookComm& comm);

}  // namespace lockstep
