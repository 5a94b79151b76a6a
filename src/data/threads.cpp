#include "data/threads.h"

#include <lockstep/error.h>

#include <system_error>

#include "base/text.h"

namespace lockstep {

void start_threads(std::vector<std::thread>& threads, std::size_t count,
                   const std::function<void(std::size_t)>& work) {
  try {
    threads.reserve(count);
    for (std::size_t i = 0; i < count; ++i) threads.emplace_back(work, i);
  } catch (const std::system_error& error) {
    throw SystemError({.operation = "Loader"}, error.code().value(),
                      text::format("Of {} threads of a loader {} could be started: {}.\nUse fewer "
                                   "(LoaderOptions::threads), or allow more to this process.",
                                   count, threads.size(), error.code().message()));
  }
}

}  // namespace lockstep
