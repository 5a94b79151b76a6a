// Exchanges of short texts between ranks when a checkpoint is saved: by the engine, or, from the
// thread that writes in the background, by the store, which training does not use.
#pragma once

#include <lockstep/world.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

// All ranks' texts, by rank. `is_cancelled` ends the wait. Throws: PeerLostError,
// TimeoutError that names the rank which did not come.
std::vector<std::string> exchange_by_store(const World& world, const std::string& key,
                                           const std::string& mine,
                                           const std::atomic<bool>& is_cancelled);

// Root's text, on all ranks. Collective.
std::string share_text(const World& world, const std::string& text, int root);

}  // namespace lockstep
