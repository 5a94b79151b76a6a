// What the tests of DistributedDataParallel's care have in common, and a way to write one that runs
// on shared memory as a test of its own, and over the late device as a check of its contract.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <functional>
#include <string>
#include <vector>

#include "multiprocess/checks.h"
#include "multiprocess/ddp_model.h"
#include "support/run_ranks.h"

namespace lockstep::test {

inline void run(int size, const std::function<void(const World&)>& body,
                const char* engine = "shm") {
  EXPECT_TRUE(all_passed(run_ranks(size, [&](int) { body(World::join({.engine = engine})); })));
}

// Runs `call` on all ranks; every rank must throw an error of type E whose text has all of `words`.
template <typename E>
void expect_error(const std::function<void()>& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const E& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "no '" << word << "' in: " << error.what();
    }
  }
}

inline void backward(Net& model, const World& world, int step = 0) {
  loss_of(model->forward(batch(world.rank(), step))).backward();
}

// LOCKSTEP_CARE(Suite, Name, ranks) { ... }, with `const World& world`.
#ifdef LOCKSTEP_CARE_ON_DEVICE
#define LOCKSTEP_CARE(suite, name, ranks)                                      \
  void suite##_##name(const World& world);                                     \
  const Check check_##suite##_##name(#suite "." #name, suite##_##name, ranks); \
  void suite##_##name(const World& world)
#else
#define LOCKSTEP_CARE(suite, name, ranks)           \
  void suite##_##name(const World& world);          \
  TEST(suite, name) { run(ranks, suite##_##name); } \
  void suite##_##name(const World& world)
#endif

}  // namespace lockstep::test
