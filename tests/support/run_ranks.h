// run_ranks: runs a piece of a test on several ranks, each a process of its own.
//
// The ranks are forked from the test, so that each need not load LibTorch, and run `body`, which
// may use whatever the test made before. Where variables matter that a library reads when it is
// loaded, and where a launcher starts the ranks, they are started by exec: copies of the test
// binary that run the same test up to this call, and then `body` instead of it. A test makes one
// such call. Expectations inside `body` fail the rank, and with it the test that looks at the
// result:
//
//   TEST(AllReduce, Sums) {
//     EXPECT_TRUE(all_passed(run_ranks(3, [](int rank) { ... EXPECT_EQ(...); })));
//   }
//
// Every rank finds lockstep's variables set, as under the launcher. All ranks are gone when the
// call returns: those that are not done at the deadline are killed and counted as failed.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"

namespace lockstep::test {

struct RankResult {
  ExitStatus status;
  bool was_late = false;  // killed at the deadline
  std::string output;     // standard output and error, in the order written
  double seconds = 0;     // from the start of the ranks to this one's end
};
using RankResults = std::vector<RankResult>;

struct RankOptions {
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  bool has_place = true;                              // false: no variables are set for the ranks
  bool must_exec = false;                             // as a launcher does
  std::map<std::string, std::string> variables = {};  // set on top, for all ranks
  std::function<std::map<std::string, std::string>(int rank)> rank_variables = {};
  // Commands that start the ranks themselves; the results are those of the commands.
  std::vector<std::vector<std::string>> launchers = {};
};

// Ranks that pretend to be on several hosts; a letter for each rank, such as "aab", names its host.
RankOptions on_hosts(const std::string& layout);

// Whether this process is a rank, on its way to the call of run_ranks.
bool is_rank();

class NetHosts;
// Ranks that `lockstep run` starts on each host; so many on each.
RankOptions on_network(const NetHosts& hosts, const std::vector<int>& ranks);

using RankBody = std::function<void(int rank)>;

// Ranks that run while the test goes on, so that it can disturb them.
class Ranks {
 public:
  Ranks(int size, const RankBody& body, const RankOptions& options = {});
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void kill(int rank, int signal);
  // Waits until the rank has written `text`; throws std::runtime_error at the deadline.
  void wait_for_output(int rank, const std::string& text);
  // Waits for all; call once.
  RankResults wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

RankResults run_ranks(int size, const RankBody& body, const RankOptions& options = {});

// As under mpirun; `more` are options of it.
RankOptions mpirun(int size, const std::vector<std::string>& more = {});

// For EXPECT_TRUE: shows the output of all ranks if one has failed.
testing::AssertionResult all_passed(const RankResults& results);
std::string show(const RankResults& results);

// Counts are multiplied under ./dev test --soak.
int soak(int count_in_ci, int count_in_full);

}  // namespace lockstep::test
