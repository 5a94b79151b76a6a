// Exchanges of short texts between ranks: by the engine, or, from a thread that works in the
// background, by the store, which training does not use.
#pragma once

#include <lockstep/world.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

// The texts of all ranks, in the order of ranks. Collective.
std::vector<std::string> exchange_texts(const World& world, const std::string& mine);

// The same through the store, while a checkpoint is written. `is_cancelled` ends the wait. Throws:
// PeerLostError, TimeoutError that names the rank which did not come.
std::vector<std::string> exchange_by_store(const World& world, const std::string& key,
                                           const std::string& mine,
                                           const std::atomic<bool>& is_cancelled);

// Root's text, on all ranks. Collective.
std::string share_text(const World& world, const std::string& text, int root);

// Whether all ranks give the same number. Collective, with the same answer on all ranks.
bool is_same_everywhere(const World& world, std::uint64_t value);

// Collective. Throws MismatchError on all ranks if the lines differ: it shows the first line that
// does, as rank 0 and as the first other rank have it. `what` differs, and `advice` is a sentence.
void check_same_lines(const World& world, const std::vector<std::string>& lines,
                      const std::string& operation, const std::string& what,
                      const std::string& advice);

// Runs `work` on every rank; what one throws, all throw. Collective.
void do_together(const World& world, const std::string& operation,
                 const std::function<void()>& work);

// Throws the cause of the first rank that has one, the same on all ranks. `causes` are as texts, by
// rank; empty: nothing is wrong there.
void throw_first_cause(const World& world, const std::vector<std::string>& causes,
                       const ErrorPlace& place);

}  // namespace lockstep
