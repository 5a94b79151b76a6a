// Worlds on every engine: what a suite needs to run each of its tests on all of them.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "support/run_ranks.h"

namespace lockstep::test {

// An engine, and a letter for each rank that names its host.
struct OnEngine {
  std::string engine;
  std::string hosts;

  bool is_mpi() const { return engine.ends_with("mpi"); }
  int size() const { return static_cast<int>(hosts.size()); }
  bool compares_calls() const { return engine != "gloo"; }  // by itself
};

inline std::string name_of(const testing::TestParamInfo<OnEngine>& test) {
  std::string name = test.param.engine + "_" + test.param.hosts;
  std::ranges::replace(name, ':', '_');
  return name;
}

// All engines of this build that connect ranks, for suites of `size` ranks (3 or 4).
inline std::vector<OnEngine> all_engines(int size) {
  const bool is_four = size == 4;
  std::vector<OnEngine> rows = {{"shm", is_four ? "aaaa" : "aaa"},
                                {"hierarchical", is_four ? "aabb" : "aab"},
                                {"gloo", is_four ? "aaaa" : "aaa"},
                                {"mpi", is_four ? "aaaa" : "aaa"}};
  if (is_four) {
    rows.push_back({"hierarchical", "abab"});
    rows.push_back({"hierarchical:mpi", "aabb"});
  }
  std::erase_if(rows, [](const OnEngine& row) {
    return std::ranges::any_of(engines(), [&](const EngineInfo& info) {
      return !info.unavailable.empty() && row.engine.find(info.name) != std::string::npos;
    });
  });
  return rows;
}

// Why it is not in this build; empty if it is.
inline std::string why_no_engine(const std::string& name) {
  for (const EngineInfo& info : engines()) {
    if (info.name == name) return info.unavailable;
  }
  return "there is no engine " + name;
}

// Those of them on which a suite makes sense.
inline std::vector<OnEngine> engines_where(int size,
                                           const std::function<bool(const OnEngine&)>& fits) {
  std::vector<OnEngine> rows = all_engines(size);
  std::erase_if(rows, [&](const OnEngine& row) { return !fits(row); });
  return rows;
}
inline bool can_lose_ranks(const OnEngine& row) { return !row.is_mpi(); }  // mpirun ends all ranks

// Runs `body` on all ranks of such a world. Ranks die and stop, too, so that the results are the
// caller's to look at.
inline RankResults run_on(const OnEngine& row, const std::function<void(const World&)>& body,
                          std::chrono::milliseconds timeout = std::chrono::seconds(40)) {
  RankOptions options = row.is_mpi() ? mpirun(row.size()) : RankOptions{};
  const std::chrono::milliseconds in_soak = std::chrono::minutes(soak(0, 15));
  options.deadline = std::max({options.deadline, timeout, in_soak});
  return run_ranks(
      row.size(),
      [&](int rank) {
        // Here, because mpirun gives all ranks the same variables.
        ::setenv("LOCKSTEP_HOST_ID", row.hosts.substr(static_cast<std::size_t>(rank), 1).c_str(),
                 1);
        body(World::join({.engine = row.engine, .timeout = timeout}));
      },
      options);
}

// Runs f, which must throw E, and gives back the error.
template <typename E>
E thrown_by(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& error) {
    return error;
  } catch (const std::exception& other) {
    throw std::runtime_error(std::string("another error was thrown: ") + other.what());
  }
  throw std::runtime_error("nothing was thrown");
}

inline void expect_says(const Error& error, const std::vector<std::string>& words) {
  for (const std::string& one : words) {
    EXPECT_NE(error.message().find(one), std::string::npos) << one << "\nin " << error.what();
  }
}

}  // namespace lockstep::test
