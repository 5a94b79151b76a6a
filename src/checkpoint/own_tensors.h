// What a rank keeps for itself: the state of its comm hooks. Each rank has a file of it, beside
// those of the tensors that all ranks have alike.
#pragma once

#include <lockstep/ddp.h>

#include <string>
#include <vector>

namespace lockstep {

// "rank-0-of-2.safetensors"
std::string own_file(int rank, int size);
bool is_own_file(const std::string& name);

// What this rank has to save.
std::vector<NamedTensor> own_tensors(const std::vector<DistributedDataParallel*>& ddps, int rank);

// What it has to load, for each wrapped model: its own file, if the checkpoint was made by as many
// ranks as there are now, else the mean of all, which rank `reader` takes. A rank that does not see
// its file gets it from there, too. Nothing is changed yet. Collective.
// Throws, on all ranks: SystemError, UsageError if a file is not there, or of another model.
std::vector<HookState> read_own_tensors(const World& world, const std::string& checkpoint,
                                        int saved_size, int reader,
                                        const std::vector<DistributedDataParallel*>& ddps);

}  // namespace lockstep
