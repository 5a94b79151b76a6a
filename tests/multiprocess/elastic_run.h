// What tests of elastic jobs have in common: how one is started, what it must end with, and whether
// each sample was used once.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/job.h"

namespace lockstep::test {

namespace fs = std::filesystem;

inline constexpr int kRanks = 4;

class Folder {
 public:
  Folder() : path_(testing::TempDir() + "elastic.XXXXXX") { (void)!::mkdtemp(path_.data()); }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::vector<std::string> arguments(const Folder& folder, const std::string& model, int steps,
                                          std::vector<std::string> more,
                                          std::vector<std::string> launcher = {}) {
  std::vector<std::string> all = {"run", "-n", std::to_string(kRanks), "--elastic"};
  all.insert(all.end(), launcher.begin(), launcher.end());
  all.insert(all.end(), {"--", LOCKSTEP_ELASTIC_TRAINER, folder.path() + "/run", model,
                         std::to_string(steps), "log=" + folder.path()});
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

inline constexpr auto kDeadline = std::chrono::minutes(3);  // on a busy machine, under sanitizers

inline JobOptions options() {
  return {.variables = {{"OMP_NUM_THREADS", "1"}}, .deadline = kDeadline};
}

// "weights 7e7ebedc908282ec after 30 steps, sum 30, lr 0.1"
inline std::string result_of(const std::string& out) {
  const std::size_t at = out.find("weights ");
  return at == std::string::npos ? "none" : out.substr(at, out.find(", ", out.find("lr ")) - at);
}

// That of a run of one rank, which nobody disturbs.
inline std::string expected(const std::string& model, int steps) {
  static std::map<std::pair<std::string, int>, std::string> known;
  auto& result = known[{model, steps}];
  if (result.empty()) {
    const Folder folder;
    result = result_of(
        run_job({"run", "-n", "1", "--logical-ranks", std::to_string(kRanks), "--",
                 LOCKSTEP_ELASTIC_TRAINER, folder.path() + "/run", model, std::to_string(steps)},
                options())
            .out);
  }
  return result;
}

// The last step that a rank has begun, as trainers write it to this folder; -1: none.
inline int last_step(const std::string& folder) {
  int last = -1;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.path().filename().string().starts_with("samples.")) continue;
    std::ifstream file(entry.path());
    int step = 0;
    for (std::string line; std::getline(file, line);) {
      if (std::istringstream(line) >> step) last = std::max(last, step);
    }
  }
  return last;
}

// The processes of a job that train.
inline std::vector<pid_t> trainers_of(const Job& job) {
  std::vector<pid_t> found;
  for (const pid_t pid : job.processes()) {
    std::ifstream command("/proc/" + std::to_string(pid) + "/cmdline");
    std::string name;
    std::getline(command, name, '\0');
    if (name == LOCKSTEP_ELASTIC_TRAINER) found.push_back(pid);
  }
  return found;
}

// From the second step on, all ranks are where losses are survived. Throws std::runtime_error.
inline void wait_for_step(const std::string& folder, int step) {
  const auto limit = std::chrono::steady_clock::now() + kDeadline;
  while (last_step(folder) < step) {
    if (std::chrono::steady_clock::now() > limit) {
      throw std::runtime_error("step " + std::to_string(step) + " was not reached");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Each logical rank had the same samples in a step whoever played it, and in each epoch each sample
// was in one step.
inline testing::AssertionResult has_each_sample_once(const Folder& folder, int steps) {
  std::map<std::pair<int, int>, std::string> samples;  // by step and logical rank
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (!entry.path().filename().string().starts_with("samples.")) continue;
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      int step = 0;
      int player = 0;
      words >> step >> player;
      std::string rest;
      std::getline(words, rest);
      const auto [found, is_new] = samples.try_emplace({step, player}, rest);
      // A process may die while it writes.
      if (!is_new && found->second != rest && !found->second.starts_with(rest)) {
        return testing::AssertionFailure() << "step " << step << ", logical rank " << player << ": "
                                           << found->second << " and " << rest;
      }
    }
  }
  if (static_cast<int>(samples.size()) != steps * kRanks) {
    return testing::AssertionFailure()
           << samples.size() << " batches instead of " << steps * kRanks;
  }
  constexpr int kStepsPerEpoch = 7;
  std::map<int, std::set<std::string>> epochs;
  for (const auto& [place, rest] : samples) {
    std::istringstream words(rest);
    for (std::string word; words >> word;) {
      if (!epochs[place.first / kStepsPerEpoch].insert(word).second) {
        return testing::AssertionFailure()
               << "sample " << word << " twice, at step " << place.first;
      }
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace lockstep::test
