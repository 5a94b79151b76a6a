// Guard: what makes sure that nothing outlives `lockstep run`.
//
// The launcher is two processes. The outer one is the one that people see and signal: it passes
// signals on, and waits. The inner one does the work. Each is told by the kernel when the other
// dies, even by SIGKILL, and then ends all processes of the job; both adopt orphans, so that ranks'
// children are found wherever they have gone.
//
// Neither counts on the thread that works: it may hang in the kernel. The guard gives it a deadline
// from the first interrupt on, and another thread sees to the ranks if the guard is dead.
#pragma once

#include <chrono>
#include <csignal>
#include <functional>

namespace lockstep {

// The signals that the launcher listens to: not those that it was started to ignore, as by nohup.
// They are blocked while `work` runs.
sigset_t launcher_signals();

// Runs `work` in a process of its own, guarded, and returns what the launcher is to exit with.
// `work` gets SIGQUIT when it is to end all at once. After an interrupt it has `stop_grace` for the
// ranks, and some seconds for itself.
int run_guarded(const std::function<int()>& work, std::chrono::milliseconds stop_grace);

}  // namespace lockstep
