// Which device each rank computes on: decided from what ranks tell of themselves when they join, so
// that all of them come to the same answer, or the same error, without a further word.
#pragma once

#include <c10/core/Device.h>
#include <lockstep/backend.h>

#include <string>
#include <vector>

namespace lockstep {

// Fills in the devices that this process sees.
void look_at_devices(Member& self);

// Gives each member one of the devices that it sees: those of a host that see the same ones get one
// each, in the order of their local ranks, as far as there are enough.
void number_devices(std::vector<Member>& members);

// World::device. `takes_devices`: the engine does. Throws UsageError.
at::Device choose_device(const std::vector<Member>& members, int rank, const std::string& name,
                         bool takes_devices);

}  // namespace lockstep
