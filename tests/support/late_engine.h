// The engine of the late device: collectives that behave as NCCL's do.
//
// An operation runs in a stream of the engine's own, after what the caller's stream has queued so
// far. wait() makes the caller's current stream wait, not the host; isCompleted() asks an event.
// Below it the engine that the ranks have without the device moves the bytes, in the thread of the
// stream.
#pragma once

#include <cstdint>

namespace lockstep::test::late {

// Makes it known in this process: JoinOptions{.engine = "late"}. Tensors on the CPU go through the
// engine that `auto` is.
void add_engine();

// What NCCL does when a peer is lost: an operation that failed ends, with an exception in its work;
// or, as without NCCL's own watchdog, it never ends (until its engine does).
enum class LostPeer { kFails, kHangs };
void set_lost_peer(LostPeer what);

// The next collective of this process fails once it runs, after it has done its part for the other
// ranks. Then the engine goes on, or refuses all later calls, as NCCL's does after abort().
enum class AfterFailure { kGoesOn, kRefusesAll };
void fail_next(AfterFailure then = AfterFailure::kGoesOn);

// The next wait() of this process for a collective kills it.
void die_in_wait();

// Tensors that engines of this process have allocated for their callers.
std::int64_t num_allocated();

}  // namespace lockstep::test::late
