// Starting the threads of a loader.
#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace lockstep {

// Adds `count` threads that run work(0), work(1), ... Throws: SystemError if one cannot be started;
// those before it run.
void start_threads(std::vector<std::thread>& threads, std::size_t count,
                   const std::function<void(std::size_t)>& work);

}  // namespace lockstep
