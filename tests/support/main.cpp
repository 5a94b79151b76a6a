// The main of every test binary; it prints nothing of its own, since ranks run it too.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "support/run_ranks.h"

int main(int argc, char** argv) {
  // Ranks share the machine's few cores: one thread each. OpenMP reads this when it is loaded, so
  // the ranks, which are forked from here, have it from the start.
  const bool has_openmp = ::dlsym(RTLD_DEFAULT, "omp_get_max_threads") != nullptr;
  if (has_openmp && std::getenv("OMP_NUM_THREADS") == nullptr) {
    ::setenv("OMP_NUM_THREADS", "1", 1);
    ::execv("/proc/self/exe", argv);
  }
  testing::InitGoogleTest(&argc, argv);
  const int code = RUN_ALL_TESTS();
  // A rank ends in its test's call of run_ranks: one that comes here has not run what it should.
  constexpr int kNotReached = 3;
  return code == 0 && lockstep::test::is_rank() ? kNotReached : code;
}
