// Calls that must end with a MismatchError, on all ranks and soon.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::test {

// Within a second or so; the limit is for machines that are busy.
inline void expect_mismatch(const std::function<void()>& call,
                            const std::vector<std::string>& words) {
  const auto start = std::chrono::steady_clock::now();
  try {
    call();
    ADD_FAILURE() << "it ended";
  } catch (const MismatchError& error) {
    for (const std::string& one : words) {
      EXPECT_NE(error.message().find(one), std::string::npos) << one << "\nin " << error.what();
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::cout << "took " << took.count() << " s" << std::endl;
  EXPECT_LT(took.count(), 15);
  // So that nobody is seen to be gone before all have thrown.
  std::this_thread::sleep_for(std::chrono::seconds(2));
}

}  // namespace lockstep::test
