// Elastic: a training that goes on when ranks are lost, with the weights of one that lost none.
//
//   auto world = lockstep::World::join({.logical_ranks = 8});
//   ... model, ddp, optimizer, loader ...
//   lockstep::Checkpointer checkpoints("runs/a", world);
//   checkpoints.add(model).add(optimizer).add(schedule).add(loader).add(ddp);
//   lockstep::Elastic elastic(checkpoints, checkpoints.load_latest().step);
//   const bool is_complete = elastic.run([&] {
//     while (elastic.steps() < total) {
//       for (const auto& batch : loader) {  // goes on where the last complete step ended
//         const auto turn = ddp.play();
//         loss_of(model, batch).backward();
//         if (!turn.is_last) continue;
//         optimizer.step();
//         optimizer.zero_grad();
//         schedule.step();
//         elastic.commit();  // the step is complete
//       }
//     }
//   });
//   if (!is_complete) return 0;  // this process was told to leave
//
// `lockstep run --elastic` starts such a job. When a rank is lost, the step under way is done again
// by those who are left; a process that the launcher starts in its place gets all that was added to
// the Checkpointer from the memory of the others. Under other launchers, and alone, run() calls its
// argument once and costs nothing. docs/elastic.md has the rules.
// Threading: the thread that trains.
#pragma once

#include <lockstep/checkpoint.h>
#include <lockstep/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

// The ranks of a job have changed.
struct ElasticChange {
  int generation = 0;
  int size = 0;                           // ranks, from now on
  std::int64_t step = 0;                  // that is done next
  bool is_redone = false;                 // it had begun before
  std::vector<std::string> reasons = {};  // who was lost, and how; on rank 0 only
  int num_joined = 0;                     // ranks that are new
  double seconds = 0;                     // from the loss, as this rank noticed it, until now
  std::int64_t bytes = 0;                 // of state that ranks behind were given
};

class LOCKSTEP_API Elastic {
 public:
  // What the Checkpointer saves is what survives. `steps` are those that are complete already, as
  // load_latest() returns them. Throws: UsageError if the launcher is elastic and the world has no
  // logical ranks, an engine that cannot lose a rank (mpi), or no wrapped model was added.
  explicit Elastic(Checkpointer& checkpoints, std::int64_t steps = 0);
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // Calls `train`, and again each time the ranks have changed, until it returns on all of them.
  // It must go on from the state of what was added to the Checkpointer, as after load_latest().
  // Returns false on a rank that was told to leave. Throws what `train` throws, unless a rank was
  // lost; UsageError if no rank has the state of a complete step any more: then the last checkpoint
  // is the newest.
  [[nodiscard]] bool run(const std::function<void()>& train);

  // The step is complete. Call it after the last thing that changes state (optimizer, schedule,
  // scaler), and before anything collective. It does not return if ranks are to change now: run()
  // then calls `train` again.
  void commit();
  std::int64_t steps() const;  // complete ones

  // Called on all ranks after each change, before `train` is.
  void on_change(std::function<void(const ElasticChange&)> call);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
