// The address by which ranks of other hosts reach this host.
#pragma once

#include <lockstep/backend.h>

#include <string>

namespace lockstep {

// That from which packets to the master leave. Where the master's name stands for the own loopback,
// as Debian enters a host's own name, that of the only network there is.
// Throws UsageError if only this host itself could reach it.
std::string own_address(const EngineContext& context);

// Throws UsageError if there is no such network interface, or only this host itself could reach it.
void check_interface(const std::string& name, int rank);

}  // namespace lockstep
