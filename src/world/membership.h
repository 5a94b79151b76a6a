// Membership: this process's place in an elastic job, one generation after the other. It asks the
// launcher, which knows who lives, for the next one.
//
// Threading: one thread at a time; is_change_wanted() and has_ended() from any.
#pragma once

#include <lockstep/world.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/notice.h"
#include "world/environment.h"
#include "world/launcher_store.h"

namespace lockstep {

// As launch/roster.h numbers its answers.
enum class NextKind { kWait, kJoin, kLeave, kIntact, kRefused };

struct NextGeneration {
  NextKind kind = NextKind::kWait;
  int number = 0;
  int rank = 0;
  int size = 0;
  std::vector<std::string> changes = {};  // what led to it, for people
};

class Membership {
 public:
  // What World::join() was called with: the next generation is joined in the same way.
  Membership(c10::intrusive_ptr<c10d::Store> line, int notice_fd, JoinOptions options,
             Placement placement);

  // The program has come to the part that survives losses.
  // `kind`: what ranks of a job must have in common.
  void enter(int num_logical, const std::string& kind);
  // Said by one rank: the first step of this generation is complete.
  void tell_step(int generation);
  // The training is complete here. Waits until it is on all ranks. Throws: PeerLostError if one was
  // lost before.
  void finish();
  // A change is to be made at the end of a step.
  bool is_change_wanted(int generation) const { return notice_.wanted() > generation; }
  // A rank of that generation is lost, so that no step of it can end.
  bool has_ended(int generation) const { return notice_.has_ended(generation); }

  // Waits until there is a generation after `from` for this process. Returns kIntact if the
  // launcher has not heard of a loss for a while, kLeave if this process is not needed. Throws:
  // TimeoutError, PeerLostError (the launcher is gone).
  NextGeneration wait_for_next(int from, bool is_planned, const std::string& kind);

  const c10::intrusive_ptr<c10d::Store>& store() const { return line_; }
  const JoinOptions& options() const { return options_; }
  const Placement& placement() const { return placement_; }

 private:
  const c10::intrusive_ptr<c10d::Store> line_;
  const Notice notice_;
  const JoinOptions options_;
  const Placement placement_;
};

}  // namespace lockstep
